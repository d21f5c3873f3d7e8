"""Matrices in GGUF's block types: each row is a chain of blocks of 32 or 256 values with their scales between the codes.

Every type becomes packed codes with the same values: 4 bits with groups of 16 columns or more, or 8 bits. Layouts of the blocks:
https://github.com/ggml-org/ggml (ggml-common.h). Blocks of 256 have scales of 4, 6 or 8 bits, times one float16.
Legend: N outputs, B blocks a row, G groups a block.
"""

from collections.abc import Callable

import torch

from quire.config.gguf.container import TYPES
from quire.config.hf_config import HFConfig
from quire.kernels.packed import pack_nibbles
from quire.layers.linear import ROWS, Axis, Decoded, Stored
from quire.quantization import gguf_grids
from quire.quantization.codes import E2M1, affine_weight, byte_parts, e8m0_scale, half_at, table_weight
from quire.quantization.scheme import Form, Scheme, SchemeOf, Tensors, refused

IQ4_NL = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
TABLES = {"IQ4_NL": IQ4_NL, "IQ4_XS": IQ4_NL, "MXFP4": E2M1, "NVFP4": E2M1}
"""Of types whose codes are places in one."""
Blocks = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""(codes [..., values of a block], scale [..., G], and what is subtracted after scaling [..., G])."""


def parse(section: HFConfig) -> SchemeOf:
    """How a GGUF file stores each matrix, as the configuration that was made of it says.

    Raises:
        ConfigError: a number type without a scheme.
    """
    types = section.types.to_dict() if "types" in section else {}
    for kind in set(types.values()) - set(DECODERS):
        raise refused("types", kind, ", ".join(DECODERS))
    if not gguf_grids.DECODERS.keys().isdisjoint(types.values()):
        gguf_grids.check_package()
    schemes = {kind: _scheme(kind) for kind in DECODERS}

    def scheme_of(source: str) -> Scheme | None:
        kind = types.get(_without_expert(source))
        return None if kind is None else schemes[kind]

    return scheme_of


def _without_expert(source: str) -> str:
    before, experts, after = source.partition(".experts.")
    return before + experts + after.partition(".")[2] if experts else source


def _scheme(kind: str) -> Scheme:
    layout = next(layout for layout in TYPES.values() if layout.name == kind)
    decode_blocks, bits, group, has_zeros = DECODERS[kind]

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        blocks_NBX = tensors["weight"].reshape(shape[0], -1, layout.num_bytes)
        codes, scale, offset = decode_blocks(blocks_NBX)
        scale = scale * tensors["scale"].float() if "scale" in tensors else scale
        table = gguf_grids.grid(kind)[1] if kind in gguf_grids.DECODERS else TABLES.get(kind)
        if table is not None:
            return table_weight(pack_nibbles(codes.flatten(1)), scale.flatten(1), table, dtype)
        offset_NG = None if offset is None else offset.flatten(1)
        return affine_weight(codes.flatten(1), scale.flatten(1), offset_NG, bits, dtype)

    tensors = {"weight": Stored((ROWS, Axis("columns", layout.values, layout.num_bytes)), (torch.uint8,))}
    if kind == "NVFP4":
        tensors["scale"] = Stored((), optional=True)
    has_table = kind in TABLES or kind in gguf_grids.DECODERS
    table = "" if not has_table else kind if kind.startswith("IQ3") else kind[:3]  # IQ1's types share one, IQ2's, IQ4's
    form = Form("packed", bits, group, has_zeros, fits_tiles=kind not in FRACTIONS, table=table)
    return Scheme(kind, tensors, decode, form)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """All low halves of some bytes, then all high ones."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _q4_0(blocks: torch.Tensor) -> Blocks:
    scale = half_at(blocks, 0)
    return _nibbles(blocks[..., 2:]), scale, 8 * scale


def _q5_0(blocks: torch.Tensor) -> Blocks:
    codes = _nibbles(blocks[..., 6:]) | byte_parts(blocks[..., 2:6], 1) << 4
    return codes.to(torch.int8) - 16, half_at(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Blocks:
    return _nibbles(blocks[..., 8:]) | byte_parts(blocks[..., 4:8], 1) << 4, half_at(blocks, 0), -half_at(blocks, 2)


def _iq4_xs(blocks: torch.Tensor) -> Blocks:
    pairs = torch.arange(0, 16, 2, device=blocks.device, dtype=torch.int32)
    high = (blocks[..., 2, None] | blocks[..., 3, None].int() << 8) >> pairs & 3
    scale = half_at(blocks, 0) * ((byte_parts(blocks[..., 4:8], 4) | high << 4).float() - 32)
    return _nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2), scale, None


def _nvfp4(blocks: torch.Tensor) -> Blocks:
    """Scales are e4m3 without a sign; the number that would be none is 0."""
    stored = blocks[..., :4]
    scale = stored.masked_fill(stored == 0x7F, 0).contiguous().view(torch.float8_e4m3fn).float()
    return _nibbles(blocks[..., 4:].unflatten(-1, (4, 8))).flatten(-2), scale, None


def _two_bits(data: torch.Tensor) -> torch.Tensor:
    """64 bytes to 256 codes: of each half of the bytes the lowest two bits of all, then the next two."""
    halves = data.unflatten(-1, (2, 1, 32))
    shifts = torch.arange(0, 8, 2, device=data.device, dtype=torch.uint8)[:, None]
    return (halves >> shifts & 3).flatten(-3)


def _q2_k(blocks: torch.Tensor) -> Blocks:
    scales = blocks[..., :16]
    scale, offset = half_at(blocks, 80) * (scales & 15).float(), half_at(blocks, 82) * (scales >> 4).float()
    return _two_bits(blocks[..., 16:80]), scale, offset


def _q3_k(blocks: torch.Tensor) -> Blocks:
    shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]
    high = (blocks[..., None, :32] >> shifts & 1).flatten(-2)  # bit i of byte j belongs to value 32 i + j
    codes = _two_bits(blocks[..., 32:96]) | high << 2
    packed = blocks[..., 96:108].unflatten(-1, (3, 4))
    low = torch.cat(
        (packed[..., 0, :] & 15, packed[..., 1, :] & 15, packed[..., 0, :] >> 4, packed[..., 1, :] >> 4), -1
    )
    twos = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.uint8)[:, None]
    six_bits = low | (packed[..., 2:, :] >> twos & 3).flatten(-2) << 4
    scale = half_at(blocks, 108) * (six_bits.float() - 32)
    return codes, scale, 4 * scale


def _scales_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight offsets of 6 bits in bytes 4 to 16, times the block's two float16."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    offsets = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return half_at(blocks, 0) * scales.float(), half_at(blocks, 2) * offsets.float()


def _q4_k(blocks: torch.Tensor) -> Blocks:
    return _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2), *_scales_k(blocks)


def _q5_k(blocks: torch.Tensor) -> Blocks:
    shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]
    high = (blocks[..., None, 16:48] >> shifts & 1).flatten(-2)
    codes = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    return codes | high << 4, *_scales_k(blocks)


def _q6_k(blocks: torch.Tensor) -> Blocks:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    codes = low.flatten(-2) | _two_bits(blocks[..., 128:192]) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return codes.to(torch.int8) - 32, half_at(blocks, 208) * scales, None


def _trits(data: torch.Tensor, count: int) -> torch.Tensor:
    """Some of the five numbers of 0 to 2 whose place among all 243 a byte tells, in parts of 256: the first of all bytes, then
    the next."""
    powers = 3 ** torch.arange(count, device=data.device, dtype=torch.int32)[:, None]
    return ((data[..., None, :].int() * powers & 255) * 3 >> 8).flatten(-2)


def _tq1_0(blocks: torch.Tensor) -> Blocks:
    codes = (_trits(blocks[..., :32], 5), _trits(blocks[..., 32:48], 5), _trits(blocks[..., 48:52], 4))
    scale = half_at(blocks, 52)
    return torch.cat(codes, -1), scale, scale


def _tq2_0(blocks: torch.Tensor) -> Blocks:
    scale = half_at(blocks, 64)
    return _two_bits(blocks[..., :64]), scale, scale


def _q1_0(blocks: torch.Tensor) -> Blocks:
    scale = half_at(blocks, 0)
    return 2 * byte_parts(blocks[..., 2:], 1), scale, scale


FRACTIONS = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
"""Types whose zeros are no whole codes."""
DECODERS: dict[str, tuple[Callable[[torch.Tensor], Blocks], int, int, bool]] = {
    "Q4_0": (_q4_0, 4, 32, True),
    "Q4_1": (lambda blocks: (_nibbles(blocks[..., 4:]), half_at(blocks, 0), -half_at(blocks, 2)), 4, 32, True),
    "Q5_0": (_q5_0, 8, 32, False),
    "Q5_1": (_q5_1, 8, 32, True),
    "Q8_0": (lambda blocks: (blocks[..., 2:].contiguous().view(torch.int8), half_at(blocks, 0), None), 8, 32, False),
    "IQ4_NL": (lambda blocks: (_nibbles(blocks[..., 2:]), half_at(blocks, 0), None), 4, 32, False),
    "IQ4_XS": (_iq4_xs, 4, 32, False),
    "MXFP4": (lambda blocks: (_nibbles(blocks[..., 1:]), e8m0_scale(blocks[..., :1].contiguous()), None), 4, 32, False),
    "Q2_K": (_q2_k, 4, 16, True),
    "Q3_K": (_q3_k, 4, 16, True),
    "Q4_K": (_q4_k, 4, 32, True),
    "Q5_K": (_q5_k, 8, 32, True),
    "Q6_K": (_q6_k, 8, 16, False),
    "TQ1_0": (_tq1_0, 4, 256, True),
    "TQ2_0": (_tq2_0, 4, 256, True),
    "Q1_0": (_q1_0, 4, 128, True),
    "NVFP4": (_nvfp4, 4, 16, False),
    **gguf_grids.DECODERS,
}
"""By type: how its blocks are read, bits of the codes that they become, columns a scale, whether there are zeros."""
