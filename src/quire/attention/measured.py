"""Where another library's attention was measured to be faster than our own kernels: what decides when nobody names a backend.

An entry comes from `tools/gpu/attention_backends.py` and names the file of its figures in `bench/results`. What has no entry
was not measured, or was not faster.
"""

import dataclasses

DECODE, PROMPT = "decode", "prompt"
STEPS = frozenset((DECODE, PROMPT))
"""A step in which every request computes one token; any other."""


@dataclasses.dataclass(frozen=True)
class Faster:
    """A library's attention beats ours in steps of one kind.

    Attributes:
        backend: its name here.
        step: DECODE or PROMPT (prompts alone and mixed with decoding).
        head_dim: size of a head.
        capability: of the GPU, (9, 0) for Hopper.
        source: a file in `bench/results`.
    """

    backend: str
    step: str
    head_dim: int
    capability: tuple[int, int]
    source: str


FASTER: tuple[Faster, ...] = ()
"""Nothing so far. There are figures of one shape (`h200-attention-backends.json`): a request of 512 tokens, 32/8 heads of 128,
takes 7.6 us a layer by our kernel, 11.2 by FlashInfer's and 13.7 by FlashAttention-4's."""


def faster_steps(backend: str, head_dims: set[int], capability: tuple[int, int]) -> frozenset[str]:
    """The kinds of steps in which a backend is faster for heads of every one of these sizes."""
    known = {
        (entry.step, entry.head_dim) for entry in FASTER if (entry.backend, entry.capability) == (backend, capability)
    }
    return frozenset(step for step in STEPS if head_dims and all((step, size) in known for size in head_dims))
