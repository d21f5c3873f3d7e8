"""`POST /v1/embeddings`: a vector for each input, as numbers or as base64 of little-endian float32."""

import asyncio
import base64
from typing import Any

from quire.config import limits
from quire.entrypoints.openai.errors import bad_request, error_of_finished
from quire.entrypoints.openai.protocol import EmbeddingRequest
from quire.entrypoints.openai.responses import EmbeddingData, EmbeddingResponse, EmbeddingUsage
from quire.entrypoints.openai.state import ServerState
from quire.errors import RequestError
from quire.inputs import PromptType, TextPrompt, TokensPrompt
from quire.outputs import EmbeddingOutput, PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams


async def answer_embeddings(state: ServerState, request: EmbeddingRequest, public_id: str) -> EmbeddingResponse:
    """Embed every input of a request. One that fails cancels the others, and its error is the request's."""
    model = state.resolve_model(request.model)
    params = _params(request)
    runs = [_embed(state, request, prompt, params, public_id) for prompt in _prompts(request)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run) for run in runs]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    outputs = [task.result() for task in tasks]
    count = sum(len(output.prompt_token_ids) for output in outputs)
    as_base64 = request.encoding_format == "base64"
    data = [EmbeddingData(index, _encoded(output.outputs, as_base64)) for index, output in enumerate(outputs)]
    return EmbeddingResponse(data=data, model=model, usage=EmbeddingUsage(count, count))


def _params(request: EmbeddingRequest) -> PoolingParams:
    return PoolingParams(
        task="embed",
        dimensions=request.dimensions,
        use_activation=request.normalize if request.use_activation is None else request.use_activation,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
    )


def _prompts(request: EmbeddingRequest) -> list[PromptType]:
    """The inputs: a text, texts, token ids, or lists of token ids."""
    given = request.input
    if isinstance(given, str):
        items: list[Any] = [given]
    elif not given:
        raise bad_request("input: the list is empty.", "input")
    elif all(isinstance(item, int) for item in given):
        items = [given]
    else:
        items = list(given)
    if len(items) > limits.MAX_PROMPTS:
        raise bad_request(f"input: {len(items)} inputs; at most {limits.MAX_PROMPTS} in one request.", "input")
    if any(isinstance(item, int) for item in items):
        raise bad_request("input: a list mixes token ids with texts or lists.", "input")
    return [_prompt(item, request.cache_salt) for item in items]


def _prompt(item: str | list[int], cache_salt: str | None) -> PromptType:
    prompt: TextPrompt | TokensPrompt
    prompt = TextPrompt(prompt=item) if isinstance(item, str) else TokensPrompt(prompt_token_ids=item)
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    return prompt


async def _embed(
    state: ServerState, request: EmbeddingRequest, prompt: PromptType, params: PoolingParams, public_id: str
) -> PoolingRequestOutput[PoolingOutput]:
    options = {"add_special_tokens": request.add_special_tokens is not False}
    outputs = state.engine.encode(
        prompt,
        params,
        state.engine_request_id(public_id),
        priority=request.priority or 0,
        tokenization_kwargs=options,
    )
    try:
        async for output in outputs:
            return output
    except RequestError as error:
        if error.param in ("prompt", "prompt_token_ids"):
            raise bad_request(f"input: {error}", "input") from None
        raise
    finally:
        close = getattr(outputs, "aclose", None)
        if close is not None:
            await close()
    raise error_of_finished(None, public_id)


def _encoded(pooled: PoolingOutput, as_base64: bool) -> list[float] | str:
    if as_base64:
        return base64.b64encode(pooled.data.astype("<f4").tobytes()).decode()
    return EmbeddingOutput.from_base(pooled).embedding
