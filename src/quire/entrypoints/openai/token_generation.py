"""`POST /inference/v1/generate`: token ids in, token ids out, for programs that tokenize and detokenize themselves.

The request brings `SamplingParams` as they are; what it does not set has their defaults, but `max_tokens`, which may then run to
the end of the context. `POST /v1/chat/completions/render` and its like tell what would be sent here for another request.
"""

from typing import Any

import msgspec

from quire.engine.input_processor import TokenizedPrompt
from quire.entrypoints.http.errors import HTTPError, bad_field
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.openai.chat import prepare_chat
from quire.entrypoints.openai.chunks import ChunkStream, ChunkWriter
from quire.entrypoints.openai.completions import prepare_completion
from quire.entrypoints.openai.generation import Generation, new_count
from quire.entrypoints.openai.logprobs import chat_logprobs, finite, prompt_logprobs_json
from quire.entrypoints.openai.prompts import check_token_ids
from quire.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GeneratedChoice,
    GenerateRequest,
    GenerateResponse,
    SampledTokenLogprob,
    TokenIdLogprob,
    TokenIdLogprobs,
)
from quire.entrypoints.openai.sampling import OWN_FORM, resolve_max_tokens
from quire.errors import RequestError, did_you_mean
from quire.guards import is_dict
from quire.logprobs import LogprobsOnePosition
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

_NOT_YET = ("features", "content_parts", "ec_transfer_params")
INTERNAL = ("thinking", "eos_token_ids", "bad_words_token_ids", "logits_processors", "output_kind", "flat_logprobs")
"""Parameters that a request of this route does not bring."""
_KNOWN = frozenset(SamplingParams.__struct_fields__) - frozenset(INTERNAL)

TokenJob = Generation[GenerateRequest]


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
    array = check_token_ids(request.token_ids, state.engine.tokenizer_source.num_tokens(), "token_ids")
    room = resolve_max_tokens(
        None, len(request.token_ids), config.max_model_len, config.default_sampling.get("max_tokens"), "", "token_ids"
    )
    params = read_params(request.sampling_params, room)
    if request.kv_transfer_params is not None:
        params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": request.kv_transfer_params}
    params.output_kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    if request.output_mode == "text" and (state.engine.get_tokenizer() is None or not params.detokenize):
        raise bad_field("output_mode", "'text' needs a tokenizer on the server, and sampling_params.detokenize.")
    return Generation(
        state=state,
        request=request,
        prompt=TokenizedPrompt(request.token_ids, array=array),
        params=params,
        public_id=f"generate-tokens-{public_id}",
        model=model,
        count=new_count(state, None),
        form=f"sampling_params.{OWN_FORM}",
    )


def read_params(given: dict[str, Any], room: int) -> SamplingParams:
    """`SamplingParams` from a JSON object. A name that is unknown may have a value that asks for nothing.
    Raises HTTPError, a 400 whose `param` is the path of what is wrong.

    Args:
        room: `max_tokens` where the request does not say.
    """
    values = {name: value for name, value in given.items() if name in _KNOWN and value is not None}
    for name, value in given.items():
        if name not in _KNOWN and name not in INTERNAL and value not in (None, False, 0, "", [], {}):
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


async def answer_tokens(job: TokenJob) -> GenerateResponse:
    """The whole answer of a request that is not streamed."""
    output, request = await job.finish(), job.request
    for choice in output.outputs:
        job.count.add_choice(choice)
    ordered = sorted(output.outputs, key=lambda choice: choice.index)
    response = GenerateResponse(
        request_id=job.public_id,
        output_mode=request.output_mode,
        model=job.model,
        created=job.created,
        choices=[_choice(job, choice) for choice in ordered],
        usage=job.count.usage(),
        metrics=job.count.timing(),
        kv_transfer_params=output.kv_transfer_params,
    )
    if output.prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs_json(output.prompt_logprobs)
    if request.return_token_ids:
        response.prompt_token_ids = request.token_ids
    return response


def _choice(job: TokenJob, choice: CompletionOutput) -> GeneratedChoice:
    shown = GeneratedChoice(
        index=choice.index,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=list(choice.token_ids),
    )
    positions = choice.logprobs
    if job.request.output_mode == "text":
        shown.text = choice.text
        if positions is not None:
            as_ids, tokenizer = job.state.settings.return_tokens_as_token_ids, job.state.engine.get_tokenizer()
            shown.logprobs = chat_logprobs(choice.token_ids, positions, None, as_ids, tokenizer)
    elif positions is not None:
        pairs = zip(choice.token_ids, positions, strict=False)
        shown.logprobs = TokenIdLogprobs([_sampled(token_id, position) for token_id, position in pairs])
    return shown


def _sampled(token_id: int, position: LogprobsOnePosition) -> SampledTokenLogprob:
    own = position[token_id]
    entries = [TokenIdLogprob(other, finite(entry.logprob), entry.rank) for other, entry in position.items()]
    return SampledTokenLogprob(token_id, finite(own.logprob), own.rank, entries)


class TokenStream(ChunkStream):
    """Writes the chunks of a streamed answer. See `push.AnswerStream`."""

    takes_text = False

    def __init__(self, job: TokenJob) -> None:
        request = job.request
        fields = {"request_id": job.public_id, "output_mode": request.output_mode}
        super().__init__([job], fields, ("", ""), request.stream_options)
        self._writer = ChunkWriter(fields, ("", ""), include_usage=True)  # null, where it is not wanted
        self._job = job
        self._beside = {"prompt_token_ids": request.token_ids} if request.return_token_ids else {}

    def write(self, output: RequestOutput) -> bytes:
        self._job.note(output)
        chunks: list[bytes] = []
        for choice in output.outputs:
            self._job.count.add_choice(choice)
            if choice.token_ids or choice.finish_reason is not None or choice.text:
                usage = self._job.count.usage() if self._continuous else None
                chunk = self._writer.choice(_choice(self._job, choice), usage, self._beside)
                chunks.append(chunk)
                self._beside = {}
        return b"".join(chunks)

    def write_text(self, text: str) -> bytes:
        raise NotImplementedError("a stream of tokens is more than its text")


async def render_chat(state: ServerState, request: ChatCompletionRequest, public_id: str) -> GenerateRequest:
    """A conversation as tokens. Raises what the client must be told, as both."""
    return rendered(await prepare_chat(state, request, public_id))


async def render_completion(state: ServerState, request: CompletionRequest, public_id: str) -> list[GenerateRequest]:
    """Each prompt as tokens."""
    return [rendered(part) for part in (await prepare_completion(state, request, public_id)).parts]


def rendered(job: Generation[Any]) -> GenerateRequest:
    """The tokens and parameters of a request that is ready to run. Raises HTTPError: it is more than these."""
    if job.prompt.media or not isinstance(job.params, SamplingParams):
        what = "use_beam_search" if not job.prompt.media else "media"
        raise HTTPError(400, f"A request with {what} is more than tokens: it cannot be rendered.", code="not_supported")
    params = msgspec.to_builtins(job.params, str_keys=True)
    return GenerateRequest(
        token_ids=list(job.prompt.token_ids),
        sampling_params={name: value for name, value in params.items() if name not in INTERNAL},
        model=job.model,
        request_id=job.public_id,
        stream=job.request.stream,
        cache_salt=job.prompt.cache_salt,
        priority=job.request.priority,
    )
