"""The bodies that the server reads and answers with: OpenAI's fields, and the extra ones that users of vLLM send.

Knows names and types; ranges are `SamplingParams`' business. A field that is read but cannot be served yet is listed in
`sampling.py`, so that it is refused by name rather than ignored.
"""

from typing import Annotated, Any, Literal

import msgspec

from quire.outputs import WeightVersionSpan

PromptItem = str | int | list[int]
CacheSalt = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The format of the answer."""

    type: str
    json_schema: Any = None
    structures: Any = None
    triggers: Any = None
    format: Any = None


class QueuedFields(msgspec.Struct, kw_only=True):
    """The fields of requests that the engine queues, whatever they ask for."""

    model: str | None = None
    request_id: RequestId | None = None
    priority: Priority | None = None
    timeout: float | None = None
    cache_salt: CacheSalt | None = None


class RequestFields(QueuedFields, kw_only=True):
    """The fields of requests that generate text, whichever of OpenAI's protocols they come in."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, Any] | None = None
    stream_interval: int | None = None
    structured_outputs: Any = None
    return_timing: bool | None = None
    user: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class GenerationFields(RequestFields, kw_only=True):
    """The fields that completions and chat completions share."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    # Read so that they can be refused by name: see sampling.py.
    logits_processors: Any = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[PromptItem] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    media_io_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    return_prompt_text: bool | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None


class BatchChatRequest(ChatCompletionRequest, kw_only=True):
    """Body of `POST /v1/chat/completions/batch`: several conversations, and one set of fields for all."""

    messages: list[list[dict[str, Any]]]  # pyright: ignore[reportIncompatibleVariableOverride]


class GenerativeScoringRequest(QueuedFields, kw_only=True):
    """Body of `POST /generative_scoring`: how likely the first of some tokens comes next, behind each item."""

    query: str | list[int]
    items: list[str | list[int]]
    label_token_ids: list[int]
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    user: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


UNSET = msgspec.UNSET
Optional = msgspec.UnsetType


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens`: prompt tokens whose keys and values came from the prefix cache. `created_cache_tokens`: those that were
    computed and kept there."""

    cached_tokens: int = 0
    created_cache_tokens: int | None = None


class CompletionTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: tokens that the model thought with, markers included."""

    reasoning_tokens: int = 0


class Timing(msgspec.Struct):
    """Where a request's time went, under vLLM's names; None where the moment never came.

    Attributes:
        time_to_first_token_ms: from leaving the queue to the first token.
        generation_time_ms: from the first token to the last.
        queue_time_ms: from arrival at the engine to leaving its queue.
        mean_itl_ms: between two tokens of a sequence.
        tokens_per_second: since it left the queue.
    """

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class TokenTopLogprob(msgspec.Struct):
    """One alternative of a chat token."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TokenTopLogprob):
    """One sampled chat token."""

    top_logprobs: list[TokenTopLogprob] = []


class ChatLogprobs(msgspec.Struct):
    """Logprobs of a chat choice."""

    content: list[TokenLogprob] | None = None
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Logprobs of a completion choice: four parallel lists."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class FunctionCall(msgspec.Struct):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model asks for."""

    id: str
    type: str = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct):
    """The assistant's turn; `reasoning` is what it thought before."""

    role: str
    content: str | None
    refusal: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | Optional = UNSET


class ChatChoice(msgspec.Struct):
    """One answer of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[WeightVersionSpan] | Optional = UNSET


class AnswerHead(msgspec.Struct, kw_only=True):
    """How whole answers begin."""

    id: str
    object: str = "list"
    created: int
    model: str


class ChatCompletionResponse(AnswerHead, kw_only=True):
    """Answer of `POST /v1/chat/completions`."""

    object: str = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    metrics: Timing | None = None
    system_fingerprint: str | None = None
    service_tier: str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One answer of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    weight_versions: list[WeightVersionSpan] | Optional = UNSET


class CompletionResponse(AnswerHead, kw_only=True):
    """Answer of `POST /v1/completions`."""

    object: str = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: str | None = None
    system_fingerprint: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    metrics: Timing | None = None


class LabelScore(msgspec.Struct):
    """One item's score."""

    index: int
    score: float
    object: str = "score"


class GenerativeScoringResponse(AnswerHead, kw_only=True):
    """Answer of `POST /generative_scoring`."""

    data: list[LabelScore]
    usage: Usage


class ModelCard(msgspec.Struct, kw_only=True):
    """A served model."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct):
    """Answer of `GET /v1/models`."""

    data: list[ModelCard]
    object: str = "list"


class TokenizeResponse(msgspec.Struct):
    """Answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    """Answer of `POST /detokenize`."""

    prompt: str


def build_usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
    created_cache_tokens: int | None = None,
) -> Usage:
    """The usage block; the shares of the cache and of the reasoning are given when they are known."""
    details = None if cached_tokens is None else PromptTokensDetails(cached_tokens, created_cache_tokens)
    thoughts = None if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)
    return Usage(prompt_tokens, prompt_tokens + completion_tokens, completion_tokens, details, thoughts)


OutputMode = Literal["tokens", "text", "derender"]


class GenerateRequest(QueuedFields, kw_only=True):
    """Body of `POST /inference/v1/generate`. `sampling_params` has the names of `SamplingParams`."""

    # A renderer writes its route's prefix before a client's id, which may be as long as RequestId says.
    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] | None = None
    token_ids: list[int]
    sampling_params: dict[str, Any]
    output_mode: OutputMode = "tokens"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    # Written by a renderer, and not needed here.
    token_offsets: Any = None
    parse_context: Any = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Any = None
    # Read so that they can be refused by name.
    features: Any = None
    content_parts: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: Any = None


class TokenIdLogprob(msgspec.Struct):
    """One token's logprob, by its id."""

    token_id: int
    logprob: float
    rank: int | None = None


class SampledTokenLogprob(TokenIdLogprob):
    """A sampled token's logprob. `top_logprobs`: the token itself, then the alternatives, best first."""

    top_logprobs: list[TokenIdLogprob] = []


class TokenIdLogprobs(msgspec.Struct):
    """Logprobs of a choice's tokens."""

    content: list[SampledTokenLogprob]


class GeneratedChoice(msgspec.Struct, kw_only=True):
    """One answer, or a part of it. With `output_mode: text` there is `text`, and `logprobs` are `ChatLogprobs`; else they are
    `TokenIdLogprobs`."""

    index: int
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int]
    logprobs: Any = None
    text: str | msgspec.UnsetType = msgspec.UNSET


class GenerateResponse(msgspec.Struct, kw_only=True):
    """Answer of `POST /inference/v1/generate`."""

    request_id: str
    output_mode: OutputMode = "tokens"
    model: str
    created: int
    choices: list[GeneratedChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    metrics: Timing | None = None
    kv_transfer_params: dict[str, Any] | None = None
