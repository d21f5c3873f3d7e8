"""Plain PyTorch implementations: the oracle for every kernel, and what runs where nothing faster can.

Slow and obvious on purpose. Works on any device and dtype; arithmetic in float32.
"""

from quire.kernels.reference import (
    attention,
    compressed,
    elementwise,
    filters,
    fp8,
    hyper,
    latent,
    linear,
    logprobs,
    moe,
    packed,
    penalties,
    recurrent,
    sampling,
    sparse,
    step,
)

__all__ = [
    "attention",
    "compressed",
    "elementwise",
    "filters",
    "fp8",
    "hyper",
    "latent",
    "linear",
    "logprobs",
    "moe",
    "packed",
    "penalties",
    "recurrent",
    "sampling",
    "sparse",
    "step",
]
