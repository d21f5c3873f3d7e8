"""AWQ checkpoints (AutoAWQ's `gemm` version): 4-bit codes in int32 words along the outputs, eight in an order of their own."""

import torch

from quire.config.hf_config import HFConfig
from quire.layers.linear import COLUMNS, ROWS, WHOLE, Axis, Decoded, Stored
from quire.quantization.codes import packed_weight, unpack_words
from quire.quantization.scheme import Form, Scheme, SchemeOf, Tensors, is_within, refused

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which of a word's eight places each of its eight outputs stands."""
INT32 = (torch.int32,)


def parse(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `awq` stores each matrix.

    Raises:
        ConfigError: other bits, or another packing.
    """
    bits = section.get("bits", section.get("w_bit", 4))
    if bits != 4:
        raise refused("bits", bits, "4")
    version = str(section.get("version", "gemm")).lower()
    if version != "gemm":
        raise refused("version", version, "gemm")
    group = int(section.get("group_size", section.get("q_group_size", 128)))
    size = WHOLE if group < 0 else group
    plain = [str(name) for name in section.get("modules_to_not_convert") or []]

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        zeros = tensors.get("qzeros")
        zeros_NG = None if zeros is None else _unpack(zeros).T
        return packed_weight(_unpack(tensors["qweight"]).T, tensors["scales"].T, zeros_NG, 4, dtype)

    eights, groups = Axis("rows", 8), Axis("columns", size)
    tensors = {
        "qweight": Stored((COLUMNS, eights), INT32),
        "qzeros": Stored((groups, eights), INT32, optional=not section.get("zero_point", True)),
        "scales": Stored((groups, ROWS)),
    }
    scheme = Scheme(f"int4 (AWQ), groups of {group}", tensors, decode, Form("packed", 4, size, True))

    def scheme_of(source: str) -> Scheme | None:
        return None if source == "lm_head" or is_within(plain, source) else scheme

    return scheme_of


def _unpack(words: torch.Tensor) -> torch.Tensor:
    codes = unpack_words(words, 4, 1)
    return codes.unflatten(1, (-1, 8))[:, :, list(ORDER)].flatten(1)
