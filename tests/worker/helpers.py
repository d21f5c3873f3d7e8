"""Steps and rows for the worker's tests."""

from typing import Any

import numpy as np

from quire.core.output import NewRequestData, SchedulerOutput
from quire.sampling_params import SamplingParams


def make_step(scheduled: list[tuple[int, int, bool]], **more: Any) -> SchedulerOutput:
    """A step from (row, tokens, needs a sample)."""
    return SchedulerOutput(
        step_id=more.pop("step_id", 0),
        rows=np.array([row for row, _, _ in scheduled], dtype=np.int32),
        num_scheduled_tokens=np.array([count for _, count, _ in scheduled], dtype=np.int32),
        needs_sample=np.array([needs for _, _, needs in scheduled], dtype=np.bool_),
        total_num_tokens=sum(count for _, count, _ in scheduled),
        **more,
    )


def new_request(
    row: int, tokens: list[int], blocks: list[list[int]], computed: int = 0, prompt: int | None = None, **params: Any
) -> NewRequestData:
    """A request that takes a row."""
    return NewRequestData(
        request_id=f"request-{row}",
        row=row,
        token_ids=tokens,
        num_prompt_tokens=len(tokens) if prompt is None else prompt,
        num_computed_tokens=computed,
        block_ids=blocks,
        sampling_params=SamplingParams(**params),
        seed=row,
    )
