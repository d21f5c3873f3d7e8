"""The process environment that Quire wants, set when the package is imported, for this process and all its children.

It must run before torch is imported by anyone: some of these are read while libraries load. Imports nothing but `os`
unless it has something to say.
"""

import os

IMEX_CHANNELS = "/dev/nvidia-caps-imex-channels"
"""Exists where NVLink spans several hosts; such memory needs NCCL's cuMem allocator."""


def _choose_nccl_allocator() -> None:
    """Turn NCCL's cuMem allocator off: captured all-reduce graphs keep extra memory alive with it."""
    chosen = os.environ.get("NCCL_CUMEM_ENABLE")
    if chosen is not None and chosen != "0":
        from quire.logger import init_logger

        init_logger(__name__).warning(
            "NCCL_CUMEM_ENABLE is set to %s and is kept. Captured graphs with all-reduce may take more memory than with "
            "NCCL_CUMEM_ENABLE=0, which Quire would have chosen.",
            chosen,
        )
    elif chosen is None and not os.path.exists(IMEX_CHANNELS):
        os.environ["NCCL_CUMEM_ENABLE"] = "0"


def _apply() -> None:
    _choose_nccl_allocator()
    # Asking whether CUDA is available goes through NVML and does not initialise CUDA in this process.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Importing torch starts no pool of compile processes.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


_apply()
