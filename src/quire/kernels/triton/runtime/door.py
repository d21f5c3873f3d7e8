"""The door into Triton: what Quire puts in Triton's places, and nowhere else.

- `knobs.cache.manager_class` and `runtime.cache.triton_key` become `cache.KernelCache`: compiled kernels lie in Quire's folders,
  and their key is made without reading 400 MB.
- The active driver becomes `driver.Driver`: it loads and launches without a C compiler.
- `JITFunction.run` and `JITFunction.__getitem__` become `direct_launch`: a known kernel goes straight to its launcher.
- `compiler.compile` becomes `variants.Recorder.compile`: it lists what a start needs. While it rehearses, nothing is launched.

The first and the last check nothing of Triton's inside; the driver subclasses Triton's own, and `direct_launch` compares Triton
with what it expects and leaves it as it is where that differs.
"""

from collections.abc import Callable

import triton

from quire.kernels.triton.runtime import cache, direct_launch, driver, variants
from quire.kernels.triton.runtime.places import Variant


def install_driver() -> None:
    """Make ours the driver that Triton uses in this process, and have it launch by itself what was launched before."""
    ours = driver.Driver()
    triton.runtime.driver.set_active(ours)
    direct_launch.install(ours.get_current_device, ours.get_current_stream)


def install(before: Callable[[Variant], None]) -> variants.Recorder:
    """Put everything in place for this process, and note what it launches from now on. May be called again.

    Args:
        before: called with each variant before Triton looks for it.
    """
    cache.install()
    install_driver()
    return variants.recorder(before)
