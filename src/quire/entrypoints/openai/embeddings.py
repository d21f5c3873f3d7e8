"""`POST /v1/embeddings`: a vector for each input, as numbers or as base64 of little-endian float32."""

from quire.entrypoints.openai.pooling_protocol import EmbeddingData, EmbeddingRequest, EmbeddingResponse
from quire.entrypoints.openai.pooling_run import (
    activation,
    numbers,
    read_prompts,
    require_pooling,
    run_pooling,
    usage_of,
)
from quire.entrypoints.openai.state import ServerState
from quire.pooling_params import PoolingParams


async def answer_embeddings(state: ServerState, request: EmbeddingRequest, public_id: str) -> EmbeddingResponse:
    """Embed every input of a request."""
    model = state.resolve_model(request.model)
    require_pooling(state)
    params = PoolingParams(
        task="embed",
        dimensions=request.dimensions,
        use_activation=activation(request, request.normalize),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
    )
    prompts = await read_prompts(state, request)
    special = request.add_special_tokens is not False
    outputs = await run_pooling(state, request, prompts, params, public_id, add_special_tokens=special)
    data = [
        EmbeddingData(index, numbers(output.outputs, request.encoding_format)) for index, output in enumerate(outputs)
    ]
    return EmbeddingResponse(data=data, model=model, usage=usage_of(outputs))
