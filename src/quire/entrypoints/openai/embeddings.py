"""`POST /v1/embeddings`: a vector for each input, as numbers or as their bytes."""

from starlette.responses import Response

from quire.entrypoints.openai.pooling_protocol import EmbeddingData, EmbeddingRequest, EmbeddingResponse
from quire.entrypoints.openai.pooling_run import (
    activation,
    binary_response,
    numbers,
    read_prompts,
    require_pooling,
    run_pooling,
    usage_of,
)
from quire.entrypoints.openai.state import ServerState
from quire.pooling_params import PoolingParams


async def answer_embeddings(
    state: ServerState, request: EmbeddingRequest, public_id: str
) -> EmbeddingResponse | Response:
    """Embed every input of a request."""
    model = state.resolve_model(request.model)
    require_pooling(state)
    params = PoolingParams(
        task="embed",
        dimensions=request.dimensions,
        use_activation=activation(request, request.normalize),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
    )
    prompts = await read_prompts(state, request)
    special = request.add_special_tokens is not False
    outputs = await run_pooling(state, request, prompts, params, public_id, add_special_tokens=special)
    if (binary := binary_response(outputs, request, f"embd-{public_id}", model)) is not None:
        return binary
    data = [EmbeddingData(index, numbers(output.outputs, request)) for index, output in enumerate(outputs)]
    return EmbeddingResponse(data=data, model=model, usage=usage_of(outputs))
