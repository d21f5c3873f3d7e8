"""Native kernels for the CPU: C++17, built beside this package, called through raw pointers.

`register` makes them known to the registry; where the library was not built the references serve, and the log says so once.
"""

import functools

from quire.logger import init_logger

logger = init_logger(__name__)


def register() -> None:
    """Make the native kernels known to the registry, and say so if they cannot serve. May be called again."""
    from quire.kernels.cpu import (  # register at import  # noqa: F401
        attention,
        experts,
        latent,
        linear,
        norm,
        packed,
        recurrent,
        sampling,
    )

    _report()


@functools.cache
def _report() -> None:
    available, isa, reason = library_status()
    if available:
        logger.debug("CPU kernels: %s", isa)
    else:
        logger.warning("%s. The plain PyTorch kernels serve instead, several times slower.", reason)


def library_status() -> tuple[bool, str, str]:
    """(available, instruction set, reason why not)."""
    from quire.kernels.cpu.library import load

    found, why = load()
    return (False, "", why) if found is None else (True, found.isa, "")


def set_num_threads(count: int) -> None:
    """Use `count` threads, the caller's included; nothing happens where the library is missing.

    Raises:
        ConfigError: count is below 1.
    """
    from quire.kernels.cpu.library import load

    found, _ = load()
    if found is not None:
        found.set_num_threads(count)
