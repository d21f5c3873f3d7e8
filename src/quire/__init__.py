"""Quire: an engine that runs and serves large language models."""

from quire.version import __version__, __version_tuple__

__all__ = ["__version__", "__version_tuple__"]
