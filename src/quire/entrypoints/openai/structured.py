"""The wanted form of an answer, as requests state it: `response_format`, `structured_outputs`, the older `guided_*`, and
calls that have to be made.

Knows the fields' names. What a constraint means is checked by `StructuredOutputsParams` and by the engine.
"""

from collections.abc import Sequence
from typing import Any

from quire.entrypoints.openai.answers import AnswerReader
from quire.entrypoints.openai.errors import HTTPError, bad_field, bad_request
from quire.entrypoints.openai.protocol import GenerationFields, ResponseFormat
from quire.entrypoints.openai.tool_choice import calls_or_answer
from quire.errors import RequestError
from quire.guards import is_dict
from quire.parsers.choice import AnswerFormats
from quire.parsers.thinking import build_thinking, check_budget, find_harmony_thinking
from quire.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams, Thinking
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
    if reasoning is None:
        return None
    variables = reader.request.chat_template_kwargs or {}
    is_off = variables.get("enable_thinking") is False or variables.get("thinking") is False
    if is_off and not (reader.in_reasoning or reasoning.implied):
        return None
    return build_thinking(reasoning, reader.in_reasoning, tokenizer)


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
