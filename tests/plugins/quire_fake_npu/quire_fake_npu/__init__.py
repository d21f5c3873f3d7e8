"""A made-up device for Quire, which shows all that a hardware plugin consists of.

`probe` is the entry point. It loads neither torch nor anything else of this package: every process of Quire asks it.
"""

import shutil


def probe() -> str | None:
    """The platform's class path if the device can be used here: its driver is built by a C++ compiler. None if not."""
    return "quire_fake_npu.platform:NpuPlatform" if shutil.which("g++") else None
