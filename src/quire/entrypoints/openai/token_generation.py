"""`POST /inference/v1/generate`: token ids in, token ids out, for programs that tokenize and detokenize themselves.

The request brings `SamplingParams` as they are; what it does not set has their defaults, but `max_tokens`, which may then run to
the end of the context.
"""

import copy
import dataclasses
import time
from typing import Any

import msgspec

from quire.engine.input_processor import TokenizedPrompt
from quire.engine.request_stream import OutputStream
from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.http.streaming import DONE, error_event, failure_of
from quire.entrypoints.openai.generation import (
    TokenCount,
    check_output,
    last_output,
    open_generation,
    start_generation,
)
from quire.entrypoints.openai.logprobs import chat_logprobs, finite, prompt_logprobs_json
from quire.entrypoints.openai.prompts import check_token_ids
from quire.entrypoints.openai.protocol import ChatLogprobs
from quire.entrypoints.openai.sampling import resolve_max_tokens
from quire.entrypoints.openai.token_protocol import (
    GeneratedChoice,
    GenerateRequest,
    GenerateResponse,
    SampledTokenLogprob,
    TokenIdLogprob,
    TokenIdLogprobs,
)
from quire.errors import RequestError, did_you_mean
from quire.guards import is_dict
from quire.logprobs import LogprobsOnePosition
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

_encode = msgspec.json.Encoder().encode
_NOT_YET = ("features", "content_parts", "kv_transfer_params", "ec_transfer_params")
_INTERNAL = ("thinking", "eos_token_ids", "bad_words_token_ids", "logits_processors", "output_kind", "flat_logprobs")
_KNOWN = frozenset(SamplingParams.__struct_fields__) - frozenset(_INTERNAL)


@dataclasses.dataclass(slots=True)
class TokenJob:
    """A checked request, ready to run."""

    request: GenerateRequest
    prompt: TokenizedPrompt
    params: SamplingParams
    public_id: str
    model: str
    created: int


async def prepare_tokens(state: ServerState, request: GenerateRequest, public_id: str) -> TokenJob:
    """Check a request. Raises what the client must be told."""
    model, config = state.resolve_model(request.model), state.engine.config.model
    for field in _NOT_YET:
        if getattr(request, field):
            raise bad_field(field, "not supported yet.", "not_supported")
    if request.output_mode == "derender":
        raise bad_field("output_mode", "'derender' is not supported yet; use tokens or text.", "not_supported")
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", "only allowed when stream is true.")
    array = check_token_ids(request.token_ids, config.vocab_size, "token_ids")
    room = resolve_max_tokens(
        None, len(request.token_ids), config.max_model_len, config.default_sampling.get("max_tokens"), "", "token_ids"
    )
    params = read_params(request.sampling_params, room)
    params.output_kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    if request.output_mode == "text" and (state.engine.get_tokenizer() is None or not params.detokenize):
        raise bad_field("output_mode", "'text' needs a tokenizer on the server, and sampling_params.detokenize.")
    prompt = TokenizedPrompt(request.token_ids, array=array)
    return TokenJob(request, prompt, params, f"generate-tokens-{public_id}", model, int(time.time()))


def read_params(given: dict[str, Any], room: int) -> SamplingParams:
    """`SamplingParams` from a JSON object. A name that is unknown may have a value that asks for nothing.
    Raises HTTPError: 400; `param` is the path of what is wrong.

    Args:
        room: `max_tokens` where nothing is said.
    """
    values = {name: value for name, value in given.items() if name in _KNOWN and value is not None}
    for name, value in given.items():
        if name not in _KNOWN and name not in _INTERNAL and value not in (None, False, 0, "", [], {}):
            unknown = "this parameter is unknown" + did_you_mean(name[:60], _KNOWN, "; {}", ".", cutoff=0.75)
            raise bad_field(f"sampling_params.{name[:60]}", unknown)
    values.setdefault("max_tokens", room)
    try:
        if is_dict(values.get("logit_bias")):
            values["logit_bias"] = {int(token_id): bias for token_id, bias in values["logit_bias"].items()}
        if is_dict(values.get("structured_outputs")):
            values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
        return SamplingParams(**values)
    except RequestError as error:
        raise bad_field(f"sampling_params.{error.param or ''}".rstrip("."), str(error)) from None
    except (TypeError, ValueError) as error:
        raise bad_field("sampling_params", f"{error}.") from None


async def answer_tokens(state: ServerState, job: TokenJob) -> GenerateResponse:
    """The whole answer of a request that is not streamed."""
    request = job.request
    outputs = start_generation(state, request, job.prompt, job.params, job.public_id)
    output = await last_output(outputs, job.public_id)
    count = _token_count(state, job)
    count.add_cached(output)
    count.add_times(output)
    for choice in output.outputs:
        count.add_choice(choice)
    ordered = sorted(output.outputs, key=lambda choice: choice.index)
    response = GenerateResponse(
        request_id=job.public_id,
        output_mode=request.output_mode,
        model=job.model,
        created=job.created,
        choices=[_choice(state, job, choice) for choice in ordered],
        usage=count.usage(),
        metrics=count.timing(),
    )
    if output.prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs_json(output.prompt_logprobs)
    if request.return_token_ids:
        response.prompt_token_ids = request.token_ids
    return response


def _token_count(state: ServerState, job: TokenJob) -> TokenCount:
    settings = state.settings
    times = [] if settings.enable_per_request_metrics else None
    return TokenCount(len(job.prompt.token_ids), details=settings.enable_prompt_tokens_details, times=times)


def _choice(state: ServerState, job: TokenJob, choice: CompletionOutput) -> GeneratedChoice:
    shown = GeneratedChoice(
        index=choice.index,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=list(choice.token_ids),
    )
    with_text = job.request.output_mode == "text"
    if choice.logprobs is not None:
        shown.logprobs = _text_logprobs(state, choice) if with_text else _id_logprobs(choice)
    if with_text:
        shown.text = choice.text
    return shown


def _text_logprobs(state: ServerState, choice: CompletionOutput) -> ChatLogprobs:
    as_ids, tokenizer = state.settings.return_tokens_as_token_ids, state.engine.get_tokenizer()
    return chat_logprobs(choice.token_ids, choice.logprobs or (), None, as_ids, tokenizer)


def _id_logprobs(choice: CompletionOutput) -> TokenIdLogprobs:
    positions = zip(choice.token_ids, choice.logprobs or (), strict=False)
    return TokenIdLogprobs([_sampled(token_id, position) for token_id, position in positions])


def _sampled(token_id: int, position: LogprobsOnePosition) -> SampledTokenLogprob:
    own = position[token_id]
    entries = [TokenIdLogprob(other, finite(entry.logprob), entry.rank) for other, entry in position.items()]
    return SampledTokenLogprob(token_id, finite(own.logprob), own.rank, entries)


class TokenStream:
    """Writes the chunks of a streamed answer. See `push.AnswerStream`."""

    takes_text = False

    def __init__(self, state: ServerState, job: TokenJob) -> None:
        self._state = state
        self._job = job
        options = job.request.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous = self._include_usage and options is not None and bool(options.continuous_usage_stats)
        self._count = _token_count(state, job)
        self._opened = False
        self._head: dict[str, Any] = {"request_id": job.public_id, "output_mode": job.request.output_mode}

    async def open(self) -> OutputStream:
        job = self._job
        request_id = self._state.engine_request_id(job.public_id)
        return await open_generation(self._state, job.request, job.prompt, copy.copy(job.params), request_id)

    def write(self, output: RequestOutput) -> bytes:
        check_output(output, self._job.public_id)
        self._count.add_cached(output)
        self._count.add_times(output)
        chunks: list[bytes] = []
        for choice in output.outputs:
            self._count.add_choice(choice)
            if not choice.token_ids and choice.finish_reason is None and not choice.text:
                continue
            chunk = {**self._head, "choices": [_choice(self._state, self._job, choice)]}
            if not self._opened and self._job.request.return_token_ids:
                chunk["prompt_token_ids"] = self._job.request.token_ids
            self._opened = True
            chunk["usage"] = self._count.usage() if self._continuous else None
            chunks.append(b"data: " + _encode(chunk) + b"\n\n")
        return b"".join(chunks)

    def write_text(self, text: str) -> bytes:
        raise NotImplementedError("a stream of tokens is more than its text")

    async def end(self, error: Exception | None) -> bytes:
        if error is not None:
            return error_event(failure_of(error, self._job.public_id), self._state.settings.error_format) + DONE
        if not self._include_usage:
            return DONE
        last: dict[str, Any] = {**self._head, "choices": [], "usage": self._count.usage()}
        if (timing := self._count.timing()) is not None:
            last["metrics"] = timing
        return b"data: " + _encode(last) + b"\n\n" + DONE
