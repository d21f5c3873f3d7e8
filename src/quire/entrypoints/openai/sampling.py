"""From a request's fields to `SamplingParams` (or `BeamSearchParams`), with the wanted form of the answer.

A field that the request does not mention comes from the model's generation config, then from `SamplingParams`' default.
Ranges are checked by `SamplingParams` itself; its `RequestError` becomes a 400. A field that the protocol has and this
server cannot serve yet is refused by name: one that is silently dropped gives a wrong answer that looks right.
"""

from collections.abc import Sequence
from typing import Any

from quire.config import limits
from quire.entrypoints.http.errors import TOO_LONG, HTTPError, bad_field, bad_request
from quire.entrypoints.http.state import ServerSettings
from quire.entrypoints.openai.answers import AnswerReader
from quire.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    ResponseFormat,
    StreamOptions,
)
from quire.entrypoints.openai.tool_choice import calls_or_answer
from quire.errors import RequestError
from quire.guards import is_dict
from quire.parsers.choice import AnswerFormats
from quire.parsers.thinking import build_thinking, check_budget, find_harmony_thinking
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams, Thinking
from quire.tokenizers.interface import Tokenizer

_HARMONY_ANSWER = "<|channel|>final<|message|>"
_GUIDED = ("json", "regex", "choice", "grammar")
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def read_constraint(request: GenerationFields) -> StructuredOutputsParams | None:
    """The one constraint of a request, None where it has none.
    Raises HTTPError: 400, it has several that differ, or one that makes no sense."""
    found: dict[str, dict[str, Any]] = {}
    if request.response_format is not None and (fields := _of_format(request.response_format)) is not None:
        found["response_format"] = fields
    if request.structured_outputs is not None:
        found["structured_outputs"] = _of_structured_outputs(request.structured_outputs)
    for name in _GUIDED:
        value = getattr(request, f"guided_{name}")
        if value is not None and value != "" and value != []:
            pattern = {"whitespace_pattern": request.guided_whitespace_pattern}
            found[f"guided_{name}"] = {name: value} | (pattern if request.guided_whitespace_pattern else {})
    forms = list(found.values())
    if any(form != forms[0] for form in forms):  # some clients say the same in new fields and in old ones
        raise bad_request(f"{' and '.join(found)} cannot be used together: give one of them.", next(iter(found)))
    if not forms:
        return None
    try:
        return StructuredOutputsParams(**forms[0])
    except RequestError as error:
        field = next(iter(found))
        raise bad_field(field, str(error)) from None


def constrain_answer(
    params: SamplingParams | BeamSearchParams, reader: AnswerReader | None, tokenizer: Tokenizer | None
) -> None:
    """Set the form of a chat answer that is read so, and where it is asked for.
    Raises HTTPError: 400, a call has to be made and the request wants another form, or a beam search."""
    if reader is None or tokenizer is None:
        return
    must_call = reader.choice.must_call
    if isinstance(params, BeamSearchParams):
        if must_call:
            raise bad_field("tool_choice", "beam search follows no grammar, so no call can be forced.")
        return
    if must_call and params.structured_outputs is not None and reader.request.response_format is None:
        raise bad_field("tool_choice", "a call that has to be made has a form of its own; leave the other out.")
    grammar = reader.call_grammar if must_call or params.structured_outputs is None else _calls_too(params, reader)
    if grammar is not None:
        params.structured_outputs = StructuredOutputsParams(grammar=grammar)
        params.thinking = None if reader.formats.is_harmony else find_thinking(reader, tokenizer)
    elif params.structured_outputs is not None:
        params.thinking = find_thinking(reader, tokenizer)


def _calls_too(params: SamplingParams, reader: AnswerReader) -> str | None:
    """The grammar of an answer that has the wanted format if it is no call; None where it can be no call."""
    form = params.structured_outputs
    if form is None or reader.request.response_format is None or reader.choice.kind != "auto":
        return None
    schema = {"type": "object"} if form.json_object else form.json
    one = reader.request.parallel_tool_calls is False
    if not is_dict(schema):
        return None
    return calls_or_answer(reader.formats, reader.choice, reader.tokenizer, one, schema)


def find_thinking(reader: AnswerReader, tokenizer: Tokenizer) -> Thinking | None:
    """Where an answer that is read so is still thinking, which no form is asked of."""
    if reader.formats.is_harmony:
        return Thinking(tokenizer.encode(_HARMONY_ANSWER, add_special_tokens=False))
    reasoning = reader.formats.reasoning
    return None if reasoning is None else build_thinking(reasoning, reader.in_reasoning, tokenizer)


def limit_thinking(
    params: SamplingParams | BeamSearchParams,
    formats: AnswerFormats,
    reader: AnswerReader | None,
    tokenizer: Any,
    prompt_ids: Sequence[int],
) -> None:
    """Tell a chat answer with a budget for its thoughts where it thinks. One that does not think needs no budget.
    Raises RequestError: the model's reasoning cannot be limited."""
    if isinstance(params, BeamSearchParams) or params.thinking_token_budget is None:
        return
    check_budget(formats, tokenizer)
    if formats.is_harmony and reader is not None:
        if params.structured_outputs is not None and params.thinking is None:
            why = "the form of this request's calls covers the thoughts before them"
            raise RequestError(f"thinking_token_budget cannot be kept: {why}", param="thinking_token_budget")
        may_call = reader.choice.kind != "none" and params.structured_outputs is None
        thinking = find_harmony_thinking(prompt_ids, tokenizer, may_call)
        if thinking is None:
            params.thinking_token_budget = None
        else:
            params.thinking = thinking
    elif params.thinking is None and reader is not None and tokenizer is not None:
        params.thinking = find_thinking(reader, tokenizer)
    if params.thinking is None:
        params.thinking_token_budget = None


def _of_format(given: ResponseFormat) -> dict[str, Any] | None:
    match given.type:
        case "text":
            return None
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": _schema_of(given.json_schema)}
        case "structural_tag":
            tag = {"structures": given.structures, "triggers": given.triggers, "format": given.format}
            return {"structural_tag": {name: value for name, value in tag.items() if value is not None}}
        case _:
            allowed = ", ".join(map(repr, _FORMATS))
            raise bad_field("response_format.type", f"{given.type!r} is unknown; allowed: {allowed}.")


def _schema_of(given: Any) -> Any:
    schema = given.get("schema") if is_dict(given) else None
    if schema is None:
        raise _wrong("response_format.json_schema", "an object with a `schema`")
    return schema


def _of_structured_outputs(given: Any) -> dict[str, Any]:
    if not is_dict(given):
        raise _wrong("structured_outputs", "an object")
    if unknown := sorted(set(given) - set(StructuredOutputsParams.__struct_fields__)):
        allowed = ", ".join(StructuredOutputsParams.__struct_fields__)
        raise bad_field("structured_outputs", f"{', '.join(unknown)[:200]} is unknown; allowed: {allowed}.")
    return given


def _wrong(field: str, wanted: str) -> HTTPError:
    return bad_field(field, f"must be {wanted}.")


DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for `/v1/completions`; chat completions may run to the end of the context."""

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "prompt_logprobs", "allowed_token_ids",
    "bad_words", "logprob_token_ids", "thinking_token_budget", "repetition_detection", "stream_interval",
)  # fmt: skip
_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def resolve_max_tokens(
    asked: int | None, num_prompt_tokens: int, max_model_len: int, model_default: Any, field: str, prompt_field: str
) -> int:
    """How many tokens a request may generate.
    Raises HTTPError: 400 when the prompt leaves no room, or the prompt and `asked` together do not fit."""
    room = max_model_len - num_prompt_tokens
    limit = f"The model's maximum context length is {max_model_len} tokens"
    if room < 1:
        message = f"{limit}, and the prompt has {num_prompt_tokens}; shorten the prompt."
        raise bad_field(prompt_field, message, TOO_LONG)
    if asked is None:
        return min(room, int(model_default)) if model_default else room
    if asked > room:
        message = (
            f"{limit}; the prompt has {num_prompt_tokens} and {asked} more were asked for. "
            f"Ask for at most {room}, or shorten the prompt."
        )
        raise bad_field(field, message, TOO_LONG)
    return asked


def build_sampling_params(
    request: GenerationFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    defaults: dict[str, Any],
    n: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The parameters of a sampled (or greedy) request; `n` and `prompt_logprobs` replace the request's own."""
    values: dict[str, Any] = {name: defaults[name] for name in _FROM_MODEL if defaults.get(name) is not None}
    values |= {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    instead = {"n": n, "prompt_logprobs": prompt_logprobs}
    values |= {name: value for name, value in instead.items() if value is not None}
    values["max_tokens"] = max_tokens
    values["logprobs"] = logprobs
    values["logit_bias"] = _logit_bias(request.logit_bias)
    values["structured_outputs"] = read_constraint(request)
    values["extra_args"] = request.vllm_xargs
    values["output_kind"] = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**values)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        wrong = [key for key in bias if not key.strip().lstrip("-").isdigit()] or [min(bias, key=len)]
        names = ", ".join(repr(key[:100]) for key in wrong[:10])
        is_one = len(wrong) == 1
        raise bad_field("logit_bias", f"{names} {'is not a token id' if is_one else 'are not token ids'}.") from None


def build_beam_search_params(
    request: GenerationFields, *, max_tokens: int, defaults: dict[str, Any]
) -> BeamSearchParams:
    """The parameters of a beam search; `n` is the beam width, as in vLLM."""
    if request.stream:
        raise bad_field("stream", "beam search has no tokens to stream before it ends.")
    if read_constraint(request) is not None:
        raise bad_field("structured_outputs", "beam search follows no grammar.")
    width = 1 if request.n is None else request.n
    if not 1 <= width <= limits.MAX_BEAM_WIDTH:
        raise bad_field("n", f"{width} is out of range; a beam search takes 1 to {limits.MAX_BEAM_WIDTH}.")
    temperature = request.temperature if request.temperature is not None else defaults.get("temperature")
    return BeamSearchParams(
        beam_width=width,
        max_tokens=max_tokens,
        ignore_eos=bool(request.ignore_eos),
        temperature=float(temperature or 0.0),
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
    )


def asked_completion_tokens(request: CompletionRequest) -> int:
    return DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens


def asked_chat_tokens(request: ChatCompletionRequest) -> tuple[int | None, str]:
    """`max_completion_tokens`, or its older name; and the name that was used."""
    if request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def chat_logprobs_count(request: ChatCompletionRequest) -> int | None:
    """How many alternatives a token the sampler must report; None for none at all."""
    if request.top_logprobs is not None and not request.logprobs and request.top_logprobs != 0:
        raise bad_field("top_logprobs", "needs logprobs to be true.")
    if request.top_logprobs is not None and not -1 <= request.top_logprobs < 1 << 31:
        raise bad_field("top_logprobs", f"{request.top_logprobs} is out of range; at least 0, below 2 ** 31.")
    return (request.top_logprobs or 0) if request.logprobs else None


def check_stream_options(request: GenerationFields) -> None:
    """`stream_options` only make sense on a stream."""
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", "only allowed when stream is true.")


_NOT_YET = (
    *("logits_processors", "kv_transfer_params", "mm_processor_kwargs", "suffix", "prompt_embeds"),
    *("audio", "prediction", "functions", "function_call", "web_search_options"),
)


def _is_set(value: Any) -> bool:
    """Whether a value asks for something; `{}` does: as a schema it means any JSON."""
    return value is not None and value is not False and value != "" and value != []


def _refuse(field: str, value: Any = None) -> HTTPError:
    shown = f" ({value!r})" if value is not None else ""
    return bad_request(f"{field}{shown} is not supported yet.", param=field, code="not_supported")


def refuse_unsupported(request: GenerationFields) -> None:
    """Raise a 400 that names the first field which cannot be served."""
    for field in _NOT_YET:
        if _is_set(getattr(request, field, None)):
            raise _refuse(field)
    modalities = getattr(request, "modalities", None)
    if modalities and modalities != ["text"]:
        raise _refuse("modalities", modalities)


def apply_defaults(settings: ServerSettings, request: GenerationFields) -> None:
    """Write the operator's choices into a request; what it says itself stays."""
    if request.return_tokens_as_token_ids is None:
        request.return_tokens_as_token_ids = settings.return_tokens_as_token_ids
    if request.stream and settings.enable_force_include_usage:
        request.stream_options = request.stream_options or StreamOptions()
        request.stream_options.include_usage = request.stream_options.continuous_usage_stats = True
