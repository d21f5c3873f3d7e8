"""Triton kernels: what a GPU computes with. `register` makes the registry know them; a platform then chooses.

They run without a GPU too, one program after another in Triton's interpreter (TRITON_INTERPRET=1): slow, but the same code.
"""

import importlib

MODULES: tuple[str, ...] = (
    "step",
    "norms",
    "heads",
    "activations",
    "gather",
    "sampling",
    "linear",
    "linear_embedding",
    "moe",
    "filters",
    "penalties",
    "logprobs",
    "rope",
    "paged_attention",
    "latent",
    "fp8",
    "packed",
    "recurrent",
    "recurrent_scan",
    "recurrent_selective",
    "recurrent_ssd",
    "recurrent_delta",
    "recurrent_channels",
)
"""The modules of this package that register kernels."""


def register() -> None:
    """Make every kernel of this package known; again has no effect."""
    for module in MODULES:
        importlib.import_module(f"{__name__}.{module}")
