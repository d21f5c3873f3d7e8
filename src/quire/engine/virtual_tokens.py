"""Requests and their adapters: an adapter of virtual tokens (prompt tuning, prefix tuning) puts these before the prompt.

A virtual token's id is its place, from 0 on. So chunks, pages, positions and prefixes need nothing of their own; the workers know
what such a token stands for. Knows what an adapter's folder says; knows none of its numbers.
"""

import msgspec

from quire.adapters import LoRARequest
from quire.engine.adapter_folders import AdapterFolders
from quire.errors import RequestError
from quire.request import EngineRequest, token_array
from quire.sampling_params import SamplingParams


class VirtualTokens:
    """Requests with virtual tokens.

    Args:
        max_model_len: tokens that a request may have, virtual ones among them.
        folders: say how many virtual tokens an adapter has.
    """

    def __init__(self, max_model_len: int, folders: AdapterFolders) -> None:
        self._limit, self._folders = max_model_len, folders

    def attach(self, requests: list[EngineRequest], adapter: LoRARequest) -> None:
        """Give the sequences of a request their adapter.

        Raises:
            RequestError: its virtual tokens cannot be put before this prompt; `param` names what is at fault.
        """
        folder = self._folders.read(adapter)
        if folder is not None and folder.num_virtual:
            adapter = msgspec.structs.replace(adapter, num_virtual_tokens=folder.num_virtual)
            self._put_before(requests, folder.num_virtual)
        for index, request in enumerate(requests):
            request.adapter = adapter if index == 0 else adapter.as_loaded

    def _put_before(self, requests: list[EngineRequest], count: int) -> None:
        params, own = requests[0].sampling_params, requests[0].prompt_token_ids
        _check(requests[0], params)
        assert params is not None
        room = self._limit - len(own) - count
        if room < 1:
            raise RequestError(
                f"the prompt has {len(own)} tokens, and the adapter {count} virtual ones, but max_model_len is {self._limit} and "
                "one must be left for the output; shorten the prompt",
                param="prompt",
            )
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        token_ids = token_array([*range(count), *own])
        for request in requests:
            request.prompt_token_ids = token_ids


def _check(request: EngineRequest, params: SamplingParams | None) -> None:
    """Raises RequestError: virtual tokens cannot be put before the prompt of such a request."""
    if params is None:
        raise RequestError(
            "the adapter puts virtual tokens before prompts, which models that pool do not take", param="lora_request"
        )
    if request.media:
        raise RequestError(
            "the adapter puts virtual tokens before prompts, and this prompt has media or embeddings: their places cannot be "
            "moved",
            param="lora_request",
        )
    if params.prompt_logprobs is not None:
        raise RequestError(
            "the adapter puts virtual tokens before the prompt, whose prompt_logprobs are not computed then: leave them out",
            param="prompt_logprobs",
        )
