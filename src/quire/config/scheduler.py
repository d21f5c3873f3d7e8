"""Who computes when: budgets, policy, preemption."""

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Scheduler settings.

    Attributes:
        max_num_batched_tokens: tokens a step.
        max_num_seqs: requests that may hold a row at once.
        policy: `fcfs`, `priority` (lower first) or `fair` (deficit round robin over tenants).
        preemption_mode: `recompute` drops pages, `swap` moves them to host memory (needs swap_space).
        long_prefill_token_threshold: a prefill gets at most this many tokens a step; 0 means no limit.
        max_num_partial_prefills: prompts that may be part-way through their prefill at once; 0 means no limit.
        max_step_ms: size chunks so that a step is predicted to take at most this long; 0 turns it off.
        async_scheduling: plan step N+1 before step N's tokens are known.
        max_num_waiting, max_waiting_tokens: bounds of the queue; 0 means the built-in limit.
        stream_interval: tokens of a stream that are told together, after the first one.
        record_timelines: keep what happened to requests, for the console.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 4096
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    enable_chunked_prefill: bool = True
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    num_lookahead_slots: int = 0
    delay_factor: float = 0.0
    async_scheduling: bool = False
    scheduler_cls: str | type[Any] | None = None
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 0
    max_step_ms: float = 0.0
    max_num_waiting: int = 0
    max_waiting_tokens: int = 0
    stream_interval: int = 1
    record_timelines: bool = True

    @property
    def max_open_tokens(self) -> int:
        """Tokens for which a request may hold pages beyond what is collected: of one step or two, and the slots ahead."""
        return self.max_num_batched_tokens * (2 if self.async_scheduling else 1) + self.num_lookahead_slots
