"""`POST /v1/chat/completions/render` and its like: what `/inference/v1/generate` would be sent for a request."""

from typing import Any

import msgspec

from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.openai.chat import prepare_chat
from quire.entrypoints.openai.completions import prepare_completion
from quire.entrypoints.openai.generation import Generation
from quire.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from quire.entrypoints.openai.token_generation import INTERNAL
from quire.entrypoints.openai.token_protocol import GenerateRequest
from quire.sampling_params import SamplingParams


async def render_chat(state: ServerState, request: ChatCompletionRequest, public_id: str) -> GenerateRequest:
    """A conversation as tokens. Raises what the client must be told, as both."""
    return rendered(await prepare_chat(state, request, public_id))


async def render_completion(state: ServerState, request: CompletionRequest, public_id: str) -> list[GenerateRequest]:
    """Each prompt as tokens."""
    return [rendered(part) for part in (await prepare_completion(state, request, public_id)).parts]


def rendered(job: Generation[Any]) -> GenerateRequest:
    """The tokens and parameters of a request that is ready to run. Raises HTTPError: it is more than these."""
    if job.prompt.media or not isinstance(job.params, SamplingParams):
        what = "use_beam_search" if not job.prompt.media else "media"
        raise HTTPError(400, f"A request with {what} is more than tokens: it cannot be rendered.", code="not_supported")
    params = msgspec.to_builtins(job.params, str_keys=True)
    return GenerateRequest(
        token_ids=list(job.prompt.token_ids),
        sampling_params={name: value for name, value in params.items() if name not in INTERNAL},
        model=job.model,
        request_id=job.public_id,
        stream=job.request.stream,
        cache_salt=job.prompt.cache_salt,
        priority=job.request.priority,
    )
