"""The scheduler's notes on steps: what the workers have to be told yet, what is in flight, and the messages about one request:
to the workers when it gets a row, to the frontend when it has new output.

Plain records and the functions that fill them; takes no decisions.
"""

from typing import Any

import msgspec
import numpy as np

from quire.core.cost_model import CostModel
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.output import IntArray, ModelRunnerOutput, NewRequestData, SchedulerOutput, StepDiff, TokenLogprobs
from quire.core.request_state import Request
from quire.core.running import RunningBatch
from quire.request import EngineCoreOutput, FinishReason, Refusal

NO_ROWS: IntArray = np.zeros(0, dtype=np.int32)


class PendingDiff(StepDiff):
    """What the workers have to be told with the next step that computes anything."""

    def move_to(self, step: SchedulerOutput) -> "PendingDiff":
        """Tell all of it with this step; gives what is to be told next: nothing yet."""
        for name in StepDiff.__struct_fields__:
            setattr(step, name, getattr(self, name))
        return PendingDiff()

    def forget(self, row: int) -> None:
        """The row has no owner any more: what was to be told of it is of no use."""
        self.new_blocks = [entry for entry in self.new_blocks if entry[0] != row]
        self.known_tokens = [entry for entry in self.known_tokens if entry[0] != row]
        self.drawn = [entry for entry in self.drawn if entry[0] != row]


class StepInFlight(msgspec.Struct):
    """A step that was scheduled and is not collected yet. `num_prompt_tokens`: how many of its tokens are of prompts. `began`:
    when it was planned, in seconds. `predicted_ms`: how long it takes, as far as the cost model knows."""

    step: SchedulerOutput
    prefill_rows: list[int]
    num_prompt_tokens: int
    num_samples: int
    attended: float
    began: float
    predicted_ms: float


def build_flight(
    step: SchedulerOutput,
    prefill_rows: list[int],
    num_prompt_tokens: int,
    ends: IntArray,
    cost_model: CostModel,
    began: float,
) -> StepInFlight:
    """The note on a step that was planned; `ends` has its rows' computed tokens behind it."""
    attended = float(np.dot(step.num_scheduled_tokens.astype(np.float64), ends))
    predicted = cost_model.predict(step.total_num_tokens, len(step.rows), attended)
    num_samples = int(np.count_nonzero(step.needs_sample))
    return StepInFlight(step, prefill_rows, num_prompt_tokens, num_samples, attended, began, predicted)


def without_zeros(rows: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Rows that have anything to compute."""
    if np.count_nonzero(counts) == len(counts):
        return rows, counts
    wanted = counts > 0
    return rows[wanted], counts[wanted]


def grow_by_one(kv: KVCacheManager, batch: RunningBatch, diff: PendingDiff, rows: IntArray, ends: IntArray) -> bool:
    """One more page for each row, at once, where that is all that is needed."""
    if (ends - batch.capacity[rows]).max() > kv.block_size:
        return False
    numbers = rows.tolist()
    blocks = kv.grow_each([batch.request(row) for row in numbers])
    if blocks is None:
        return False
    diff.new_blocks += [(row, 0, [block]) for row, block in zip(numbers, blocks, strict=True)]
    batch.capacity[rows] += kv.block_size
    return True


def without(rows: IntArray, counts: IntArray, dropped: set[int]) -> tuple[IntArray, IntArray]:
    """The rows that were not dropped."""
    kept = ~np.isin(rows, list(dropped))
    return rows[kept], counts[kept]


def build_new_request(request: Request) -> NewRequestData:
    """What the workers need of a request that got its row and pages."""
    return NewRequestData(
        request_id=request.request_id,
        row=request.row,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        block_ids=[list(table) for table in request.block_ids],
        sampling_params=request.source.sampling_params,
        pooling_params=request.source.pooling_params,
        seed=request.source.seed,
        adapter_slot=request.adapter_slot,
        media=[item.without_tensors() for item in request.source.media],
    )


def find_errors(flight: StepInFlight, output: ModelRunnerOutput) -> dict[int, str]:
    """The rows of a step whose computation failed, and why; those among them that it owes a token."""
    if output.lost:
        return dict.fromkeys(flight.step.rows.tolist(), output.lost)
    errors = output.row_errors
    if len(output.rows) + len(output.pooled) + len(errors) >= flight.num_samples:
        return errors
    expected = flight.step.rows[flight.step.needs_sample].tolist()
    answered = {*output.rows.tolist(), *output.pooled, *errors}
    missing = [row for row in expected if row not in answered]
    return {**errors, **dict.fromkeys(missing, "the step returned no token for this request")}


def build_output(request: Request, token_ids: list[int], logprobs: TokenLogprobs | None = None) -> EngineCoreOutput:
    """A request's new output. The first one also tells how much of the prompt was cached, and the prompt's logprobs."""
    output = EngineCoreOutput(request_id=request.request_id, new_token_ids=token_ids, logprobs=logprobs)
    output.num_preemptions = request.num_preemptions
    if not request.has_reported:
        request.has_reported = True
        output.num_cached_tokens = max(0, request.num_cached_tokens)
        output.scheduled_at = request.scheduled_at
        output.kv_transfer_params = request.transfer_params
        output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    return output


def trim_logprobs(output: EngineCoreOutput) -> None:
    """Drop those of tokens that came behind the last one."""
    if (told := output.logprobs) is not None:
        for values in (told.token_ids, told.logprobs, told.ranks):
            del values[len(output.new_token_ids) :]


def build_error(request: Request, message: str, **refusal: Any) -> EngineCoreOutput:
    """The last output of a request whose computation failed, or, with fields of a `Refusal`, that cannot be served."""
    why = Refusal(**refusal) if refusal else None
    return EngineCoreOutput(request.request_id, finish_reason=FinishReason.ERROR, error=message, refusal=why)


def keep_prompt_logprobs(request: Request, part: TokenLogprobs) -> None:
    """Add a chunk's prompt logprobs to those of earlier chunks; they are told together with the first token.

    A prompt that is computed again after a preemption replaces what came before, or was told already.
    """
    if request.has_reported or not request.wants_prompt_logprobs:
        return
    kept = request.prompt_logprobs
    if kept is None:
        request.prompt_logprobs = kept = TokenLogprobs()
    kept.token_ids.extend(part.token_ids)
    kept.logprobs.extend(part.logprobs)
    kept.ranks.extend(part.ranks)
