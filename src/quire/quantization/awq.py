"""AWQ checkpoints (AutoAWQ): 4-bit codes in int32 words, along the outputs and in an order of their own (`gemm`), or along the
inputs (`gemv`)."""

import torch

from quire.config.hf_config import HFConfig
from quire.layers.linear import ROWS, WHOLE, Axis, Decoded, Stored
from quire.quantization.codes import unpack_words, weight_of_words
from quire.quantization.integers import INT32, words
from quire.quantization.scheme import Form, Scheme, SchemeOf, Tensors, all_but, one_of

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of eight outputs in their word."""
GEMM = ("gemm", "exllama", "ipex")
"""The last two are kernels, which take what is stored for the first."""


def parse(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `awq` stores each matrix.

    Raises:
        ConfigError: other bits, or another packing.
    """
    one_of("bits", section.get("bits", section.get("w_bit", 4)), (4,))
    version = str(section.get("version") or section.get("format") or "gemm").lower()
    group = int(section.get("group_size", section.get("q_group_size", 128)))
    has_zeros = bool(section.get("zero_point", True))
    is_gemv = one_of("version", version, (*GEMM, "gemv")) == "gemv"
    return all_but(section.get("modules_to_not_convert"), _gemv(group) if is_gemv else gemm(group, has_zeros))


def gemm(
    group: int,
    has_zeros: bool,
    suffixes: tuple[str, str, str] = ("qweight", "scales", "qzeros"),
    is_ordered: bool = True,
) -> Scheme:
    """Words along the outputs, each row of them an input's.

    Args:
        has_zeros: the checkpoint must have them.
        suffixes: of codes, scales and zeros.
        is_ordered: a word has its eight outputs in `ORDER`, rather than one after another.
    """
    return words(
        f"int4 (AWQ), groups of {group}",
        suffixes,
        4,
        WHOLE if group < 0 else group,
        along="rows",
        order=ORDER if is_ordered else None,
        zeros="words" if has_zeros else "optional words",
        is_transposed=True,
    )


def _gemv(group: int) -> Scheme:
    """Zeros and scales of a row are filled up to whole words, of a number that depends on the group."""
    size = WHOLE if group < 0 else group
    num_words = {64: 2, 32: 4}.get(group, 1)

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        groups = -(-shape[1] // size)
        zeros_NG = unpack_words(tensors["qzeros"], 4, 1)[:, :groups]
        return weight_of_words(
            tensors["qweight"], shape[1], tensors["scales"][:, :groups], zeros_NG, 4, dtype, min(size, shape[1])
        )

    tensors = {
        "qweight": Stored((ROWS, Axis("columns", 8, is_packed=True)), INT32),
        "qzeros": Stored((ROWS, Axis("columns", size * 8 * num_words, num_words, is_packed=True)), INT32),
        "scales": Stored((ROWS, Axis("columns", size * 8 * num_words, num_words * 8))),
    }
    return Scheme(f"int4 (AWQ gemv), groups of {group}", tensors, decode, Form("packed", 4, size, True))
