"""From a request's fields to `SamplingParams` (or `BeamSearchParams`), with the grammar that the answer has to follow.

A field that the request does not mention comes from the model's generation config, then from `SamplingParams`' default.
Ranges are checked by `SamplingParams` itself; its `RequestError` becomes a 400. A field that the protocol has and this
server cannot serve yet is refused by name: one that is silently dropped gives a wrong answer that looks right.
"""

import contextlib
import re
from collections.abc import Container, Generator, Sequence
from typing import Any

from quire.config import limits
from quire.entrypoints.http.errors import TOO_LONG, bad_field, bad_request
from quire.entrypoints.openai.protocol import GenerationFields, ResponseFormat
from quire.errors import RequestError
from quire.guards import is_dict
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

_GUIDED = ("json", "regex", "choice", "grammar")
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
OWN_FORM = "structured_outputs"
SCHEMA = "response_format.json_schema.schema"
_NAMED = re.compile(rf"^(?:{OWN_FORM}(\.\w+)?(?= )|)")


def read_constraint(request: GenerationFields) -> StructuredOutputsParams | None:
    """The one constraint of a request, None where it has none.
    Raises HTTPError, a 400, if it has several that differ, or one that makes no sense."""
    found: dict[str, dict[str, Any]] = {}
    if request.response_format is not None and (fields := _of_format(request.response_format)) is not None:
        found["response_format"] = fields
    if request.structured_outputs is not None:
        found["structured_outputs"] = _of_structured_outputs(request.structured_outputs)
    for name in _GUIDED:
        value = getattr(request, f"guided_{name}")
        if value is not None and value != "" and value != []:
            pattern = request.guided_whitespace_pattern
            found[f"guided_{name}"] = {name: value} | ({"whitespace_pattern": pattern} if pattern else {})
    if not found:
        return None
    field, constraint = next(iter(found.items()))
    if any(other != constraint for other in found.values()):  # some clients say the same in new fields and in old ones
        raise bad_request(f"{' and '.join(found)} cannot be used together: give one of them.", field)
    return StructuredOutputsParams(**constraint)


def form_field(request: GenerationFields, schema_field: str = SCHEMA) -> str:
    """Where a client has said what form its answer has; `schema_field`: what its protocol calls a schema."""
    given = request.response_format
    if given is not None and given.type != "text":
        return schema_field if given.type == "json_schema" else re.sub(r"(\.json_schema)?\.schema$", "", schema_field)
    own = [OWN_FORM] if request.structured_outputs is not None else []
    return [*own, *(f"guided_{name}" for name in _GUIDED if getattr(request, f"guided_{name}")), "tools"][0]


@contextlib.contextmanager
def naming_form(field: str) -> Generator[None, None, None]:
    """A refusal of a form, raised within, names the field that the client has sent; the engine knows only its own."""
    try:
        yield
    except RequestError as error:
        if error.param not in (OWN_FORM, *StructuredOutputsParams.__struct_fields__):
            raise
        kind = r"\1" if field.endswith(OWN_FORM) else ""
        named = f"{field}{kind}" if str(error).startswith(OWN_FORM) else f"{field}: "
        raise type(error)(_NAMED.sub(named, str(error), 1), param=field, value=error.value) from error


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
        raise bad_field("response_format.json_schema", "must be an object with a `schema`.")
    return schema


def _of_structured_outputs(given: Any) -> dict[str, Any]:
    if not is_dict(given):
        raise bad_field("structured_outputs", "must be an object.")
    if unknown := sorted(set(given) - set(StructuredOutputsParams.__struct_fields__)):
        allowed = ", ".join(StructuredOutputsParams.__struct_fields__)
        raise bad_field("structured_outputs", f"{', '.join(unknown)[:200]} is unknown; allowed: {allowed}.")
    return given


_CONVERTED = ("max_tokens", "logit_bias", "structured_outputs", "logits_processors", "truncate_prompt_tokens")
_SAME_NAME = tuple(
    name
    for name in GenerationFields.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name not in _CONVERTED
)
"""Fields that are passed on as they are: they have the names of `SamplingParams`."""
_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def resolve_max_tokens(
    asked: int | None, num_prompt_tokens: int, max_model_len: int, model_default: Any, field: str, prompt_field: str
) -> int:
    """How many tokens a request may generate.
    Raises HTTPError, a 400, if the prompt fills the context, or the prompt and `asked` together do not fit."""
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
    request: GenerationFields, *, max_tokens: int, logprobs: int | None, defaults: dict[str, Any], **instead: int | None
) -> SamplingParams:
    """The parameters of a sampled (or greedy) request; `instead` replaces fields of the request."""
    values: dict[str, Any] = {name: defaults.get(name) for name in _FROM_MODEL}
    values |= {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    values |= {name: value for name, value in instead.items() if value is not None}
    values["max_tokens"] = max_tokens
    values["logprobs"] = logprobs
    values["logit_bias"] = _logit_bias(request.logit_bias)
    values["structured_outputs"] = read_constraint(request)
    values["extra_args"] = _extra_args(request)
    values["output_kind"] = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def _extra_args(request: GenerationFields) -> dict[str, Any] | None:
    if request.kv_transfer_params is None:
        return request.vllm_xargs
    return {**(request.vllm_xargs or {}), "kv_transfer_params": request.kv_transfer_params}


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
    request: GenerationFields, without: Sequence[str], max_tokens: int, defaults: dict[str, Any]
) -> BeamSearchParams:
    """The parameters of a beam search; `n` is the beam width, as in vLLM. It cannot tell what the fields in `without` ask for."""
    for field in (*without, "logprob_token_ids"):
        if getattr(request, field):
            raise bad_field(field, "not available with use_beam_search.", "not_supported")
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


_NOT_SUPPORTED = (
    *("logits_processors", "mm_processor_kwargs", "suffix"),
    *("audio", "prediction", "functions", "function_call", "web_search_options"),
)


def check_supported(request: GenerationFields, but: Container[str] = ()) -> None:
    """Raise a 400 that names the first field which cannot be served, `but` for these. `{}` asks for something: as a schema it
    means any JSON."""
    for field in _NOT_SUPPORTED:
        if field in but:
            continue
        value = getattr(request, field, None)
        if value is not None and value is not False and value != "" and value != []:
            raise bad_request(f"{field} is not supported yet.", field, "not_supported")
    modalities = getattr(request, "modalities", None)
    if modalities and modalities != ["text"]:
        raise bad_request(f"modalities ({modalities!r}) is not supported yet.", "modalities", "not_supported")
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", "only allowed when stream is true.")
