"""GGUF's block types of 1 to 3 bits whose codes are places in a grid: each holds four or eight magnitudes at once.

A type has up to eight magnitudes, so with its sign a value is a place in a table of 16: 4 bits, exactly. The grids are those of
the `gguf` package, an optional one. Layouts of the blocks, all of 256 values: https://github.com/ggml-org/ggml (ggml-common.h).
Legend: G groups a block, S runs of values that share a grid's entry.
"""

import functools
import importlib.util
from collections.abc import Callable

import torch

from quire.errors import ConfigError
from quire.extras import install_command
from quire.quantization.codes import byte_parts, half_at

IQ1_SHIFT = 0.125
"""What is added to all values of a run of IQ1, or taken from them; so values are whole eighths."""
Blocks = tuple[torch.Tensor, torch.Tensor, None]
"""(codes [..., values of a block], scale [..., G], no offset)."""


def check_package() -> None:
    """Raises ConfigError where the package with the grids is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"{', '.join(DECODERS)} are read with the tables of the package gguf, which is not installed: "
            f"{install_command('gguf')}",
            setting="model",
        )


@functools.cache
def grid(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8 [entries, values of an entry]: places among the magnitudes; float32 [16]: what codes are worth, magnitudes that
    are added to first, then those that are not)."""
    import gguf.quants

    layout = getattr(gguf.quants, "IQ1_S" if kind == "IQ1_M" else kind)
    layout.init_grid()
    magnitudes, places = torch.from_numpy(layout.grid[0, 0]).unique(return_inverse=True)
    halves = torch.zeros(2, 8)
    if kind.startswith("IQ1"):
        halves[:, : len(magnitudes)] = torch.stack((magnitudes + IQ1_SHIFT, magnitudes - IQ1_SHIFT)) / IQ1_SHIFT
    else:
        halves[:, : len(magnitudes)] = torch.stack((magnitudes, -magnitudes))
    return places.to(torch.uint8), halves.flatten()


def _codes(kind: str, places_S: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Codes of a block's values by places in the grid and, for each value, in which half of the table it is."""
    entries = grid(kind)[0].to(places_S.device)
    return entries[places_S.long()].flatten(-2) | signs.to(torch.uint8) << 3


def _words(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as words of 16 or 32 bits, in int32."""
    words = data.contiguous().view(dtype).int()
    return words & 0xFFFF if dtype is torch.int16 else words


def _fields(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The lowest fields of words, the first one lowest: [..., words, count]."""
    shifts = torch.arange(0, bits * count, bits, device=words.device, dtype=torch.int32)
    return words[..., None] >> shifts & (1 << bits) - 1


def _signs(sevens: torch.Tensor) -> torch.Tensor:
    """Seven signs each and an eighth that makes the number of minus signs even, all in a row."""
    first = _fields(sevens, 1, 7)
    return torch.cat((first, first.sum(-1, keepdim=True) & 1), -1).flatten(-2)


def _signs_and_scales(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of words of four times seven signs, with a scale of four bits above."""
    words_G = _words(data, torch.int32)
    return _signs(_fields(words_G, 7, 4).flatten(-2)), (words_G >> 28 & 15) + 0.5


def _iq2_xxs(blocks: torch.Tensor) -> Blocks:
    body = blocks[..., 2:].unflatten(-1, (8, 8))
    signs, scales_G = _signs_and_scales(body[..., 4:].flatten(-2))
    return _codes("IQ2_XXS", body[..., :4].flatten(-2), signs), half_at(blocks, 0) * scales_G / 4, None


def _iq2_xs(blocks: torch.Tensor) -> Blocks:
    words_S = _words(blocks[..., 2:66], torch.int16)
    scale_G = half_at(blocks, 0) * (byte_parts(blocks[..., 66:], 4) + 0.5) / 4
    return _codes("IQ2_XS", words_S & 511, _signs(words_S >> 9)), scale_G, None


def _iq2_s(blocks: torch.Tensor) -> Blocks:
    places_S = blocks[..., 2:34] | byte_parts(blocks[..., 66:74], 2).int() << 8
    scale_G = half_at(blocks, 0) * (byte_parts(blocks[..., 74:], 4) + 0.5) / 4
    return _codes("IQ2_S", places_S, byte_parts(blocks[..., 34:66], 1)), scale_G, None


def _iq3_xxs(blocks: torch.Tensor) -> Blocks:
    signs, scales_G = _signs_and_scales(blocks[..., 66:])
    return _codes("IQ3_XXS", blocks[..., 2:66], signs), half_at(blocks, 0) * scales_G / 2, None


def _iq3_s(blocks: torch.Tensor) -> Blocks:
    places_S = blocks[..., 2:66] | byte_parts(blocks[..., 66:74], 1).int() << 8
    scale_G = half_at(blocks, 0) * (2 * byte_parts(blocks[..., 106:], 4) + 1).float()
    return _codes("IQ3_S", places_S, byte_parts(blocks[..., 74:106], 1)), scale_G, None


def _iq1_s(blocks: torch.Tensor) -> Blocks:
    words_G = _words(blocks[..., 34:], torch.int16)
    places_S = blocks[..., 2:34] | _fields(words_G, 3, 4).flatten(-2) << 8
    scale_G = half_at(blocks, 0) * (2 * (words_G >> 12 & 7) + 1) * IQ1_SHIFT
    return _codes("IQ1_S", places_S, (words_G >> 15).repeat_interleave(32, -1)), scale_G, None


def _iq1_m(blocks: torch.Tensor) -> Blocks:
    words = _words(blocks[..., 48:], torch.int16)
    nibbles_S = byte_parts(blocks[..., 32:48], 4).int()
    places_S = blocks[..., :32] | (nibbles_S & 7) << 8
    quarters = (words >> 12) << torch.arange(0, 16, 4, device=words.device, dtype=torch.int32)
    half = quarters.sum(-1, keepdim=True).to(torch.int16).view(torch.float16).float()
    scale_G = half * (2 * _fields(words, 3, 4).flatten(-2) + 1) * IQ1_SHIFT
    return _codes("IQ1_M", places_S, (nibbles_S >> 3).repeat_interleave(8, -1)), scale_G, None


DECODERS: dict[str, tuple[Callable[[torch.Tensor], Blocks], int, int, bool]] = {
    "IQ1_S": (_iq1_s, 4, 32, False),
    "IQ1_M": (_iq1_m, 4, 16, False),
    "IQ2_XXS": (_iq2_xxs, 4, 32, False),
    "IQ2_XS": (_iq2_xs, 4, 16, False),
    "IQ2_S": (_iq2_s, 4, 16, False),
    "IQ3_XXS": (_iq3_xxs, 4, 32, False),
    "IQ3_S": (_iq3_s, 4, 32, False),
}
"""As `gguf.DECODERS`."""
