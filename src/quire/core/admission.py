"""What is refused at the door, and why: settings that cannot work together, and requests that can never fit; and how long the
door stays shut for others (`delay_factor`). A queue that is full is `queue_bounds.py`'s business.

Knows limits and numbers; touches no request.
"""

from collections.abc import Callable

from quire.config import SchedulerConfig
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.request_state import compute_max_total
from quire.errors import ConfigError, RequestError
from quire.request import EngineRequest


def check_settings(config: SchedulerConfig, max_model_len: int, num_host_blocks: int) -> None:
    """Refuse scheduler settings that would leave some request unserved for ever."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be at least 1", setting=name)
    if config.preemption_mode not in ("recompute", "swap"):
        raise ConfigError(
            f"preemption_mode is {config.preemption_mode!r}; allowed are recompute, swap", setting="preemption_mode"
        )
    if config.preemption_mode == "swap" and num_host_blocks < 2:
        raise ConfigError(
            "preemption_mode is swap, and swap_space leaves no page of host memory to swap to; raise swap_space (GiB) or "
            "choose recompute",
            setting="swap_space",
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"with enable_chunked_prefill off, a prompt is computed whole: max_num_batched_tokens "
            f"({config.max_num_batched_tokens}) must be at least max_model_len ({max_model_len}); "
            "raise the first, lower the second, or turn chunked prefill on",
            setting="max_num_batched_tokens",
        )


def check_fits(source: EngineRequest, kv: KVCacheManager, max_model_len: int, max_open_tokens: int) -> None:
    """Refuse a request that could never be served to its end.

    Raises:
        RequestError: names the prompt's length and the limit that it meets.
    """
    length = len(source.prompt_token_ids)
    if length == 0:
        raise RequestError("prompt is empty; at least one token is needed", param="prompt")
    num_tokens = length + len(source.resumed_token_ids)
    room = max_model_len if source.pooling_params is not None else max_model_len - 1
    if length > room:
        raise RequestError(
            f"prompt has {length} tokens; max_model_len is {max_model_len} tokens for prompt and output together, so at "
            f"most {room} fit",
            param="prompt",
        )
    max_total = compute_max_total(source, max_model_len)
    if num_tokens >= max_total:
        raise RequestError(
            f"prompt and resumed tokens are {num_tokens}, which leaves nothing to generate within {max_total} tokens "
            f"(max_tokens and max_model_len {max_model_len})",
            param="resumed_token_ids",
        )
    needed = kv.peak_blocks(max_total - 1, max_open_tokens)
    if needed > kv.pool.num_usable:
        raise RequestError(
            f"prompt has {length} tokens and may grow to {max_total}: that takes {needed} KV-cache pages of "
            f"{kv.block_size} tokens, and the pool has {kv.pool.num_usable}; ask for fewer max_tokens, or give the cache "
            "more memory",
            param="prompt",
        )


class AdmissionDelay:
    """Holds the queue's head back until it has waited `factor` times as long as the last prompts took to compute, so that
    prompts are admitted in larger batches (0 holds nobody back).
    """

    def __init__(self, factor: float, clock: Callable[[], float]) -> None:
        self._factor, self._clock = factor, clock
        self._last_plan = self._last_latency = 0.0
        self._had_prompts = False

    def may_admit(self, arrival_time: float, *, is_idle: bool) -> bool:
        """Whether a request that arrived then may be admitted by this plan. Asked once a plan."""
        if self._factor <= 0:
            return True
        now = self._clock()
        if self._had_prompts:
            self._last_latency = now - self._last_plan
        self._last_plan, self._had_prompts = now, False
        return is_idle or now - arrival_time > self._factor * self._last_latency

    def admitted(self) -> None:
        """This plan holds prompts: the time until the next one is what they took."""
        self._had_prompts = True
