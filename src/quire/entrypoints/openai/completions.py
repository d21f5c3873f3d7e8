"""`POST /v1/completions`: from a typed request to an answer or a stream of chunks.

Several prompts give choices numbered prompt by prompt: choice `i * n + j` is the j-th answer to the i-th prompt.
"""

import dataclasses
import functools
import itertools
from typing import Any, cast

import msgspec

from quire.config import limits
from quire.engine.input_processor import TokenizedPrompt
from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.http.long_bodies import AT_ONCE, chained, size_of
from quire.entrypoints.http.push import Events
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.openai import sampling
from quire.entrypoints.openai.chunks import COMPLETION_TEXT, ChunkStream, chunk_fields, stream_options
from quire.entrypoints.openai.generation import Generation, all_of, new_count, total_timing, total_usage
from quire.entrypoints.openai.logprobs import CompletionTokens, prompt_logprobs_json
from quire.entrypoints.openai.prompts import completion_prompts, embedded_prompts, require_tokenizer
from quire.entrypoints.openai.protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from quire.outputs import CompletionOutput, RequestOutput
from quire.parsers.thinking import find_prompt_thinking
from quire.sampling_params import BeamSearchParams, SamplingParams

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default; chat completions may run to the end of the context."""


@dataclasses.dataclass(slots=True)
class CompletionJob:
    """A checked request, ready to run.

    Attributes:
        parts: one for each prompt.
        choices: answers shown a prompt; fewer than are generated when `best_of` is larger than `n`.
        prompt_only: the request wants its prompt echoed and nothing generated (`max_tokens` 0).
    """

    request: CompletionRequest
    parts: list[Generation[CompletionRequest]]
    choices: int
    prompt_only: bool


async def prepare_completion(state: ServerState, request: CompletionRequest, public_id: str) -> CompletionJob:
    """Check a request and tokenize its prompts. Raises what the client must be told."""
    model, config = state.resolve_model(request.model), state.engine.config.model
    sampling.check_supported(request)
    generated, choices = _choice_counts(request)
    if generated > choices and config.returns_logits:
        raise bad_field("best_of", f"answers are ranked by logprobs, and logprobs_mode is {config.logprobs_mode!r}.")
    asked = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    room = max(1, config.max_model_len - max(1, asked))
    prompts = await embedded_prompts(state, request)
    if request.prompt or not prompts:
        prompts += await completion_prompts(state, request, room)
    if len(prompts) * generated > limits.MAX_N:
        field = "n" if request.best_of is None else "best_of"
        message = f"{generated} answers to {len(prompts)} prompts; at most {limits.MAX_N} sequences in one request."
        raise bad_field(field, message)
    _check_prompt_logprobs(request, prompts, config.vocab_size)
    prompt_only = asked == 0 and bool(request.echo)
    form = sampling.form_field(request)
    with sampling.naming_form(form):
        parts = [
            Generation(
                state=state,
                request=request,
                prompt=prompt,
                params=_params(state, request, prompt, 1 if prompt_only else asked, generated, choices),
                public_id=f"cmpl-{public_id}",
                model=model,
                count=new_count(state, request.return_timing),
                form=form,
            )
            for prompt in prompts
        ]
    return CompletionJob(request, parts, choices, prompt_only)


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
    state: ServerState, request: CompletionRequest, prompt: TokenizedPrompt, asked: int, generated: int, choices: int
) -> SamplingParams | BeamSearchParams:
    config = state.engine.config.model
    max_tokens = sampling.resolve_max_tokens(
        asked, len(prompt.token_ids), config.max_model_len, None, "max_tokens", "prompt"
    )
    if request.use_beam_search:
        return sampling.build_beam_search_params(request, ("logprobs", "echo"), max_tokens, config.default_sampling)
    logprobs = request.logprobs
    if generated > choices and logprobs is None:
        logprobs = 0  # ranking needs each answer's cumulative logprob
    params = sampling.build_sampling_params(
        request,
        max_tokens=max_tokens,
        logprobs=logprobs,
        defaults=config.default_sampling,
        n=generated,
        prompt_logprobs=request.logprobs if request.echo and request.prompt_logprobs is None else None,
    )
    if params.thinking_token_budget is not None:
        tokenizer = require_tokenizer(state.engine.get_tokenizer(), "thinking_token_budget")
        params.thinking = find_prompt_thinking(state.formats, prompt.token_ids, tokenizer)
        if params.thinking is None:
            params.thinking_token_budget = None
    return params


async def answer_completion(job: CompletionJob) -> CompletionResponse:
    """The whole answer of a request that is not streamed."""
    outputs, first = await run_completion(job), job.parts[0]
    choices: list[CompletionChoice] = []
    for part, output in zip(job.parts, outputs, strict=True):
        if not job.prompt_only:
            part.count.completion = sum(len(choice.token_ids) for choice in output.outputs)
        for choice in _best(output.outputs, job.choices):
            fields = _ChoiceWriter(job, part).write(len(choices), output, choice)
            choices.append(CompletionChoice(**fields))
    counts = [part.count for part in job.parts]
    return CompletionResponse(
        id=first.public_id,
        created=first.created,
        model=first.model,
        choices=choices,
        usage=total_usage([count.usage() for count in counts]),
        metrics=total_timing(counts),
        system_fingerprint=first.state.fingerprint,
        kv_transfer_params=outputs[0].kv_transfer_params,
    )


async def run_completion(job: CompletionJob) -> list[RequestOutput]:
    """Every prompt's last output. One that fails cancels the others, and its error is the request's."""
    return await all_of([part.finish() for part in job.parts])


def _best(outputs: list[CompletionOutput], keep: int) -> list[CompletionOutput]:
    """The answers to show: all, or those of the highest logprob a token."""
    if len(outputs) <= keep:
        return sorted(outputs, key=lambda choice: choice.index)
    return sorted(outputs, key=_mean_logprob, reverse=True)[:keep]


def _mean_logprob(choice: CompletionOutput) -> float:
    return (choice.cumulative_logprob or 0.0) / max(1, len(choice.token_ids))


class _ChoiceWriter:
    """Writes one answer, whole or part by part, with the prompt before the first part where it is echoed."""

    def __init__(self, job: CompletionJob, part: Generation[CompletionRequest]) -> None:
        self._job = job
        self._prompt = part.prompt
        self._tokens: CompletionTokens | None = None
        self._has_begun = False
        request, state = job.request, part.state
        if _tells_logprobs(request):
            as_ids = request.return_tokens_as_token_ids
            self._tokens = CompletionTokens(
                None if request.logprob_token_ids else request.logprobs,
                state.settings.return_tokens_as_token_ids if as_ids is None else as_ids,
                state.engine.get_tokenizer(),
                request.skip_special_tokens is not False,
            )

    def write(self, index: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """The fields of the next part. What belongs to the prompt is in the first."""
        job, request, is_first = self._job, self._job.request, not self._has_begun
        self._has_begun = True
        text = "" if job.prompt_only else choice.text
        if request.echo and is_first:
            text = (self._prompt.text or "") + text
        fields: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(output, choice, is_first),
            "finish_reason": "length" if choice.finish_reason and job.prompt_only else choice.finish_reason,
            "stop_reason": None if job.prompt_only else choice.stop_reason,
            "prompt_token_ids": self._prompt.token_ids if is_first and request.return_token_ids else None,
            "token_ids": None,
        }
        if request.return_token_ids:
            fields["token_ids"] = [] if job.prompt_only else list(choice.token_ids)
        if request.return_weight_versions and choice.weight_versions is not None:
            fields["weight_versions"] = choice.weight_versions
        if is_first and request.prompt_logprobs is not None and output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        return fields

    def _logprobs(self, output: RequestOutput, choice: CompletionOutput, is_first: bool) -> CompletionLogprobs | None:
        parts: list[CompletionLogprobs] = []
        if self._tokens is None:
            return None
        if is_first and self._job.request.echo and output.prompt_logprobs is not None:
            text = self._prompt.text or ""
            parts.append(self._tokens.write_prompt(self._prompt.token_ids, output.prompt_logprobs, text))
        if not self._job.prompt_only and choice.logprobs is not None:
            parts.append(self._tokens.write(choice.token_ids, choice.logprobs))
        return _joined(parts) if parts else None


def _joined(parts: list[CompletionLogprobs]) -> CompletionLogprobs:
    """The lists of a prompt and of its answer, one behind the other."""
    return parts[0] if len(parts) == 1 else CompletionLogprobs(*map(chained, *map(msgspec.structs.astuple, parts)))


def _tells_logprobs(request: CompletionRequest) -> bool:
    return bool(request.logprob_token_ids) or request.logprobs is not None


class CompletionStream(ChunkStream):
    """Writes the chunks of a streamed completion; remembers where the text of each choice has come to (`push.AnswerStream`)."""

    def __init__(self, job: CompletionJob) -> None:
        request, first = job.request, job.parts[0]
        options = stream_options(first.state.settings, request)
        fields = chunk_fields(first, "text_completion")
        super().__init__(job.parts, fields, COMPLETION_TEXT, options, request.return_timing)
        self._job = job
        self.write_text = functools.partial(self._writer.text, 0)
        self._choices: dict[int, _ChoiceWriter] = {}
        self._opened: set[int] = set()
        self._places = {part.request_id: place for place, part in enumerate(job.parts)}
        rich = self._continuous or _tells_logprobs(request) or request.echo
        self.takes_text = not (rich or request.return_token_ids or request.prompt_logprobs is not None)

    def write(self, output: RequestOutput) -> Events:
        place = self._places[output.request_id]
        part = self._job.parts[place]
        part.note(output)
        pieces: list[Events] = []
        for choice in output.outputs:
            index = place * self._job.choices + choice.index
            if not self._job.prompt_only:
                part.count.completion += len(choice.token_ids)
            if not self.takes_text or choice.finish_reason is not None:
                pieces.append(self._rich(part, index, output, choice))
            elif choice.text or index not in self._opened:  # a first token has a chunk, by which clients measure it
                self._opened.add(index)
                pieces.append(self._writer.text(index, choice.text))
        if all(isinstance(piece, bytes) for piece in pieces):
            return b"".join(cast("list[bytes]", pieces))
        return itertools.chain.from_iterable((piece,) if isinstance(piece, bytes) else piece for piece in pieces)

    def _rich(
        self, part: Generation[CompletionRequest], index: int, output: RequestOutput, choice: CompletionOutput
    ) -> Events:
        is_first = (writer := self._choices.get(index)) is None
        if writer is None:
            writer = self._choices[index] = _ChoiceWriter(self._job, part)
        fields = writer.write(index, output, choice)
        usage = part.count.usage() if self._continuous else None
        if is_first and size_of(fields) > AT_ONCE:  # what belongs to a long prompt
            return self._writer.long_choice(fields, usage)
        return self._writer.choice(fields, usage)
