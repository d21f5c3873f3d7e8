"""AWQ checkpoints (AutoAWQ): 4-bit codes in int32 words, along the outputs and in an order of their own (`gemm`), or along the
inputs (`gemv`)."""

import torch

from quire.config.hf_config import HFConfig
from quire.layers.linear import COLUMNS, ROWS, WHOLE, Axis, Decoded, Stored
from quire.quantization.codes import packed_weight, unpack_words, weight_of_words
from quire.quantization.scheme import Form, Scheme, SchemeOf, Tensors, is_within, refused

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which of a word's eight places each of its eight outputs stands."""
INT32 = (torch.int32,)
GEMM = ("gemm", "exllama", "ipex")
"""The last two are kernels, which take what is stored for the first."""


def parse(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `awq` stores each matrix.

    Raises:
        ConfigError: other bits, or another packing.
    """
    bits = section.get("bits", section.get("w_bit", 4))
    if bits != 4:
        raise refused("bits", bits, "4")
    version = str(section.get("version") or section.get("format") or "gemm").lower()
    group = int(section.get("group_size", section.get("q_group_size", 128)))
    has_zeros = bool(section.get("zero_point", True))
    if version == "gemv":
        scheme = _gemv(group)
    elif version in GEMM:
        scheme = gemm(group, has_zeros)
    else:
        raise refused("version", version, ", ".join((*GEMM, "gemv")))
    plain = [str(name) for name in section.get("modules_to_not_convert") or []]

    def scheme_of(source: str) -> Scheme | None:
        return None if source == "lm_head" or is_within(plain, source) else scheme

    return scheme_of


def gemm(
    group: int,
    has_zeros: bool,
    suffixes: tuple[str, str, str] = ("qweight", "qzeros", "scales"),
    is_ordered: bool = True,
) -> Scheme:
    """Words along the outputs, each row of them an input's.

    Args:
        has_zeros: the checkpoint must have them.
        suffixes: of codes, zeros and scales.
        is_ordered: eight outputs stand in `ORDER` in their word, rather than one after another.
    """
    codes, zeros, scales = suffixes
    size = WHOLE if group < 0 else group

    def unpack(words: torch.Tensor) -> torch.Tensor:
        found = unpack_words(words, 4, 1)
        return found.unflatten(1, (-1, 8))[:, :, list(ORDER)].flatten(1) if is_ordered else found

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        zeros_NG = unpack(tensors[zeros]).T[: shape[0]] if zeros in tensors else None
        return packed_weight(unpack(tensors[codes]).T[: shape[0]], tensors[scales].T, zeros_NG, 4, dtype, size)

    eights, groups = Axis("rows", 8, is_packed=True), Axis("columns", size)
    tensors = {
        codes: Stored((COLUMNS, eights), INT32),
        zeros: Stored((groups, eights), INT32, optional=not has_zeros),
        scales: Stored((groups, ROWS)),
    }
    return Scheme(f"int4 (AWQ), groups of {group}", tensors, decode, Form("packed", 4, size, True))


def _gemv(group: int) -> Scheme:
    """Zeros and scales of a row are filled up to whole words, of a number that depends on the group."""
    size = WHOLE if group < 0 else group
    words = {64: 2, 32: 4}.get(group, 1)

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        groups = -(-shape[1] // size)
        zeros_NG = unpack_words(tensors["qzeros"], 4, 1)[:, :groups]
        return weight_of_words(
            tensors["qweight"], shape[1], tensors["scales"][:, :groups], zeros_NG, 4, dtype, min(size, shape[1])
        )

    tensors = {
        "qweight": Stored((ROWS, Axis("columns", 8, is_packed=True)), INT32),
        "qzeros": Stored((ROWS, Axis("columns", size * 8 * words, words, is_packed=True)), INT32),
        "scales": Stored((ROWS, Axis("columns", size * 8 * words, words * 8))),
    }
    return Scheme(f"int4 (AWQ gemv), groups of {group}", tensors, decode, Form("packed", 4, size, True))
