"""Runs the requests of pooling routes: inputs become prompts, prompts run in the engine.

Knows the model's tasks and what a prompt may be. Knows nothing of how an answer is written.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from quire.config import PoolingConfig
from quire.engine.input_processor import TokenizedPrompt
from quire.engine.pooling_processor import join_pieces
from quire.entrypoints.http.errors import TOO_LONG, bad_field, bad_request, error_of_finished
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.openai.generation import all_of
from quire.entrypoints.openai.prompts import listed, render_chat, require_tokenizer, run_sized, untemplated
from quire.entrypoints.pooling_api import pooling_protocol as protocol
from quire.errors import RequestError, TooLongError
from quire.inputs import PromptType, TextPrompt, TokensPrompt
from quire.outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams

Pooled = PoolingRequestOutput[PoolingOutput]


def require_pooling(state: ServerState) -> PoolingConfig:
    """How the model pools; a 400 where it generates."""
    model = state.engine.config.model
    if model.pooling is None:
        message = (
            f"{model.model!r} generates text here and cannot embed, classify or score: start the server with "
            "--runner pooling (and --convert embed or classify)."
        )
        raise bad_request(message, "model", "not_supported")
    return model.pooling


def check_task(state: ServerState, task: str) -> None:
    pooling = require_pooling(state)
    if task not in pooling.tasks:
        message = (
            f"{state.engine.config.model.model!r} runs as {pooling.convert!r} and cannot do {task!r}; "
            f"it can: {', '.join(pooling.tasks)}."
        )
        raise bad_request(message, "task", "not_supported")


def activation(request: protocol.PoolingFields, normalize: bool | None = None) -> bool | None:
    """`use_activation`, under any of its names."""
    values = (request.use_activation, request.activation, normalize)
    return next((value for value in values if value is not None), None)


async def read_prompts(state: ServerState, request: protocol.InputFields) -> list[PromptType | TokenizedPrompt]:
    """The inputs: a text, texts, token ids, lists of token ids; or a conversation."""
    if (request.input is None) == (request.messages is None):
        raise bad_field("input", "this field is required (or messages, but not both).", "missing_field")
    if request.messages is not None:
        return [await _conversation(state, request, request.messages)]
    items = listed(request.input, "input", "inputs")
    if any(isinstance(item, int) for item in items):
        raise bad_field("input", "a list mixes token ids with texts or lists.")
    return [_prompt(item, request.cache_salt) for item in items]


def _prompt(item: str | list[int], cache_salt: str | None) -> PromptType:
    prompt: TextPrompt | TokensPrompt
    prompt = TextPrompt(prompt=item) if isinstance(item, str) else TokensPrompt(prompt_token_ids=item)
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    return prompt


async def _conversation(
    state: ServerState, request: protocol.InputFields, messages: list[dict[str, Any]]
) -> TokenizedPrompt:
    state.check_request_template(request.chat_template)
    processor = state.engine.input_processor
    if processor.media is not None and processor.media.is_alone:
        prompt = await untemplated(messages, processor)
    else:
        tokenizer, variables = require_tokenizer(state.engine.get_tokenizer(), "messages"), request.chat_template_kwargs
        generates = bool(request.add_generation_prompt)
        prompt = await render_chat(request, messages, tokenizer, dict(variables or {}), generates, processor=processor)
    return dataclasses.replace(prompt, cache_salt=request.cache_salt)


async def run_pooling(
    state: ServerState,
    request: protocol.PoolingFields | protocol.CohereEmbedRequest,
    prompts: Sequence[PromptType | TokenizedPrompt],
    params: PoolingParams,
    public_id: str,
    *,
    field: str = "input",
    add_special_tokens: bool = True,
) -> list[Pooled]:
    """The pooler's output for each prompt. One that fails cancels the others, and its error is the request's. `field`: named
    where a prompt cannot be served."""
    options, priority = {"add_special_tokens": add_special_tokens}, request.priority or 0
    processor = state.engine.pooling_processor

    async def run(prompt: PromptType | TokenizedPrompt) -> Pooled:
        if not processor.config.in_pieces and not processor.config.max_embed_len:
            return await run_piece(prompt)
        if not isinstance(prompt, TokenizedPrompt):
            size = processor.num_characters(prompt)
            (prompt,) = await run_sized(size, processor.tokenize_batch, [prompt], add_special_tokens)
        try:
            pieces = processor.pieces(prompt, params)
        except TooLongError as error:
            raise bad_field(field, str(error), TOO_LONG) from None
        return join_pieces(await all_of([run_piece(piece) for piece in pieces]))

    async def run_piece(prompt: PromptType | TokenizedPrompt) -> Pooled:
        request_id = state.engine_request_id(public_id)
        outputs = state.engine.encode(prompt, params, request_id, priority=priority, tokenization_kwargs=options)
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    return output
        except RequestError as error:
            if error.param in ("prompt", "prompt_token_ids"):
                raise bad_field(field, str(error), TOO_LONG if isinstance(error, TooLongError) else None) from None
            raise
        raise error_of_finished(None, public_id)

    return await all_of([run(prompt) for prompt in prompts])


def usage_of(outputs: Sequence[Pooled]) -> protocol.PoolingUsage:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return protocol.PoolingUsage(count, count)
