"""Checkpoints of NVIDIA's Model Optimizer: float8, MXFP8, NVFP4, int8 or 4 bits in groups, for all matrices or by name.

AWQ's and SmoothQuant's may hold a number for each input (`pre_quant_scale`), which only a plain matrix can take up.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping

import torch

from quire.config.hf_config import HFConfig
from quire.guards import is_dict
from quire.layers.linear import COLUMNS, ROWS, Axis, Decoded, Stored
from quire.quantization import fp4, fp8
from quire.quantization.codes import packed_weight
from quire.quantization.integers import int8
from quire.quantization.join import dense
from quire.quantization.scheme import Form, Scheme, SchemeOf, Tensors, chosen, is_within, refused, spellings

BLOCK, MIXED = 128, "MIXED_PRECISION"
INPUT_SCALE = "pre_quant_scale"


def parse(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `modelopt` stores each matrix.

    Raises:
        ConfigError: an algorithm without a scheme.
    """
    inner = section.get("quantization")
    values = inner if isinstance(inner, HFConfig) else section
    layers = values.get("quantized_layers")
    by_name: Mapping[str, Scheme] = {}
    default = None
    if str(values.get("quant_algo")).upper() != MIXED:
        default = _scheme(values)
    elif isinstance(layers, HFConfig):
        by_name = {name: _scheme(HFConfig(own)) for name, own in layers.to_dict().items() if is_dict(own)}
    else:
        raise refused("quantized_layers", layers, "the algorithm of each, with quant_algo MIXED_PRECISION")
    excluded = [str(name) for name in values.get("exclude_modules") or values.get("ignore") or []]

    def is_plain(source: str) -> bool:
        if default is None:
            return False
        names = (*spellings(source),)
        is_named = any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in excluded)
        return source == "lm_head" or is_within(excluded, source) or is_named

    return chosen(default, is_plain, by_name.items())


def _scheme(values: HFConfig) -> Scheme:
    algorithm = str(values.get("quant_algo", "")).upper()
    if algorithm not in ALGORITHMS:
        raise refused("quant_algo", values.get("quant_algo"), ", ".join([*ALGORITHMS, MIXED]))
    return ALGORITHMS[algorithm](values)


def _four_bits(group: int) -> Scheme:
    """Signed codes; a byte holds two rows' of one column, the first in its low half."""

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        pairs = tensors["weight"] ^ 0x88
        codes_NK = torch.stack((pairs & 15, pairs >> 4), 1).flatten(0, 1)
        return packed_weight(codes_NK, tensors["weight_scale"], None, 4, dtype, group)

    tensors = {
        "weight": Stored((Axis("rows", 2, is_packed=True), COLUMNS), (torch.uint8,)),
        "weight_scale": Stored((ROWS, Axis("columns", group))),
    }
    return Scheme(f"int4 (AWQ), groups of {group}", tensors, decode, Form("packed", 4, group, True))


def _with_input_scale(scheme: Scheme) -> Scheme:
    """The same where inputs may be multiplied by a number each before they are."""

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        part, scale_K = scheme.decode(tensors, shape, dtype), tensors.get(INPUT_SCALE)
        if scale_K is None or bool((scale_K == 1).all()):
            return part
        return (dense(part, torch.float32) * scale_K.float()).to(dtype)

    tensors = {**scheme.tensors, INPUT_SCALE: Stored((COLUMNS,), optional=True)}
    return dataclasses.replace(scheme, tensors=tensors, decode=decode)


_BLOCKS = (Axis("rows", BLOCK), Axis("none"), Axis("columns", BLOCK), Axis("none"))
ALGORITHMS: dict[str, Callable[[HFConfig], Scheme]] = {
    "FP8": lambda values: fp8.scaled(False, True),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda values: fp8.scaled(True, False),
    "FP8_PB_WO": lambda values: fp8.blocks(BLOCK, BLOCK, "weight_scale", *_BLOCKS),
    "MXFP8": lambda values: fp8.mxfp8("weight_scale"),
    **dict.fromkeys(
        ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"),
        lambda values: _with_input_scale(fp4.nvfp4("weight", "weight_scale_2", False)),
    ),
    "W4A16_AWQ": lambda values: _with_input_scale(_four_bits(int(values.get("group_size", 128)))),
    "W8A16": lambda values: _with_input_scale(int8("int8")),
    "W8A8_SQ_PER_CHANNEL": lambda values: _with_input_scale(int8("int8, activations too", rounding="static")),
}
"""By `quant_algo`: how a matrix is stored."""
