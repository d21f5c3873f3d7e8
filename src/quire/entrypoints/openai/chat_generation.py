"""From a chat completion request to a generation. The requests of other protocols become chat completion requests first."""

import dataclasses
from collections.abc import Sequence

from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.openai.answers import AnswerReader, answer_reader
from quire.entrypoints.openai.generation import Generation, new_count, page_size
from quire.entrypoints.openai.prompts import chat_prompt, input_processor, require_tokenizer
from quire.entrypoints.openai.protocol import ChatCompletionRequest
from quire.entrypoints.openai.sampling import (
    SCHEMA,
    build_beam_search_params,
    build_sampling_params,
    check_supported,
    form_field,
    naming_form,
    resolve_max_tokens,
)
from quire.entrypoints.openai.tool_choice import calls_or_answer, read_tool_choice
from quire.errors import RequestError
from quire.guards import is_dict
from quire.parsers.choice import AnswerFormats
from quire.parsers.thinking import build_thinking, check_budget, find_harmony_thinking
from quire.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams, Thinking

_HARMONY_ANSWER = "<|channel|>final<|message|>"


@dataclasses.dataclass(kw_only=True, slots=True)
class ChatGeneration(Generation[ChatCompletionRequest]):
    """A generation whose answers are read as reasoning, content and calls."""

    reader: AnswerReader


async def prepare_generation(
    state: ServerState,
    request: ChatCompletionRequest,
    public_id: str,
    prompt_field: str = "messages",
    at_most: int | None = None,
    schema_field: str = SCHEMA,
) -> ChatGeneration:
    """Check a request and tokenize its prompt. Raises what the client must be told.

    Args:
        prompt_field, schema_field: what the client's own protocol calls the prompt, and a JSON schema of the answer.
        at_most: the most tokens to generate, of which fewer may fit behind the prompt.
    """
    model, config = state.resolve_model(request.model), state.engine.config.model
    check_supported(request, but=("mm_processor_kwargs",))
    state.check_request_template(request.chat_template)
    choice = read_tool_choice(request)  # before a template reads the tools
    _check_logprobs(request)
    asked, asked_name = _asked_tokens(request)
    state.check_processor_options(request.mm_processor_kwargs)
    prompt = await chat_prompt(
        request, state.engine.get_tokenizer(), asked, config.max_model_len, state.settings, input_processor(state)
    )
    tokenizer = require_tokenizer(state.engine.get_tokenizer(), "messages")
    default = at_most or config.default_sampling.get("max_tokens")
    max_tokens = resolve_max_tokens(
        asked, len(prompt.token_ids), config.max_model_len, default, asked_name, prompt_field
    )
    reader = answer_reader(state.formats, request, tokenizer, prompt.token_ids, state.settings)
    form = form_field(request, schema_field)
    params = _params(request, reader, prompt.token_ids, max_tokens, state, form)
    count = new_count(state, request.return_timing)
    count.thoughts, count.page = reader.reasoning_count(), page_size(state)
    return ChatGeneration(
        state=state,
        request=request,
        prompt=prompt,
        params=params,
        public_id=public_id,
        model=model,
        count=count,
        reader=reader,
        form="tools" if choice.must_call else form,
    )


def _asked_tokens(request: ChatCompletionRequest) -> tuple[int | None, str]:
    """`max_completion_tokens`, or its older name; and the name that was used."""
    if request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def _check_logprobs(request: ChatCompletionRequest) -> None:
    if request.top_logprobs is not None and not request.logprobs and request.top_logprobs != 0:
        raise bad_field("top_logprobs", "needs logprobs to be true.")
    if request.top_logprobs is not None and not -1 <= request.top_logprobs < 1 << 31:
        raise bad_field("top_logprobs", f"{request.top_logprobs} is out of range; at least 0, below 2 ** 31.")


def _params(
    request: ChatCompletionRequest,
    reader: AnswerReader,
    prompt_ids: Sequence[int],
    max_tokens: int,
    state: ServerState,
    form: str,
) -> SamplingParams | BeamSearchParams:
    """What the engine samples with: what the request says, and what reading the answer needs."""
    defaults = state.engine.config.model.default_sampling
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    with naming_form(form):
        if request.use_beam_search:
            if reader.choice.must_call:
                raise bad_field("tool_choice", "beam search follows no grammar, so no call can be forced.")
            return build_beam_search_params(request, ("logprobs",), max_tokens, defaults)
        params = build_sampling_params(request, max_tokens=max_tokens, logprobs=logprobs, defaults=defaults)
    if reader.keeps_special_tokens:
        params.skip_special_tokens = False
    constrain_answer(params, reader)
    limit_thinking(params, state.formats, reader, prompt_ids)
    return params


def constrain_answer(params: SamplingParams, reader: AnswerReader) -> None:
    """Have an answer follow the grammar of its calls, where it has one, and begin a grammar after the reasoning.
    Raises HTTPError, a 400, if a call has to be made and the request wants another grammar."""
    must_call = reader.choice.must_call
    if must_call and params.structured_outputs is not None and reader.request.response_format is None:
        raise bad_field("tool_choice", "a call that has to be made has a form of its own; leave the other out.")
    grammar = reader.call_grammar if must_call or params.structured_outputs is None else _calls_too(params, reader)
    if grammar is not None:
        params.structured_outputs = StructuredOutputsParams(grammar=grammar)
        params.thinking = None if reader.formats.is_harmony else find_thinking(reader)
    elif params.structured_outputs is not None:
        params.thinking = find_thinking(reader)


def _calls_too(params: SamplingParams, reader: AnswerReader) -> str | None:
    """The grammar of an answer that has the wanted format if it is no call; None where it can be no call."""
    wanted = params.structured_outputs
    if wanted is None or reader.request.response_format is None or reader.choice.kind != "auto":
        return None
    schema = {"type": "object"} if wanted.json_object else wanted.json
    one = reader.request.parallel_tool_calls is False
    if not is_dict(schema):
        return None
    return calls_or_answer(reader.formats, reader.choice, reader.tokenizer, one, schema)


def find_thinking(reader: AnswerReader) -> Thinking | None:
    """Where an answer is still reasoning, which follows no grammar."""
    if reader.formats.is_harmony:
        return Thinking(reader.tokenizer.encode(_HARMONY_ANSWER, add_special_tokens=False))
    reasoning = reader.formats.reasoning
    return None if reasoning is None else build_thinking(reasoning, reader.in_reasoning, reader.tokenizer)


def limit_thinking(
    params: SamplingParams, formats: AnswerFormats, reader: AnswerReader, prompt_ids: Sequence[int]
) -> None:
    """Tell an answer with a budget for its reasoning where it reasons. One that does not needs no budget.
    Raises RequestError if the model's reasoning cannot be limited."""
    if params.thinking_token_budget is None:
        return
    check_budget(formats, reader.tokenizer)
    if formats.is_harmony:
        if params.structured_outputs is not None and params.thinking is None:
            why = "the form of this request's calls covers the thoughts before them"
            raise RequestError(f"thinking_token_budget cannot be kept: {why}", param="thinking_token_budget")
        may_call = reader.choice.kind != "none" and params.structured_outputs is None
        thinking = find_harmony_thinking(prompt_ids, reader.tokenizer, may_call)
        if thinking is None:
            params.thinking_token_budget = None
        else:
            params.thinking = thinking
    elif params.thinking is None:
        params.thinking = find_thinking(reader)
    if params.thinking is None:
        params.thinking_token_budget = None
