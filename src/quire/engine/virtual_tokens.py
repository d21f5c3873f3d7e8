"""Requests and their adapters: an adapter of virtual tokens (prompt tuning, prefix tuning) puts these before the prompt.

A virtual token's id is its place, from 0 on. So chunks, pages, positions and prefixes need nothing of their own; the workers know
what such a token stands for. Knows the configuration in an adapter's folder; knows none of its numbers.
"""

import os

import msgspec

from quire.adapters import CONFIG, LoRARequest, read_config, virtual_tokens_of
from quire.errors import ConfigError, RequestError
from quire.request import EngineRequest, token_array
from quire.sampling_params import SamplingParams

_MOST_KNOWN = 4096
"""Adapters whose configurations are remembered."""


class VirtualTokens:
    """How many virtual tokens adapters have, and requests with them.

    Args:
        max_model_len: tokens that a request may have, virtual ones among them.
    """

    def __init__(self, max_model_len: int) -> None:
        self._limit = max_model_len
        self._known: dict[str, tuple[int, int]] = {}

    def _count(self, adapter: LoRARequest) -> int:
        """How many an adapter has; 0 where there is no folder to look into, as for a hub's."""
        try:
            changed = os.stat(os.path.join(adapter.lora_path, CONFIG)).st_mtime_ns
        except OSError:
            return 0
        known = self._known.get(adapter.lora_path)
        if known is None or known[0] != changed:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[adapter.lora_path] = changed, virtual_tokens_of(read_config(adapter.lora_path))
        return known[1]

    def attach(self, requests: list[EngineRequest], adapter: LoRARequest) -> None:
        """Give the sequences of a request their adapter.

        Raises:
            RequestError: its virtual tokens cannot be put before this prompt; `param` names what is at fault.
        """
        try:
            count = self._count(adapter)
        except ConfigError as error:
            raise RequestError(str(error), param="lora_request") from error
        if count:
            adapter = msgspec.structs.replace(adapter, num_virtual_tokens=count)
            self._put_before(requests, count)
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
