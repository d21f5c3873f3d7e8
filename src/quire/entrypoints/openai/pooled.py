"""`POST /v1/embeddings`, `/classify` and `/pooling`: vectors, probabilities of classes, and the pooler's numbers as they are."""

import time
from typing import Any

from starlette.responses import Response

from quire.entrypoints.openai import pooling_protocol as protocol
from quire.entrypoints.openai import pooling_run
from quire.entrypoints.openai.errors import bad_request
from quire.entrypoints.openai.state import ServerState
from quire.pooling_params import PoolingParams


async def answer_embeddings(
    state: ServerState, request: protocol.EmbeddingRequest, public_id: str
) -> protocol.EmbeddingResponse | Response:
    model = state.resolve_model(request.model)
    pooling_run.require_pooling(state)
    params = PoolingParams(
        task="embed",
        dimensions=request.dimensions,
        use_activation=pooling_run.activation(request, request.normalize),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
    )
    prompts = await pooling_run.read_prompts(state, request)
    special = request.add_special_tokens is not False
    outputs = await pooling_run.run_pooling(state, request, prompts, params, public_id, add_special_tokens=special)
    if (binary := pooling_run.binary_response(outputs, request, f"embd-{public_id}", model)) is not None:
        return binary
    data = [
        protocol.EmbeddingData(index, pooling_run.numbers(output.outputs, request))
        for index, output in enumerate(outputs)
    ]
    return protocol.EmbeddingResponse(data=data, model=model, usage=pooling_run.usage_of(outputs))


async def answer_classification(
    state: ServerState, request: protocol.ClassificationRequest, public_id: str
) -> protocol.ClassificationResponse:
    """The probability of each class, for every input."""
    model = state.resolve_model(request.model)
    _check_task(state, "classify")
    params = PoolingParams(
        task="classify",
        use_activation=pooling_run.activation(request),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
    )
    prompts = await pooling_run.read_prompts(state, request)
    special = request.add_special_tokens is not False
    outputs = await pooling_run.run_pooling(state, request, prompts, params, public_id, add_special_tokens=special)
    labels = _labels(state)
    data: list[protocol.ClassificationData] = []
    for index, output in enumerate(outputs):
        probs: list[float] = output.outputs.data.tolist()
        best = max(range(len(probs)), key=probs.__getitem__)
        data.append(protocol.ClassificationData(index, labels.get(best, f"LABEL_{best}"), probs, len(probs)))
    return protocol.ClassificationResponse(
        id=f"classify-{public_id}",
        created=int(time.time()),
        model=model,
        data=data,
        usage=pooling_run.usage_of(outputs),
    )


def _labels(state: ServerState) -> dict[int, str]:
    """Names of classes, by number, where config.json has them; its keys are texts."""
    named: Any = state.engine.config.model.hf_config.to_dict().get("id2label") or {}
    return {int(key): str(name) for key, name in named.items()}


def _check_task(state: ServerState, task: str) -> None:
    pooling = pooling_run.require_pooling(state)
    if task not in pooling.tasks:
        message = (
            f"{state.engine.config.model.model!r} runs as {pooling.convert!r} and cannot do {task!r}; "
            f"it can: {', '.join(pooling.tasks)}."
        )
        raise bad_request(message, "task", "not_supported")


async def answer_pooling(
    state: ServerState, request: protocol.PoolingRequest, public_id: str
) -> protocol.PoolingResponse | Response:
    """What the pooler gives for every input, of any task that the model has."""
    model = state.resolve_model(request.model)
    params = PoolingParams(
        task=request.task,
        dimensions=request.dimensions,
        use_activation=pooling_run.activation(request, request.normalize),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
        step_tag_id=request.step_tag_id,
        returned_token_ids=request.returned_token_ids,
    )
    _check_task(state, params.task or pooling_run.require_pooling(state).tasks[0])
    prompts = await pooling_run.read_prompts(state, request)
    special = request.add_special_tokens is not False
    outputs = await pooling_run.run_pooling(state, request, prompts, params, public_id, add_special_tokens=special)
    if (binary := pooling_run.binary_response(outputs, request, f"pool-{public_id}", model)) is not None:
        return binary
    data = [
        protocol.PoolingData(index, pooling_run.numbers(output.outputs, request))
        for index, output in enumerate(outputs)
    ]
    return protocol.PoolingResponse(
        id=f"pool-{public_id}", created=int(time.time()), model=model, data=data, usage=pooling_run.usage_of(outputs)
    )
