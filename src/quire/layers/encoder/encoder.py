"""An encoder of text, sound or images: what stands beside a prompt, or the sounds in it, as rows for the decoder.

Knows nothing of requests or caches.
Legend: T rows of the step, E rows or embeddings of an item, D hidden, B bins, F frames.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.layers.encoder.conformer import BlockConformerFront, ConformerFront
from quire.layers.encoder.fronts import ChunkFront, Front, MelFront, ModuleFront
from quire.layers.interface import MediaInputs, ModelContext, StepInputs
from quire.layers.linear import LinearMethod
from quire.layers.projector import Projector
from quire.layers.tower import Arrays, LayeredTower
from quire.media import in_batches
from quire.models.sight import Modules
from quire.models.sound import BlockConformer, Chunks, Conformer, Frames
from quire.models.spec import EncoderSpec

PREFIX = "encoder."
"""Of its modules' names within the whole model."""
TOKENS = "token_ids"
MEL = "mel"
"""What an item has: token ids [E], or frames [B, F]."""
ROWS = "rows"
"""In the place of both: rows that need no layers, each by itself [E, D]."""
PIXELS = "pixels"
"""Beside token ids, of which those below zero are the places of an image's rows: the image [3, H, W]."""
COUNTS = "counts"
"""With frames of several parts [parts, B, F]: the rows, the embeddings and the frames of each; rows behind these are silence."""
BESIDE = "beside"
"""With frames in a prompt that has images, too: a number, if the encoder makes other embeddings of such sounds."""


FRONTS: dict[type, Callable[[Any, LinearMethod], Front]] = {
    Frames: MelFront,
    Chunks: ChunkFront,
    Conformer: ConformerFront,
    BlockConformer: BlockConformerFront,
}
"""By what `DecoderSpec.frames` describes: what makes rows of it."""


class _Piece(NamedTuple):
    """What is read at once: token ids, rows, or frames and how many embeddings these are, and whether beside images; and an image
    for some of the ids."""

    array: torch.Tensor
    rows: int
    embeds: int
    pixels: torch.Tensor | None = None
    is_beside: bool = False


class Encoder(LayeredTower):
    """Encodes text, sound or images."""

    def __init__(self, spec: EncoderSpec, context: ModelContext, slot_dtype: torch.dtype = torch.int64) -> None:
        self.spec = spec
        frames, self._front = spec.trunk.frames, None
        if isinstance(frames, Modules):
            self._front = ModuleFront(frames, context)
        elif frames is not None:
            self._front = FRONTS[type(frames)](frames, context.linear_method)
        self._projector, self._beside = (Projector(each, spec.trunk.hidden) for each in (spec.projector, spec.beside))
        parts = [*([] if self._front is None else [self._front]), self._projector, self._beside]
        super().__init__(PREFIX, spec.trunk, parts, context, slot_dtype)

    def encode(self, items: Sequence[Arrays]) -> list[torch.Tensor]:
        """Rows, or embeddings where there is a projector [E, D]."""
        pieces = [list(_pieces(item, self.spec.length)) for item in items]
        batches = in_batches((piece for each in pieces for piece in each), _num_rows, self._context.max_tokens)
        left = (part for batch in batches for part in self._run(batch))
        return [torch.cat([next(left) for _ in each]) for each in pieces]

    def _run(self, pieces: Sequence[_Piece]) -> list[torch.Tensor]:
        """The embeddings of pieces that are computed together."""
        lengths = [piece.rows for piece in pieces]
        with torch.no_grad():
            read = torch.cat([self._read(piece.array)[: piece.rows] for piece in pieces])
            seen = [self._read(piece.pixels) for piece in pieces if piece.pixels is not None]
            if not self.spec.trunk.layers:
                return self._project(pieces, torch.cat(seen) if seen else read)
            step = self._step(lengths, None, read) if read.is_floating_point() else self._step(lengths, read)
            step.take_media(_placed(read, torch.cat(seen)) if seen else None)
            self.decoder.begin_step(step)
            self.decoder.forward(step)
            return self._project(pieces, self.decoder.compute_hidden(step))

    def _project(self, pieces: Sequence[_Piece], rows_TD: torch.Tensor) -> list[torch.Tensor]:
        """The embeddings of each piece; rows that are missing in the last group are zeros."""
        group, given, parts = self.spec.group, self.spec.given, rows_TD.split([piece.rows for piece in pieces])
        padded = [torch.nn.functional.pad(part, (0, 0, 0, -len(part) % group)) for part in parts]
        counts, rows = [len(part) // group * given for part in padded], torch.cat(padded)
        embeddings = self._projector(rows).split(counts)
        if any(piece.is_beside for piece in pieces):
            pairs = zip(embeddings, self._beside(rows).split(counts), strict=True)
            embeddings = [pair[piece.is_beside] for pair, piece in zip(pairs, pieces, strict=True)]
        return [each[: piece.embeds].clone() for each, piece in zip(embeddings, pieces, strict=True)]

    def _read(self, array: torch.Tensor) -> torch.Tensor:
        """Token ids, or rows of what is heard."""
        if not array.is_floating_point():
            return array.to(self._context.device)
        rows = array.to(self._context.device, self._context.activation_dtype)
        return rows if self._front is None else self._front(rows[None])

    def _step(
        self, lengths: Sequence[int], ids_T: torch.Tensor | None, embedded: torch.Tensor | None = None
    ) -> StepInputs:
        within_T = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        positions_T = torch.from_numpy(within_T).to(self._context.device)
        return StepInputs(
            input_ids=positions_T if ids_T is None else ids_T.clamp(min=0),
            positions=positions_T,
            logits_index=positions_T[:0],
            attention=[self._pages.describe(lengths, positions_T)],
            num_tokens=len(within_T),
            embedded=embedded,
        )


def _placed(ids_T: torch.Tensor, rows_ED: torch.Tensor) -> MediaInputs:
    """Images' rows in their places."""
    is_media_T = ids_T < 0
    rows_TD = rows_ED.new_zeros(len(ids_T), rows_ED.shape[1])
    rows_TD[is_media_T] = rows_ED
    return MediaInputs(is_media_T, rows_TD)


def _pieces(item: Arrays, longest: int) -> Iterator[_Piece]:
    """What is read at once of an item."""
    if TOKENS in item:
        pixels = torch.from_numpy(item[PIXELS].copy()) if PIXELS in item else None
        yield _Piece(torch.from_numpy(item[TOKENS].astype(np.int32)), len(item[TOKENS]), len(item[TOKENS]), pixels)
        return
    if ROWS in item:
        yield from (_Piece(part, len(part), len(part)) for part in torch.from_numpy(item[ROWS].copy()).split(longest))
        return
    mel = torch.from_numpy(item[MEL].copy())
    counts = item.get(COUNTS, np.array([[mel.shape[-1] // 2, mel.shape[-1] // 2, mel.shape[-1]]]))
    for part, (rows, embeds, frames) in zip(mel.reshape(-1, *mel.shape[-2:]), counts.tolist(), strict=True):
        yield _Piece(part[:, :frames], rows, embeds, is_beside=BESIDE in item)


def _num_rows(piece: _Piece) -> int:
    return piece.rows
