"""Offline beam search: many prompts at once over the synchronous engine. What users get is vLLM's shape."""

import dataclasses
from collections.abc import Callable, Sequence

from quire.engine.beam_search import BeamSearch
from quire.engine.input_processor import InputProcessor, ProcessedRequest
from quire.logprobs import LogprobsOnePosition
from quire.outputs import RequestOutput
from quire.tokenizers.interface import Tokenizer

RunRequests = Callable[[list[ProcessedRequest]], list[RequestOutput]]
"""Runs requests to their end and gives their final outputs in the same order."""


@dataclasses.dataclass(slots=True)
class BeamSearchSequence:
    """One hypothesis. `tokens` and `text` begin with the prompt; `logprobs` has one entry a generated token."""

    tokens: list[int]
    logprobs: list[LogprobsOnePosition]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass(slots=True)
class BeamSearchOutput:
    """A prompt's hypotheses, best first."""

    sequences: list[BeamSearchSequence]


def run_beam_searches(
    searches: Sequence[BeamSearch],
    processor: InputProcessor,
    run: RunRequests,
    next_id: Callable[[], str],
    concurrency_limit: int | None,
) -> None:
    """Drive searches to their end, at most `concurrency_limit` at a time; their beams run in common batches."""
    limit = concurrency_limit or len(searches)
    for start in range(0, len(searches), limit):
        active = list(searches[start : start + limit])
        while active := [search for search in active if not search.is_finished]:
            requests = [
                [processor.process(next_id(), beam, search.step_params, is_beam=True) for beam in search.next_prompts()]
                for search in active
            ]
            outputs = iter(run([request for group in requests for request in group]))
            for search, group in zip(active, requests, strict=True):
                search.advance([next(outputs) for _ in group])


def build_output(search: BeamSearch, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """A finished search as users get it."""
    prompt = search.prompt.token_ids
    skip = search.params.skip_special_tokens
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=prompt + beam.token_ids,
                logprobs=beam.logprobs,
                cum_logprob=beam.cum_logprob,
                text=tokenizer.decode(prompt + beam.token_ids, skip) if tokenizer is not None else None,
                finish_reason="stop" if beam.ended_by_eos else "length",
            )
            for beam in search.beams()
        ]
    )
