"""Beam search over any engine: asks for the best next tokens of each beam, keeps the best beams.

The definition is that of Transformers' `generate(num_beams=…)`: a finished hypothesis scores its summed logprob divided by
its generated length to the power of `length_penalty`, and the search ends when no running beam can still beat the worst
kept one. Does no work of its own on models: the caller runs the prompts that `next_prompts` gives, one token each; the
prefix cache shares their pages. Knows nothing of event loops.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from quire.adapters import LoRARequest
from quire.config import ModelConfig, limits
from quire.engine.caller import asking
from quire.engine.input_processor import InputProcessor, TokenizedPrompt, end_token_ids
from quire.engine.request_record import RequestRecord
from quire.errors import EngineError, RequestError
from quire.logprobs import LogprobsOnePosition
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.tokenizers.detokenizer import detokenize
from quire.tokenizers.interface import Tokenizer


@dataclasses.dataclass(slots=True)
class Beam:
    """One hypothesis: what was generated after the prompt."""

    token_ids: list[int]
    cum_logprob: float
    logprobs: list[LogprobsOnePosition]
    ended_by_eos: bool = False


class BeamSearch:
    """One prompt's search.

    Args:
        prompt: tokenized and not empty.
        priority: of its requests.

    Raises:
        RequestError: a parameter or the prompt cannot be served.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        prompt: TokenizedPrompt,
        params: BeamSearchParams,
        priority: int = 0,
        adapter: LoRARequest | None = None,
    ) -> None:
        if not 1 <= params.beam_width <= limits.MAX_BEAM_WIDTH:
            message = f"beam_width is {params.beam_width}; it may be 1 to {limits.MAX_BEAM_WIDTH}"
            raise RequestError(message, param="beam_width")
        if params.max_tokens < 1:
            raise RequestError(f"max_tokens is {params.max_tokens}; it must be at least 1", param="max_tokens")
        if model.returns_logits:
            message = f"beam search needs logprobs, and logprobs_mode is {model.logprobs_mode!r}"
            raise RequestError(message, param="use_beam_search")
        self.prompt = prompt
        self.priority, self.adapter = priority, adapter
        self.params = params
        self.tokenizer = tokenizer
        self._max_tokens = max(1, min(params.max_tokens, model.max_model_len - len(prompt.token_ids)))
        self._eos: frozenset[int] = frozenset(() if params.ignore_eos else end_token_ids(model, tokenizer))
        self._num_candidates = max(2, 1 + len(self._eos)) * params.beam_width
        self._running = [Beam([], 0.0, [])]
        self._finished: list[tuple[float, Beam]] = []
        self.is_finished = False
        self.step_params = SamplingParams(
            max_tokens=1,
            seed=0,
            temperature=params.temperature,
            logprobs=min(self._num_candidates, model.vocab_size),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    @property
    def num_beams(self) -> int:
        """Hypotheses that run."""
        return len(self._running)

    @property
    def has_begun(self) -> bool:
        """Whether a step of it has run: the next ones were accepted with it."""
        return bool(self._running and self._running[0].token_ids)

    def next_prompts(self) -> list[TokenizedPrompt]:
        """What to run: one token each, with `step_params`."""
        prompt = dataclasses.replace(self.prompt, text=None, array=None)
        return [dataclasses.replace(prompt, token_ids=prompt.token_ids + beam.token_ids) for beam in self._running]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Take in the outputs of `next_prompts`, in its order."""
        candidates: list[tuple[float, Beam, int, LogprobsOnePosition]] = []
        for beam, output in zip(self._running, outputs, strict=True):
            logprobs = output.outputs[0].logprobs
            if output.error is not None or not logprobs:
                raise EngineError(f"beam search stopped: {output.error or 'a step gave no logprobs'}")
            position = logprobs[0]
            assert position is not None
            candidates += [
                (beam.cum_logprob + entry.logprob, beam, token_id, position) for token_id, entry in position.items()
            ]
        candidates.sort(key=lambda candidate: -candidate[0])
        self._choose(candidates[: self._num_candidates])

    def _choose(self, candidates: list[tuple[float, Beam, int, LogprobsOnePosition]]) -> None:
        """Finished hypotheses count where they are among the best `beam_width`; the others run on."""
        width = self.params.beam_width
        length = len(self._running[0].token_ids) + 1
        is_last = length >= self._max_tokens
        running: list[Beam] = []
        for rank, (score, parent, token_id, position) in enumerate(candidates):
            ends = token_id in self._eos
            if not (ends or is_last):
                if len(running) < width:
                    running.append(self._extend(parent, token_id, score, position, False))
            elif rank < width:
                beam = self._extend(parent, token_id, score, position, ends)
                self._finished.append((self._score(score, length), beam))
        self._finished.sort(key=lambda entry: -entry[0])
        del self._finished[width:]
        self._running = running
        self.is_finished = not running or not self._can_improve(length)

    @staticmethod
    def _extend(parent: Beam, token_id: int, score: float, position: LogprobsOnePosition, ends: bool) -> Beam:
        return Beam([*parent.token_ids, token_id], score, [*parent.logprobs, position], ends)

    def _score(self, cum_logprob: float, length: int) -> float:
        return cum_logprob / length**self.params.length_penalty

    def _can_improve(self, length: int) -> bool:
        """Whether the best running beam would, if it ended now, enter the kept ones."""
        if len(self._finished) < self.params.beam_width:
            return True
        return self._score(self._running[0].cum_logprob, length) > self._finished[-1][0]

    def beams(self) -> list[Beam]:
        """The finished hypotheses, best first; the end-of-sequence token only where it was asked for."""
        keep_eos = self.params.include_stop_str_in_output
        return [
            beam
            if keep_eos or not beam.ended_by_eos
            else Beam(beam.token_ids[:-1], beam.cum_logprob, beam.logprobs[:-1], True)
            for _, beam in self._finished
        ]

    def result(self, request_id: str) -> RequestOutput:
        """All hypotheses as one output."""
        completions = [
            CompletionOutput(
                index=index,
                text=self._text(beam),
                token_ids=beam.token_ids,
                cumulative_logprob=beam.cum_logprob,
                logprobs=beam.logprobs,
                finish_reason="stop" if beam.ended_by_eos else "length",
            )
            for index, beam in enumerate(self.beams())
        ]
        return RequestOutput(
            request_id=request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            prompt_logprobs=None,
            outputs=completions,
            finished=True,
        )

    def _text(self, beam: Beam) -> str:
        if self.tokenizer is None:
            return ""
        return detokenize(self.tokenizer, self.prompt.token_ids, beam.token_ids, self.params.skip_special_tokens)


class BeamSearches:
    """Drives the searches of several prompts; their beams run in common batches.

    Args:
        processor: makes the requests of each step.
        ids: a new request id each time.
        limit: searches that run at a time; None: all.
    """

    def __init__(
        self, searches: Sequence[BeamSearch], processor: InputProcessor, ids: Iterator[str], limit: int | None = None
    ) -> None:
        self._searches = searches
        self._processor = processor
        self._ids = ids
        self._limit = limit
        self._active: list[BeamSearch] = []

    def next_requests(self) -> list[RequestRecord]:
        """What to run to its end next; none when all searches have ended."""
        self._active = [search for search in self._searches if not search.is_finished][: self._limit]
        return [self._process(search, prompt) for search in self._active for prompt in search.next_prompts()]

    def _process(self, search: BeamSearch, prompt: TokenizedPrompt) -> RequestRecord:
        with asking(search.adapter):
            return self._processor.process(
                next(self._ids),
                prompt,
                search.step_params,
                priority=search.priority,
                is_beam=True,
                is_continuation=search.has_begun,
                adapter=search.adapter,
            )

    def advance(self, outputs: Iterable[RequestOutput]) -> None:
        """Take in the outputs of `next_requests`, in its order."""
        rest = iter(outputs)
        for search in self._active:
            search.advance(list(itertools.islice(rest, search.num_beams)))
