"""The version that programs of vLLM see: that of the release whose names Quire has."""

from quire.engine.vllm_settings import LIST

__version__: str = LIST["vllm"]
__version_tuple__ = tuple(int(part) for part in __version__.split("."))
VERSION = __version__
