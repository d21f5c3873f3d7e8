"""Float8 (e4m3) matrices: made at load from a plain checkpoint, or read from one that was stored so.

Knows scales and how checkpoints describe them; products belong to the operations of `kernels/fp8.py`. A plain checkpoint's
matrices get one scale an output channel, and activations one a token. Stored ones have a scale a tensor, a channel or a block.
"""

import dataclasses

import torch

from quire.config.hf_config import HFConfig
from quire.guards import is_sequence
from quire.kernels import fp8
from quire.kernels.types import FP8, Fp8Weight, LinearWeight, PackedWeight
from quire.layers.linear import ROWS, Axis, Decoded, Stored
from quire.quantization.codes import e8m0_scale, even_groups
from quire.quantization.scheme import (
    FP8_FORM,
    Form,
    Scheme,
    SchemeOf,
    Tensors,
    all_but,
    chosen,
    matches,
    one_of,
    refused,
)

WEIGHT = Stored(dtypes=(FP8,))
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)


def round_to_fp8(weight_NK: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype) -> LinearWeight:
    """A plain matrix rounded to float8, with a scale an output channel."""
    outputs, inputs = weight_NK.shape
    data = torch.empty(outputs, inputs, dtype=FP8, device=weight_NK.device)
    scale = torch.empty(outputs, dtype=torch.float32, device=weight_NK.device)
    fp8.fp8_quantize(weight_NK.contiguous(), data, scale)
    return Fp8Weight(outputs, inputs, dtype, data, bias=None if bias_N is None else bias_N.float(), scale=scale)


def scaled(by_channel: bool, static: bool, codes: str = "weight", scale_suffix: str = "weight_scale") -> Scheme:
    """One scale a tensor or an output channel, of the weight.

    Args:
        codes, scale_suffix: suffixes in the checkpoint.
        static: activations are divided by a scale that the checkpoint holds, rather than by each token's own.
    """

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        scale_N = tensors[scale_suffix].float().reshape(-1).expand(shape[0]).contiguous()
        input_scale = tensors["input_scale"].float().reshape(-1).max().reshape(1) if static else None
        return Fp8Weight(*shape, dtype, tensors[codes].contiguous(), scale=scale_N, input_scale=input_scale)

    tensors = {codes: WEIGHT, scale_suffix: Stored((ROWS,) if by_channel else ())}
    if static:
        tensors["input_scale"] = Stored(())
    return Scheme(f"float8, a scale a {'channel' if by_channel else 'tensor'}", tensors, decode, FP8_FORM)


def weights_only(scheme: Scheme) -> Scheme:
    """The same for activations that are not rounded."""

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        part = scheme.decode(tensors, shape, dtype)
        assert isinstance(part, Fp8Weight)
        return PackedWeight(*shape, dtype, part.data, scale=part.scale[:, None])

    return dataclasses.replace(scheme, decode=decode, form=Form("float8"))


def blocks(rows: int, columns: int, scale_suffix: str, *axes: Axis) -> Scheme:
    """One scale a block of rows and columns, a float or the exponent of a power of two; activations are not rounded.

    Args:
        axes: the scales' dimensions, if they are others than rows and columns.
    """

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        scale = tensors[scale_suffix]
        scale = e8m0_scale(scale) if scale.dtype is torch.uint8 else scale.float()
        scale_NG = scale.reshape(-1, -(-shape[1] // columns)).repeat_interleave(rows, 0)[: shape[0]]
        scale_NG = even_groups(scale_NG, shape[1], columns).contiguous()
        return PackedWeight(*shape, dtype, tensors["weight"].contiguous(), scale=scale_NG)

    stored = Stored(axes or (Axis("rows", rows), Axis("columns", columns)), SCALES)
    tensors = {"weight": WEIGHT, scale_suffix: stored}
    return Scheme(f"float8, a scale a block of {rows} by {columns}", tensors, decode, Form("float8", group=columns))


def mxfp8(scale_suffix: str) -> Scheme:
    """A power of two every 32 columns."""
    return dataclasses.replace(blocks(1, 32, scale_suffix), name="mxfp8")


def parse(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `fp8` stores each matrix: one scale a tensor, or a block (`weight_scale_inv`).

    Raises:
        ConfigError: an unknown activation scheme, or blocks with static activations.
    """
    block, activations = section.get("weight_block_size"), section.get("activation_scheme", "dynamic")
    one_of("activation_scheme", activations, ("dynamic", "static"))
    ignored = [str(name) for name in section.get("ignored_layers") or section.get("modules_to_not_convert") or []]
    if block is None:
        scheme = scaled(False, activations == "static")
    elif is_sequence(block) and len(block) == 2 and activations == "dynamic":
        scheme = blocks(int(block[0]), int(block[1]), "weight_scale_inv")
    else:
        allowed = "two numbers, with activation_scheme dynamic"
        raise refused("weight_block_size", f"{block} with activation_scheme {activations}", allowed)

    return chosen(scheme, lambda source: source == "lm_head" or any(matches(name, source) for name in ignored))


def parse_fbgemm(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `fbgemm_fp8` stores each matrix: one scale an output channel."""
    return all_but(section.get("modules_to_not_convert"), scaled(True, False))
