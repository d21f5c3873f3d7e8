"""The routes that answer each input by itself: `/v1/embeddings`, `/classify` and `/pooling`."""

import asyncio
import base64
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from quire.engine.io_processor import prompts_of
from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.pooling_api import pooling_protocol as protocol
from quire.entrypoints.pooling_api.number_formats import to_bytes
from quire.entrypoints.pooling_api.run import (
    Pooled,
    activation,
    check_task,
    read_prompts,
    require_pooling,
    run_pooling,
    usage_of,
)
from quire.pooling_params import PoolingParams

UNSET = protocol.UNSET
_MOST_METADATA = 60_000
"""Bytes of a header that clients still read: Python's own takes a line of 65,536."""


async def answer_embeddings(
    state: ServerState, request: protocol.EmbeddingRequest, public_id: str
) -> protocol.EmbeddingResponse | Response:
    def write(index: int, pooled: Pooled) -> protocol.EmbeddingData:
        return protocol.EmbeddingData(index, _numbers(pooled, request), late_chunking=pooled.late_chunking or UNSET)

    wanted = {name: getattr(request, name) for name in ("dimensions", "late_chunking_params")}
    wanted["task"] = require_pooling(state).embedding_task
    return await _answer(state, request, "embd", public_id, protocol.EmbeddingResponse, write, wanted)


async def answer_classification(
    state: ServerState, request: protocol.ClassificationRequest, public_id: str
) -> protocol.ClassificationResponse:
    """The probability of each class, for every input."""
    # Names of classes, by number, where config.json has them; its keys are texts.
    named: Any = state.engine.config.model.hf_config.to_dict().get("id2label") or {}
    labels = {int(key): str(name) for key, name in named.items()}

    def write(index: int, pooled: Pooled) -> protocol.ClassificationData:
        probs: list[float] = pooled.outputs.data.tolist()
        best = max(range(len(probs)), key=probs.__getitem__)
        return protocol.ClassificationData(index, labels.get(best, f"LABEL_{best}"), probs, len(probs))

    wanted = {"task": "classify"}
    return await _answer(state, request, "classify", public_id, protocol.ClassificationResponse, write, wanted)


async def answer_pooling(
    state: ServerState, request: protocol.PoolingRequest, public_id: str
) -> protocol.PoolingResponse | protocol.IOProcessorResponse | Response:
    """What the pooler gives for every input, of any task that the model has; of `data`, what an IO processor makes of it."""
    if request.data is not None:
        return await _answer_data(state, request, public_id)

    def write(index: int, pooled: Pooled) -> protocol.PoolingData:
        return protocol.PoolingData(index, _numbers(pooled, request), late_chunking=pooled.late_chunking or UNSET)

    names = ("task", "dimensions", "step_tag_id", "returned_token_ids", "late_chunking_params")
    wanted = {name: getattr(request, name) for name in names}
    return await _answer(state, request, "pooling", public_id, protocol.PoolingResponse, write, wanted)


async def _answer_data(
    state: ServerState, request: protocol.PoolingRequest, public_id: str
) -> protocol.IOProcessorResponse:
    processor = state.engine.io_processor
    if processor is None:
        raise bad_field("data", "this server has no IO processor: start it with --io-processor-plugin NAME.")
    state.resolve_model(request.model)
    require_pooling(state)
    prompts = await asyncio.to_thread(prompts_of, processor, request.data, public_id)
    given = PoolingParams(
        task=request.task,
        use_activation=activation(request, request.normalize),
        dimensions=request.dimensions,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
    )
    params = processor.merge_pooling_params(given)
    outputs = await run_pooling(state, request, prompts, params, public_id, field="data")
    answer = await asyncio.to_thread(processor.post_process, outputs, public_id)
    return protocol.IOProcessorResponse(public_id, int(time.time()), answer)


async def _answer(
    state: ServerState,
    request: protocol.InputFields,
    kind: str,
    public_id: str,
    answer: Callable[..., Any],
    write: Callable[[int, Pooled], Any],
    wanted: dict[str, Any],
) -> Any:
    """Run the pooler on each input of a request.

    Args:
        kind: begins the answer's id.
        answer: the type of the answer.
        write: makes an entry of it, of an input's number and its output.
        wanted: parameters of `PoolingParams`, beside those that every such request has.
    """
    model, pooling = state.resolve_model(request.model), require_pooling(state)
    params = PoolingParams(
        use_activation=activation(request, getattr(request, "normalize", None)),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
        **wanted,
    )
    if not isinstance(request, protocol.EmbeddingRequest):
        check_task(state, params.task or pooling.tasks[0])
    prompts, special = await read_prompts(state, request), request.add_special_tokens is not False
    outputs = await run_pooling(state, request, prompts, params, public_id, add_special_tokens=special)
    head = {"id": f"{kind}-{public_id}", "created": int(time.time()), "model": model}
    if isinstance(request, protocol.EncodedFields) and request.encoding_format in ("bytes", "bytes_only"):
        return _binary_response(outputs, request, head)
    data = [write(index, output) for index, output in enumerate(outputs)]
    return answer(data=data, usage=usage_of(outputs), **head)


def _numbers(pooled: Pooled, request: protocol.EncodedFields) -> Any:
    """A vector or rows, whose numbers become JSON's when they are written, or base64 of their bytes."""
    if request.encoding_format == "base64":
        return base64.b64encode(_as_bytes(pooled, request)).decode()
    return pooled.outputs.data


def _as_bytes(pooled: Pooled, request: protocol.EncodedFields) -> bytes:
    return to_bytes(pooled.outputs.data, request.embed_dtype or "float32", request.endianness or "little")


def _binary_response(outputs: Sequence[Pooled], request: protocol.EncodedFields, head: dict[str, Any]) -> Response:
    """All inputs' bytes, one behind the other; `bytes` tells in the header `metadata` where each lies."""
    pieces = [_as_bytes(output, request) for output in outputs]
    headers: dict[str, str] = {}
    if request.encoding_format == "bytes":
        ends = list(itertools.accumulate(map(len, pieces)))
        told = {"embed_dtype": request.embed_dtype or "float32", "endianness": request.endianness or "little"}
        data = [
            {"index": index, **told, "start": end - len(piece), "end": end, "shape": output.outputs.data.shape}
            for index, (piece, end, output) in enumerate(zip(pieces, ends, outputs, strict=True))
        ]
        metadata = {**head, "data": data, "usage": msgspec.to_builtins(usage_of(outputs))}
        headers["metadata"] = json.dumps(metadata, separators=(",", ":"))
        if len(headers["metadata"]) > _MOST_METADATA:
            message = (
                f"'bytes' describes {len(outputs)} inputs in a header of {len(headers['metadata'])} bytes; at "
                f"most {_MOST_METADATA}: send fewer, or take 'bytes_only'."
            )
            raise bad_field("encoding_format", message)
    return Response(b"".join(pieces), headers=headers, media_type="application/octet-stream")
