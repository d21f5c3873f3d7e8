"""What `/inference/v1/generate` reads and answers: token ids in, token ids out, under vLLM's names.

Names and types only. A field that is read but cannot be served is refused by name in `token_generation.py`.
"""

from typing import Annotated, Any, Literal

import msgspec

from quire.entrypoints.openai.protocol import QueuedFields, StreamOptions, Timing, Usage

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
