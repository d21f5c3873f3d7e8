"""The line that an engine at work writes into the log every few seconds.

Called with each step's time; needs no timer of its own, so that an idle engine stays silent and asleep.
"""

import time
from collections.abc import Callable

from quire.logger import init_logger
from quire.metrics.engine_metrics import EngineMetrics

logger = init_logger(__name__)


class StatsLogger:
    """Writes throughput since its last line, and the present state, at most once in `interval_s` seconds."""

    def __init__(self, metrics: EngineMetrics, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._interval_s = interval_s
        self._clock = clock
        self._last_time = clock()
        self._last_prompt = 0
        self._last_generation = 0
        self._last_queries = 0
        self._last_hits = 0

    def tick(self) -> str | None:
        """After a step: the line that was logged, if it was time for one."""
        now = self._clock()
        elapsed = now - self._last_time
        if elapsed < self._interval_s:
            return None
        if elapsed > 2 * self._interval_s:  # it was idle: rates since then would say nothing
            self._remember(now)
            return None
        metrics = self._metrics
        prompt_rate = (metrics.prompt_tokens - self._last_prompt) / elapsed
        generation_rate = (metrics.generation_tokens - self._last_generation) / elapsed
        queries = metrics.prefix_cache_queries - self._last_queries
        hits = metrics.prefix_cache_hits - self._last_hits
        line = (
            f"Throughput: prompt {prompt_rate:.1f}, generation {generation_rate:.1f} tokens/s; "
            f"running {metrics.num_running}, waiting {metrics.num_waiting}; "
            f"KV cache {metrics.kv_cache_usage:.1%}"
        )
        if queries:
            line += f"; prefix hits {hits / queries:.1%}"
        self._remember(now)
        logger.info("%s", line)
        return line

    def _remember(self, now: float) -> None:
        metrics = self._metrics
        self._last_time = now
        self._last_prompt, self._last_generation = metrics.prompt_tokens, metrics.generation_tokens
        self._last_queries, self._last_hits = metrics.prefix_cache_queries, metrics.prefix_cache_hits
