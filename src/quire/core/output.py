"""What the scheduler tells the workers, and what they answer: the contract between `core/` and `worker/`.

A step is a diff: a new request travels whole, a known one only by its row. Rows are small integers that the
scheduler hands out (0 to max_num_seqs - 1); a worker keeps one row of device state for each.
Arrays are int32 numpy arrays. Nothing here knows of tensors or devices.
"""

import enum
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from quire.codec import convert
from quire.media import MediaItem
from quire.pooling_params import PoolingParams
from quire.request import Pooled, TokenIds, TokenLogprobs, token_array
from quire.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class NewRequestData(msgspec.Struct, array_like=True, omit_defaults=True):
    """A request that gets a row in this step: newly admitted, or resumed after preemption.

    Attributes:
        row: the row that it owns until the row appears in `SchedulerOutput.finished_rows`.
        token_ids: every token known so far: the prompt, then tokens emitted before a preemption or a restart. A list becomes an
            array.
        num_prompt_tokens: how many of `token_ids` are the prompt's.
        num_computed_tokens: how many of `token_ids` already have keys and values in `block_ids` (prefix hits, swap-in).
        block_ids: one list of page ids a KV group, in order of position; 0 is the null page.
        seed: the request's sampling seed, always concrete (drawn by the frontend when the user gave none).
        adapter_slot: where the workers have its adapter; 0 without one.
        media: what stands in the prompt besides text, in order; without what encoders read.
    """

    request_id: str
    row: int
    token_ids: TokenIds
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[list[int]]
    sampling_params: SamplingParams | None = None
    pooling_params: PoolingParams | None = None
    seed: int = 0
    adapter_slot: int = 0
    media: list[MediaItem] = []

    def __post_init__(self) -> None:
        self.token_ids = token_array(self.token_ids)


class StepDiff(msgspec.Struct, kw_only=True):
    """What workers are told about rows and pages.

    Attributes:
        new_blocks: (row, KV group, page ids to append to its table).
        finished_rows: rows to forget (finished, aborted or preempted) before anything else happens.
        swap_outs, swap_ins: (device page, host page) and (host page, device page).
        known_tokens: (row, position, token ids): tokens of the row that nobody has to draw; they stand from this position on.
            Draws of them in steps in flight are not wanted.
        drawn: (row, position, token id): what collected steps drew, for the stages of a pipeline that did not draw it.
    """

    new_requests: list[NewRequestData] = []
    new_blocks: list[tuple[int, int, list[int]]] = []
    finished_rows: list[int] = []
    swap_outs: list[tuple[int, int]] = []
    swap_ins: list[tuple[int, int]] = []
    known_tokens: list[tuple[int, int, list[int]]] = []
    drawn: list[tuple[int, int, int]] = []


class SchedulerOutput(StepDiff):
    """One step's work. The worker applies it in this order: finished rows, swap-outs, new requests, new blocks, swap-ins,
    block copies, then it computes.

    Attributes:
        step_id: counts up from 0.
        rows: rows that compute in this step, in batch order.
        num_scheduled_tokens: aligned with `rows`; each row computes its next tokens after those computed before.
        needs_sample: aligned with `rows`; true where the scheduled tokens reach the row's end, so that a token is sampled.
            Under asynchronous scheduling a decode row's input token may be one that the host has not seen yet; the
            worker reads it from the row.
        drafts: by row, guesses of the tokens behind its last one, which are scheduled with it. The row draws behind each of its
            last tokens; a draft that is not what was drawn before it ends the row's draws, and the worker computes the row's
            next tokens from there on.
        dropped_media: keys of items whose embeddings are not needed any more, to be forgotten first.
        encodes: items whose embeddings this step or a later one needs, with what encoders read.
        num_drafts: how many tokens a drafter is to guess behind those that rows draw in this step. 0: none, but it follows their
            tokens; less: it has nothing to do.
        extras: what plugins add, as data by name; `read_extra` gives it its type again on the other side.
    """

    step_id: int
    rows: IntArray
    num_scheduled_tokens: IntArray
    needs_sample: BoolArray
    total_num_tokens: int
    drafts: dict[int, list[int]] = {}
    dropped_media: list[str] = []
    encodes: list[MediaItem] = []
    num_drafts: int = -1
    extras: dict[str, Any] = {}

    def num_draws(self) -> IntArray:
        """Aligned with `rows`: the tokens that each row draws, one and another for each of its drafts."""
        draws = self.needs_sample.astype(np.int32)
        if self.drafts:
            draws += np.array([len(self.drafts.get(row, ())) for row in self.rows.tolist()], dtype=np.int32)
        return draws


class ModelRunnerOutput(msgspec.Struct):
    """What a step produced.

    Attributes:
        rows: the rows that sampled, in batch order (those with `needs_sample`).
        token_ids: aligned with `rows`.
        logprobs: by row, for rows that asked for them.
        prompt_logprobs: by row, for the prompt positions computed in this step (first prompt token has none).
        accepted: by row with drafts, the tokens that were drawn behind drafts that were right, in order; `token_ids` has the one
            before them. Logprobs are of all of them.
        forced: by row, tokens that can only follow the last one sampled, as draws would give them one after the other. Whether
            they become `known_tokens` is the scheduler's to say.
        row_errors: rows whose computation failed, with a message; those requests alone are ended.
        pooled: by row, for pooling requests that are complete.
        proposals: by row, what a drafter guesses behind the last token that the step has given the row.
        step_ms: device time of the step in milliseconds, for the cost model; 0 if unknown. `draft_ms`: of the drafter behind it.
        lost: why nothing of the step was computed, where the device had no memory for it: its requests are computed again.
        extras: as those of a plan.
    """

    step_id: int
    rows: IntArray
    token_ids: IntArray
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, TokenLogprobs] = {}
    accepted: dict[int, list[int]] = {}
    forced: dict[int, list[int]] = {}
    row_errors: dict[int, str] = {}
    pooled: dict[int, Pooled] = {}
    proposals: dict[int, list[int]] = {}
    step_ms: float = 0.0
    draft_ms: float = 0.0
    lost: str = ""
    extras: dict[str, Any] = {}


ExtraT = TypeVar("ExtraT")


def read_extra(extras: Mapping[str, Any], name: str, kind: type[ExtraT]) -> ExtraT | None:
    """One of a step's extras, as its type: an executor between processes carries plain data. None where there is none.

    Args:
        kind: a msgspec struct, or any type that msgspec knows; an array keeps its own (int32, float32 or bool, one dimension).

    Raises:
        msgspec.ValidationError: it is not of that type.
    """
    value = extras.get(name)
    return value if value is None or isinstance(value, kind) else convert(value, kind)


class Turn(enum.IntEnum):
    """What one of several copies that share experts brings to a step, which all of them take together."""

    NOTHING = 0
    WAITS_FOR_WORK = 1
    """It has requests, none of which can run now."""
    WAITS_FOR_ALL = 2
    """It takes no further step before all copies wait like this."""
    COMPUTES = 3
