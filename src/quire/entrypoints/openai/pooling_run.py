"""What the routes of pooling models share: a request's inputs as prompts, and their runs in the engine.

Knows inputs and failures. What the numbers mean is in `pooled.py` and `scores.py`.
"""

import base64
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from quire.config import PoolingConfig
from quire.engine.input_processor import TokenizedPrompt
from quire.entrypoints.openai import pooling_protocol as protocol
from quire.entrypoints.openai.errors import bad_field, bad_request, error_of_finished
from quire.entrypoints.openai.generation import all_of
from quire.entrypoints.openai.number_formats import to_bytes
from quire.entrypoints.openai.prompts import listed, render_chat, require_tokenizer
from quire.entrypoints.openai.state import ServerState
from quire.errors import RequestError
from quire.inputs import PromptType, TextPrompt, TokensPrompt
from quire.outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams

Pooled = PoolingRequestOutput[PoolingOutput]
_MOST_METADATA = 60_000
"""Bytes of a header that clients still read: Python's own takes a line of 65,536."""


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


def activation(request: protocol.PoolingFields, normalize: bool | None = None) -> bool | None:
    """`use_activation`, under any of its names."""
    values = (request.use_activation, request.activation, normalize)
    return next((value for value in values if value is not None), None)


async def read_prompts(state: ServerState, request: protocol.InputFields) -> list[PromptType]:
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
) -> PromptType:
    state.check_request_template(request.chat_template)
    tokenizer = require_tokenizer(state.engine.get_tokenizer(), "messages")
    variables = dict(request.chat_template_kwargs or {})
    prompt = await render_chat(request, messages, tokenizer, variables, bool(request.add_generation_prompt))
    return _prompt(prompt.token_ids, request.cache_salt)


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
    """The pooler's output for each prompt. One that fails cancels the others, and its error is the request's.

    Args:
        field: named where a prompt cannot be served.
    """
    options = {"add_special_tokens": add_special_tokens}
    return await all_of([_run(state, request, prompt, params, public_id, field, options) for prompt in prompts])


async def _run(
    state: ServerState,
    request: protocol.PoolingFields | protocol.CohereEmbedRequest,
    prompt: PromptType | TokenizedPrompt,
    params: PoolingParams,
    public_id: str,
    field: str,
    options: dict[str, Any],
) -> Pooled:
    request_id, priority = state.engine_request_id(public_id), request.priority or 0
    outputs = state.engine.encode(prompt, params, request_id, priority=priority, tokenization_kwargs=options)
    try:
        async for output in outputs:
            return output
    except RequestError as error:
        if error.param in ("prompt", "prompt_token_ids"):
            raise bad_field(field, str(error)) from None
        raise
    finally:
        close = getattr(outputs, "aclose", None)
        if close is not None:
            await close()
    raise error_of_finished(None, public_id)


def usage_of(outputs: Sequence[Pooled]) -> protocol.PoolingUsage:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return protocol.PoolingUsage(count, count)


def numbers(pooled: PoolingOutput, request: protocol.EncodedFields) -> Any:
    """A vector or rows as JSON's numbers, or as base64 of their bytes."""
    if request.encoding_format == "base64":
        return base64.b64encode(_as_bytes(pooled, request)).decode()
    return pooled.data.tolist()


def _as_bytes(pooled: PoolingOutput, request: protocol.EncodedFields) -> bytes:
    return to_bytes(pooled.data, request.embed_dtype or "float32", request.endianness or "little")


def binary_response(
    outputs: Sequence[Pooled], request: protocol.EncodedFields, answer_id: str, model: str
) -> Response | None:
    """All inputs' bytes, one behind the other; `bytes` tells in the header `metadata` where each lies. None of another format."""
    if request.encoding_format not in ("bytes", "bytes_only"):
        return None
    pieces = [_as_bytes(output.outputs, request) for output in outputs]
    headers: dict[str, str] = {}
    if request.encoding_format == "bytes":
        ends = list(itertools.accumulate(map(len, pieces)))
        told = {"embed_dtype": request.embed_dtype or "float32", "endianness": request.endianness or "little"}
        data = [
            {"index": index, **told, "start": end - len(piece), "end": end, "shape": output.outputs.data.shape}
            for index, (piece, end, output) in enumerate(zip(pieces, ends, outputs, strict=True))
        ]
        metadata = {
            "id": answer_id,
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": msgspec.to_builtins(usage_of(outputs)),
        }
        headers["metadata"] = json.dumps(metadata, separators=(",", ":"))
        if len(headers["metadata"]) > _MOST_METADATA:
            message = (
                f"'bytes' describes {len(outputs)} inputs in a header of {len(headers['metadata'])} bytes; at "
                f"most {_MOST_METADATA}: send fewer, or take 'bytes_only'."
            )
            raise bad_field("encoding_format", message)
    return Response(b"".join(pieces), headers=headers, media_type="application/octet-stream")
