"""The version of Quire. Stands alone: imports nothing, so that anything may import it."""

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)
