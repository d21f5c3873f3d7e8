"""Triton kernels: what a GPU computes with. `register` makes the registry know them; a platform then chooses.

A folder is a family, named as the file of `quire/kernels/` that declares its operations; `launch.py` is what all kernels share,
`runtime/` is Quire's way around Triton's own start. They run without a GPU too, one program after another in Triton's interpreter
(TRITON_INTERPRET=1): slow, but the same code.
"""

import importlib

MODULES: tuple[str, ...] = (
    "step",
    "adapters",
    "norm.norms",
    "norm.heads",
    "norm.activations",
    "norm.gather",
    "sampling.draw",
    "linear.matmul",
    "linear.embedding",
    "experts.mixture",
    "sampling.filters",
    "sampling.penalties",
    "sampling.logprobs",
    "attention.rope",
    "attention.paged_attention",
    "attention.latent",
    "fp8.matmul",
    "packed.matmul",
    "recurrent.conv",
    "recurrent.scan",
    "recurrent.selective",
    "recurrent.ssd",
    "recurrent.delta",
    "recurrent.channels",
)
"""The modules of this package that register kernels."""


def register() -> None:
    """Make every kernel of this package known; again has no effect."""
    for module in MODULES:
        importlib.import_module(f"{__name__}.{module}")
