"""`POST /v1/completions`: from a typed request to an answer or a stream of chunks.

Several prompts give choices numbered prompt by prompt: choice `i * n + j` is the j-th answer to the i-th prompt.
"""

import dataclasses
import functools
import time
from typing import Any

from quire.config import limits
from quire.engine.input_processor import TokenizedPrompt
from quire.engine.request_stream import MergedStream, OutputStream
from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.http.streaming import DONE, ChunkWriter, completion_chunk_writer, error_event, failure_of
from quire.entrypoints.openai import sampling
from quire.entrypoints.openai.generation import (
    TokenCount,
    all_of,
    check_output,
    last_output,
    open_generation,
    start_generation,
    wants_timing,
    wants_usage,
)
from quire.entrypoints.openai.logprobs import CompletionTokens, prompt_logprobs_json
from quire.entrypoints.openai.prompts import completion_prompts, require_tokenizer
from quire.entrypoints.openai.protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from quire.outputs import CompletionOutput, RequestOutput
from quire.parsers.thinking import find_prompt_thinking
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.tokenizers.interface import Tokenizer


@dataclasses.dataclass(slots=True)
class CompletionJob:
    """A checked request, ready to run.

    Attributes:
        choices: answers shown a prompt; fewer than are generated when `best_of` is larger than `n`.
        prompt_only: the request wants its prompt echoed and nothing generated (`max_tokens` 0).
    """

    request: CompletionRequest
    prompts: list[TokenizedPrompt]
    params: list[SamplingParams | BeamSearchParams]
    choices: int
    prompt_only: bool
    public_id: str
    model: str
    created: int


async def prepare_completion(state: ServerState, request: CompletionRequest, public_id: str) -> CompletionJob:
    """Check a request and tokenize its prompts. Raises what the client must be told."""
    model = state.resolve_model(request.model)
    sampling.apply_defaults(state.settings, request)
    sampling.refuse_unsupported(request)
    sampling.check_stream_options(request)
    generated, choices = _choice_counts(request)
    config = state.engine.config.model
    if generated > choices and config.returns_logits:
        raise bad_field("best_of", f"answers are ranked by logprobs, and logprobs_mode is {config.logprobs_mode!r}.")
    asked = sampling.asked_completion_tokens(request)
    room = max(1, config.max_model_len - max(1, asked))
    prompts = await completion_prompts(request, state.engine.get_tokenizer(), config.vocab_size, room)
    if len(prompts) * generated > limits.MAX_N:
        field = "n" if request.best_of is None else "best_of"
        message = f"{generated} answers to {len(prompts)} prompts; at most {limits.MAX_N} sequences in one request."
        raise bad_field(field, message)
    _check_prompt_logprobs(request, prompts, config.vocab_size)
    prompt_only = asked == 0 and bool(request.echo)
    params: list[SamplingParams | BeamSearchParams] = []
    for prompt in prompts:
        max_tokens = sampling.resolve_max_tokens(
            1 if prompt_only else asked, len(prompt.token_ids), config.max_model_len, None, "max_tokens", "prompt"
        )
        each = _params(request, max_tokens, generated, choices, config.default_sampling)
        if isinstance(each, SamplingParams) and each.thinking_token_budget is not None:
            _limit_thinking(state, each, prompt)
        params.append(each)
    return CompletionJob(request, prompts, params, choices, prompt_only, f"cmpl-{public_id}", model, int(time.time()))


def _check_prompt_logprobs(request: CompletionRequest, prompts: list[TokenizedPrompt], vocab_size: int) -> None:
    """Refuse an answer that would hold too many entries; each prompt by itself may be small."""
    field = "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs"
    wanted = request.prompt_logprobs
    if wanted is None and request.echo:
        wanted = request.logprobs
    if wanted is None:
        return
    tokens, each = sum(len(prompt.token_ids) for prompt in prompts), vocab_size if wanted < 0 else wanted + 1
    if (cost := tokens * each) > limits.MAX_PROMPT_LOGPROBS:
        what = f"{cost} entries ({tokens} prompt tokens x {each})"
        allowed = f"at most {limits.MAX_PROMPT_LOGPROBS} in one answer"
        raise bad_field(field, f"{what}; {allowed}: ask for fewer, or send fewer prompts in a request.")


def _limit_thinking(state: ServerState, params: SamplingParams, prompt: TokenizedPrompt) -> None:
    """Tell an answer with a budget for its thoughts where it thinks, by what the prompt shows."""
    tokenizer = require_tokenizer(state.engine.get_tokenizer(), "thinking_token_budget")
    params.thinking = find_prompt_thinking(state.formats, prompt.token_ids, tokenizer)
    if params.thinking is None:
        params.thinking_token_budget = None


def _choice_counts(request: CompletionRequest) -> tuple[int, int]:
    """How many answers to generate, and how many of them to show, a prompt."""
    choices = 1 if request.n is None else request.n
    if request.best_of is None:
        return choices, choices
    if request.best_of < choices:
        raise bad_field("best_of", f"{request.best_of} is less than n ({choices}).")
    if request.best_of > choices and request.stream:
        raise bad_field("best_of", "cannot be larger than n in a stream.")
    return request.best_of, choices


def _params(
    request: CompletionRequest, max_tokens: int, generated: int, choices: int, defaults: dict[str, Any]
) -> SamplingParams | BeamSearchParams:
    if request.use_beam_search:
        for field in ("logprobs", "echo", "logprob_token_ids"):
            if getattr(request, field):
                raise bad_field(field, "not available with use_beam_search.", "not_supported")
        return sampling.build_beam_search_params(request, max_tokens=max_tokens, defaults=defaults)
    logprobs = request.logprobs
    if generated > choices and logprobs is None:
        logprobs = 0  # ranking needs each answer's cumulative logprob
    prompt_logprobs = request.logprobs if request.echo and request.prompt_logprobs is None else None
    return sampling.build_sampling_params(
        request,
        max_tokens=max_tokens,
        logprobs=logprobs,
        defaults=defaults,
        n=generated,
        prompt_logprobs=prompt_logprobs,
    )


async def answer_completion(state: ServerState, job: CompletionJob) -> CompletionResponse:
    """The whole answer of a request that is not streamed."""
    outputs = await run_completion(state, job)
    choices: list[CompletionChoice] = []
    count = TokenCount(details=state.settings.enable_prompt_tokens_details)
    count.times = [] if wants_timing(state, job.request) else None
    for prompt, output in zip(job.prompts, outputs, strict=True):
        count.prompt += len(prompt.token_ids)
        count.cached = (count.cached or 0) + max(0, output.num_cached_tokens or 0)
        count.add_times(output)
        if not job.prompt_only:
            count.completion += sum(len(choice.token_ids) for choice in output.outputs)
        for choice in _best(output.outputs, job.choices):
            choices.append(_choice(job, prompt, output, choice, len(choices), state.engine.get_tokenizer()))
    return CompletionResponse(
        id=job.public_id,
        created=job.created,
        model=job.model,
        choices=choices,
        usage=count.usage(),
        metrics=count.timing(),
        system_fingerprint=state.fingerprint,
    )


async def run_completion(state: ServerState, job: CompletionJob) -> list[RequestOutput]:
    """Every prompt's last output. One that fails cancels the others, and its error is the request's."""
    runs = [
        last_output(start_generation(state, job.request, prompt, params, job.public_id), job.public_id)
        for prompt, params in zip(job.prompts, job.params, strict=True)
    ]
    return await all_of(runs)


def _best(outputs: list[CompletionOutput], keep: int) -> list[CompletionOutput]:
    """The answers to show: all, or those of the highest logprob a token."""
    if len(outputs) <= keep:
        return sorted(outputs, key=lambda choice: choice.index)
    return sorted(outputs, key=lambda choice: -(choice.cumulative_logprob or 0.0) / max(1, len(choice.token_ids)))[
        :keep
    ]


def _choice(
    job: CompletionJob,
    prompt: TokenizedPrompt,
    output: RequestOutput,
    choice: CompletionOutput,
    index: int,
    tokenizer: Tokenizer | None,
) -> CompletionChoice:
    request = job.request
    shown = _ChoiceWriter(job, prompt, tokenizer).write(output, choice)
    answer = CompletionChoice(
        index=index,
        text=shown.text,
        logprobs=shown.logprobs,
        finish_reason="length" if job.prompt_only else choice.finish_reason,
        stop_reason=None if job.prompt_only else choice.stop_reason,
    )
    if request.prompt_logprobs is not None and output.prompt_logprobs is not None:
        answer.prompt_logprobs = prompt_logprobs_json(output.prompt_logprobs)
    if request.return_token_ids:
        answer.prompt_token_ids = prompt.token_ids
        answer.token_ids = [] if job.prompt_only else list(choice.token_ids)
    return answer


@dataclasses.dataclass(slots=True)
class _Shown:
    text: str
    logprobs: CompletionLogprobs | None = None


class _ChoiceWriter:
    """One answer's text and logprobs, whole or part by part, with the prompt before the first part where it is echoed."""

    def __init__(self, job: CompletionJob, prompt: TokenizedPrompt, tokenizer: Tokenizer | None) -> None:
        self._job = job
        self._prompt = prompt
        self._tokens: CompletionTokens | None = None
        self.has_begun = False
        request = job.request
        if _tells_logprobs(request):
            top = None if request.logprob_token_ids else request.logprobs
            as_ids, skips = bool(request.return_tokens_as_token_ids), request.skip_special_tokens is not False
            self._tokens = CompletionTokens(top, as_ids, tokenizer, skips)

    def write(self, output: RequestOutput, choice: CompletionOutput) -> _Shown:
        """The next part."""
        job, parts = self._job, list[CompletionLogprobs]()
        text = "" if job.prompt_only else choice.text
        if job.request.echo and not self.has_begun:
            text = (self._prompt.text or "") + text
            if self._tokens is not None and output.prompt_logprobs is not None:
                positions = [position or None for position in output.prompt_logprobs]
                parts.append(self._tokens.write_prompt(self._prompt.token_ids, positions, self._prompt.text or ""))
        self.has_begun = True
        if self._tokens is not None and not job.prompt_only and choice.logprobs is not None:
            parts.append(self._tokens.write(choice.token_ids, choice.logprobs))
        return _Shown(text, _joined(parts) if parts else None)


def _joined(parts: list[CompletionLogprobs]) -> CompletionLogprobs:
    first, *others = parts
    for other in others:
        first.tokens += other.tokens
        first.token_logprobs += other.token_logprobs
        first.top_logprobs += other.top_logprobs
        first.text_offset += other.text_offset
    return first


def _tells_logprobs(request: CompletionRequest) -> bool:
    return bool(request.logprob_token_ids) or request.logprobs is not None


class CompletionStream:
    """Writes the chunks of a streamed completion; remembers where the text of each choice has come to (`push.AnswerStream`)."""

    def __init__(self, state: ServerState, job: CompletionJob) -> None:
        include_usage, self._continuous = wants_usage(job.request)
        self._include_usage = include_usage
        self._state = state
        self._job = job
        self._writer: ChunkWriter = completion_chunk_writer(
            job.public_id, job.created, job.model, include_usage, state.fingerprint
        )
        self.write_text = functools.partial(self._writer.text, 0)
        details, timed = state.settings.enable_prompt_tokens_details, wants_timing(state, job.request)
        self._counts = [
            TokenCount(len(prompt.token_ids), details=details, times=[] if timed else None) for prompt in job.prompts
        ]
        self._choices: dict[int, _ChoiceWriter] = {}
        self._opened: set[int] = set()
        self._prompt_index: dict[str, int] = {}
        request = job.request
        rich = self._continuous or _tells_logprobs(request) or request.echo
        self.takes_text = not (rich or request.return_token_ids or request.prompt_logprobs is not None)

    async def open(self) -> OutputStream:
        """Queue a request for each prompt."""
        job, streams = self._job, list[OutputStream]()
        try:
            for index, (prompt, params) in enumerate(zip(job.prompts, job.params, strict=True)):
                assert isinstance(params, SamplingParams)
                request_id = self._state.engine_request_id(job.public_id)
                self._prompt_index[request_id] = index
                streams.append(await open_generation(self._state, job.request, prompt, params, request_id))
        except BaseException:
            MergedStream(streams).close()
            raise
        return streams[0] if len(streams) == 1 else MergedStream(streams)

    async def end(self, error: Exception | None) -> bytes:
        if error is not None:
            return error_event(failure_of(error, self._job.public_id), self._state.settings.error_format) + DONE
        total = self._total()
        return (self._writer.usage(total.usage(), total.timing()) if self._include_usage else b"") + DONE

    def write(self, output: RequestOutput) -> bytes:
        prompt_index = self._prompt_index[output.request_id]
        check_output(output, self._job.public_id)
        count = self._counts[prompt_index]
        count.add_cached(output)
        count.add_times(output)
        pieces: list[bytes] = []
        for choice in output.outputs:
            index = prompt_index * self._job.choices + choice.index
            if not self._job.prompt_only:
                count.completion += len(choice.token_ids)
            if self.takes_text and choice.finish_reason is None:
                if (
                    choice.text or index not in self._opened
                ):  # a client measures the first token by its chunk, text or not
                    self._opened.add(index)
                    pieces.append(self._writer.text(index, choice.text))
            else:
                pieces.append(self._rich(prompt_index, index, output, choice))
        return b"".join(pieces)

    def _rich(self, prompt_index: int, index: int, output: RequestOutput, choice: CompletionOutput) -> bytes:
        job, request = self._job, self._job.request
        prompt = job.prompts[prompt_index]
        if (writer := self._choices.get(index)) is None:
            writer = self._choices[index] = _ChoiceWriter(job, prompt, self._state.engine.get_tokenizer())
        first = not writer.has_begun
        shown = writer.write(output, choice)
        finish = choice.finish_reason
        chunk: dict[str, Any] = {
            "index": index,
            "text": shown.text,
            "logprobs": shown.logprobs,
            "finish_reason": "length" if finish and job.prompt_only else finish,
            "stop_reason": None if job.prompt_only else choice.stop_reason,
            "prompt_token_ids": prompt.token_ids if first and request.return_token_ids else None,
            "token_ids": None,
        }
        if request.return_token_ids:
            chunk["token_ids"] = [] if job.prompt_only else list(choice.token_ids)
        if first and request.prompt_logprobs is not None and output.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        return self._writer.choice(chunk, self._counts[prompt_index].usage() if self._continuous else None)

    def _total(self) -> TokenCount:
        total = TokenCount(details=self._state.settings.enable_prompt_tokens_details)
        total.times = [times for count in self._counts for times in count.times or ()]
        for count in self._counts:
            total.prompt += count.prompt
            total.completion += count.completion
            total.cached = (total.cached or 0) + (count.cached or 0)
        return total
