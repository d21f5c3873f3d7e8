"""What of the Triton kernels is NVIDIA's alone, what it stands behind, and what takes its place elsewhere.

For `quire explain --platform`, and for a test that finds a part which this list lacks. Imports no kernel.
"""

from typing import NamedTuple

from quire.kernels.triton.launch import is_nvidia


class NvidiaOnly(NamedTuple):
    """A part that only NVIDIA's GPUs can run.

    Attributes:
        files: where it is, in `quire/` (of a folder: all its files).
        behind: what must hold for it to be used.
        instead: what is used where it does not hold.
    """

    what: str
    files: tuple[str, ...]
    behind: str
    instead: str


_KERNELS = "kernels/triton"
PARTS = (
    NvidiaOnly(
        "programmatic dependent launch, and prefetching before it",
        tuple(f"{_KERNELS}/{name}" for name in ("launch.py", "attention/decode_kernel.py", "attention/hopper_load.py")),
        "compute capability 9.0",
        "kernels that follow one another",
    ),
    NvidiaOnly(
        "attention of prompts by wgmma and TMA (Gluon)",
        tuple(f"{_KERNELS}/attention/{name}" for name in ("hopper.py", "hopper_kernel.py", "hopper_load.py")),
        "compute capability 9.x, and a release of Triton whose Gluon it is written in",
        "the portable kernel of attention/prefill.py",
    ),
    NvidiaOnly(
        "tiles of experts' weights by bulk copies (TMA)",
        (f"{_KERNELS}/experts/grouped.py",),
        "nothing of ours: Triton makes them where the device has them",
        "ordinary loads, by Triton itself",
    ),
    NvidiaOnly(
        "pages read, and float8 pages unpacked, in assembly",
        (f"{_KERNELS}/attention/decode_tiles.py",),
        "an NVIDIA GPU",
        "the same in Triton's language",
    ),
    NvidiaOnly(
        "4-bit codes decoded and multiplied in assembly",
        tuple(f"{_KERNELS}/packed/{name}" for name in ("layout.py", "vector.py")),
        "compute capability 9.0",
        "the same in Triton's language; one row takes the kernel of few rows",
    ),
    NvidiaOnly(
        "products of float8 weights",
        (f"{_KERNELS}/fp8/vector.py",),
        "compute capability 8.9",
        "the plain PyTorch reference, which converts the weights at each use: slow",
    ),
    NvidiaOnly(
        "the fast logarithm of approximate scores",
        (f"{_KERNELS}/sampling/draw.py",),
        "an NVIDIA GPU",
        "Triton's own; the exact score decides in both",
    ),
    NvidiaOnly(
        "compiling ahead, launching through the CUDA driver without Triton's bookkeeping",
        (f"{_KERNELS}/runtime",),
        "the cuda platform",
        "Triton's own launches and cache; kernels compile when a start first uses them",
    ),
    NvidiaOnly(
        "the device's context made while torch is imported",
        ("worker/startup.py",),
        "the cuda platform",
        "the context is made when torch first needs it",
    ),
    NvidiaOnly(
        "sums of small tensors by reading the other GPUs' memory",
        ("distributed/peer_memory.py",),
        "NVLink, and the cuda platform",
        "the vendor's library of collectives",
    ),
)


def explain() -> list[dict[str, str]]:
    """Each part as plain values, with whether the present vendor's kernels may have it."""
    usable = "may be used" if is_nvidia() else "not used"
    return [{"what": each.what, "here": usable, "behind": each.behind, "instead": each.instead} for each in PARTS]
