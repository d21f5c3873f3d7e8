"""Media in a worker's steps: embeddings are computed before the step that needs them (`item_encoder`), kept by content, and laid
where a step's tokens find them.

What is kept and when it is dropped is the scheduler's decision. Items that it hands over wait until they have been
computed, so that a step for which there was no memory costs none of them. Knows rows and places; knows no image.

Legend: T tokens of the step, B its requests, E columns of an embedding.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.core.output import IntArray, SchedulerOutput
from quire.distributed.communicator import Communicator
from quire.errors import ConfigError
from quire.layers.decoder import Decoder
from quire.layers.interface import CausalLM, MediaInputs
from quire.layers.tower import TowerDecoder
from quire.layers.transformers_backend import TransformersModel
from quire.media import MediaItem
from quire.models.spec import Attention, DecoderSpec
from quire.platforms.interface import DeviceRuntime
from quire.worker.batch_state import BatchState
from quire.worker.item_encoder import ItemEncoder


class _Piece(NamedTuple):
    """Tokens `first` to `last` (not included) of a row's item, of which the first one is the step's token `at`."""

    item: MediaItem
    row: int
    first: int
    last: int
    at: int


def check_takes_embeds(model: CausalLM) -> None:
    """Raises ConfigError: a prompt of this model cannot consist of embeddings."""
    why = "it has no spec"
    if isinstance(model, Decoder):
        why = "it projects what it looks up" if model.spec.embedding_width else ""
        why = "its layers read token ids, too" if model.spec.layer_input is not None else why
    if why:
        raise ConfigError(
            f"enable_prompt_embeds: the model cannot take embeddings: {why}", setting="enable_prompt_embeds"
        )


def sees_items(spec: DecoderSpec) -> bool:
    """Whether some layer lets an item's tokens see those behind themselves."""
    mixers = (mixer for layer in range(spec.layers) for mixer in spec.mixers_of(layer))
    return any(isinstance(mixer, Attention) and mixer.sees_items for mixer in mixers)


def seen_ends(item: MediaItem, token_ids_I: IntArray, others: Sequence[MediaItem] = ()) -> IntArray:
    """The place in an item before which each of its tokens sees: the end of its run of embeddings, or of the item. Where those
    of `others` see one another, those between them see none behind themselves."""
    if item.sees == "items":
        ends_I = np.zeros(len(token_ids_I), dtype=np.int32)
        for other in others:
            if other.num_embeds and other.offset >= item.offset:
                ends_I[other.offset - item.offset : other.end - item.offset] = len(token_ids_I)
        return ends_I
    if item.sees == "item":
        return np.full(len(token_ids_I), len(token_ids_I), dtype=np.int32)
    is_media_I = token_ids_I == item.token_id
    places = np.arange(len(token_ids_I), dtype=np.int32)
    next_text_I = np.minimum.accumulate(np.where(is_media_I, len(token_ids_I), places)[::-1])[::-1]
    return np.where(is_media_I, next_text_I, 0).astype(np.int32)


def _width_of(model: Decoder | TransformersModel) -> int:
    """Columns of a step's embeddings, with what joins behind the first layers."""
    if isinstance(model, TransformersModel):
        return model.hidden
    return model.media_width if isinstance(model, TowerDecoder) else model.spec.hidden


class MediaSteps:
    """The items of running requests, and the embeddings of those that steps need.

    Args:
        most_at_once: embeddings that a step has computed together.
        ranks: those that divide the items among themselves; a single one: this rank computes all.
        is_beside: the device works beside the host.

    Attributes:
        inputs: where a step finds its embeddings; `prepare` fills it.
        width: columns of the residual.
        encoder: computes them.
    """

    def __init__(
        self,
        model: Decoder | TransformersModel,
        max_tokens: int,
        most_at_once: int,
        runtime: DeviceRuntime,
        ranks: Communicator,
        *,
        is_beside: bool,
    ) -> None:
        towers = model.towers if isinstance(model, TowerDecoder | TransformersModel) else {}
        spec = model.spec if isinstance(model, Decoder) else None
        self.width = _width_of(model) if spec is None else spec.hidden
        scale = model.embedding_scale if isinstance(model, Decoder) and model.spec.scales_given else 1.0
        self._rows: dict[int, Sequence[MediaItem]] = {}
        device = model.context.device
        self.inputs = MediaInputs(
            torch.zeros(max_tokens, dtype=torch.bool, device=device),
            torch.zeros(max_tokens, _width_of(model), dtype=model.context.activation_dtype, device=device),
            torch.zeros(max_tokens, dtype=torch.int32, device=device)
            if spec is not None and sees_items(spec)
            else None,
        )
        like = self.inputs.rows_TE
        self.encoder = ItemEncoder(towers, scale, most_at_once, like, runtime, ranks, is_beside=is_beside)

    @property
    def num_bytes(self) -> int:
        """Memory of a step's embeddings."""
        return self.inputs.rows_TE.nbytes

    def apply_diff(self, plan: SchedulerOutput) -> None:
        """Forget what is not needed any more, take in what is new."""
        for row in plan.finished_rows:
            self._rows.pop(row, None)
        self.encoder.drop(plan.dropped_media)
        self.encoder.take(plan.encodes)
        for request in plan.new_requests:
            if request.media:
                self._rows[request.row] = request.media

    def clear(self) -> None:
        """Forget everything: the scheduler has."""
        self._rows.clear()
        self.encoder.clear()

    def prepare(self, plan: SchedulerOutput, query_start_B: IntArray, state: BatchState) -> MediaInputs | None:
        """The embeddings of a prepared step's tokens, which the state counts as computed; None where all of them are text.

        Args:
            query_start_B: where each request's tokens begin in the step.
        """
        starts_B = state.num_computed_R[plan.rows] - plan.num_scheduled_tokens
        pieces = list(self._pieces(plan, starts_B, query_start_B)) if self._rows else []
        if not pieces:
            return None
        self.encoder.need(dict.fromkeys(piece.item.key for piece in pieces))
        self.inputs.is_media_T.zero_()
        for piece in (piece for piece in pieces if piece.item.num_embeds):
            self._lay(piece, state.token_ids_RL[piece.row])
        if self.inputs.seen_end_T is not None:
            self._note_ends(pieces, state, self.inputs.seen_end_T)
        return self.inputs

    def vectors(self, plan: SchedulerOutput, query_start_B: IntArray, state: BatchState) -> dict[int, torch.Tensor]:
        """Of the step's rows that are an image: its embedding, which is what they want."""
        starts_B = state.num_computed_R[plan.rows] - plan.num_scheduled_tokens
        pieces = list(self._pieces(plan, starts_B, query_start_B)) if self._rows else []
        self.encoder.need(dict.fromkeys(piece.item.key for piece in pieces))
        return {piece.row: self.encoder[piece.item.key][0] for piece in pieces}

    def _note_ends(self, pieces: Sequence[_Piece], state: BatchState, seen_end_T: torch.Tensor) -> None:
        """How far each of the step's tokens sees, where that is beyond itself."""
        ends_T = np.zeros(len(seen_end_T), dtype=np.int32)
        for item, row, first, last, at in pieces:
            if item.sees:
                others = self._rows[row] if item.sees == "items" else ()
                ends = item.offset + seen_ends(item, state.token_ids_RL[row, item.offset : item.end], others)
                ends_T[at : at + last - first] = ends[first - item.offset : last - item.offset]
        seen_end_T.copy_(torch.from_numpy(ends_T))

    def _pieces(self, plan: SchedulerOutput, starts_B: IntArray, query_start_B: IntArray) -> Iterator[_Piece]:
        for index, row in enumerate(plan.rows.tolist()):
            start, end = int(starts_B[index]), int(starts_B[index] + plan.num_scheduled_tokens[index])
            for item in self._rows.get(row, ()):
                first, last = max(start, item.offset), min(end, item.end)
                if first < last:
                    yield _Piece(item, row, first, last, int(query_start_B[index]) + first - start)

    def _lay(self, piece: _Piece, token_ids_L: IntArray) -> None:
        """Put a piece's embeddings where its tokens stand in the step."""
        item, count, embeddings_ED = piece.item, piece.last - piece.first, self.encoder[piece.item.key]
        place = slice(piece.at, piece.at + count)
        before = piece.first - item.offset
        if item.num_embeds == item.length:
            self.inputs.rows_TE[place].copy_(embeddings_ED[before : before + count])
            self.inputs.is_media_T[place] = True
            return
        is_media = token_ids_L[item.offset : piece.last] == item.token_id  # the others are text
        before, is_media = int(np.count_nonzero(is_media[:before])), torch.from_numpy(is_media[before:])
        places = piece.at + is_media.nonzero()[:, 0].to(embeddings_ED.device)
        self.inputs.rows_TE[places] = embeddings_ED[before : before + len(places)]
        self.inputs.is_media_T[places] = True
