"""What is wrong with a server, and which setting changes it: judged by figures, and by where requests' time and tokens went.

Knows figures by Prometheus' names, and the causes that timelines have. Asks nobody.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

FINE, LOOK, WRONG = "fine", "look", "wrong"


class Finding(NamedTuple):
    """One check: what was seen, and what to do where it is not fine."""

    check: str
    state: str
    seen: str
    to_do: str = ""

    @classmethod
    def of(cls, check: str, is_fine: bool, seen: str, to_do: str, otherwise: str = LOOK) -> "Finding":
        """A check that is fine, or else is to be looked at (or `otherwise`), and then says what to do."""
        return cls(check, FINE, seen) if is_fine else cls(check, otherwise, seen, to_do)


class Causes(NamedTuple):
    """Where the time and the tokens of the last requests went.

    Attributes:
        num_requests: that were looked at.
        stalls: seconds that they waited, by cause (`quire.core.timelines`).
        misses: prompt tokens that the prefix cache did not give, by cause (`quire.core.inspection.explain_prefix`).
    """

    num_requests: int = 0
    stalls: Mapping[str, float] = {}
    misses: Mapping[str, int] = {}


STALLS = {
    "pages": "too few pages are free: --kv-cache-dtype fp8, a shorter --max-model-len, or more memory for the cache",
    "rows": "as many run as may: a larger --max-num-seqs",
    "tokens": "the steps are full: a larger --max-num-batched-tokens (or --max-step-ms), or more servers",
    "partial prefills": "a larger --max-num-partial-prefills",
    "whole prompt": "long prompts wait for a step of their own: --enable-chunked-prefill",
    "delay": "it is asked for: --scheduler-delay-factor, or the policy",
    "common prefix": "fine: another request computes what both begin with",
    "sibling": "fine: another answer to the same request computes the prompt",
}
"""What to do about each cause of waiting."""
MISSES = {
    "evicted": "more memory for the cache (--kv-cache-memory-bytes), --kv-cache-dtype fp8, or a tier (--kv-transfer-config)",
    "differs": "put what changes (dates, ids, names) behind what stays the same",
    "cache off": "--enable-prefix-caching",
    "cache salt differs": "one beginning has several salts or adapters: leave cache_salt out where secrecy allows",
    "not read": "such requests (prompt logprobs, pooling) do not read the cache",
    "shorter than a page": "fine: the prompts are short",
    "still computed": "requests that begin alike come together: send the first one a little earlier",
    "cache reset": "somebody empties the cache (/reset_prefix_cache, new weights)",
    "never seen": "fine: the prompts are new",
}
"""What to do about each cause of a miss."""
_FINE_CAUSES = frozenset(
    cause for table in (STALLS, MISSES) for cause, text in table.items() if text.startswith("fine")
)
_MANY_MISSES = 2000


def server_findings(metrics: Mapping[str, float], causes: Causes | None = None) -> list[Finding]:
    """Checks of a server's figures, since its start or in a time; with causes, also of these."""
    figures = defaultdict(float, metrics)
    found = [check(figures) for check in (_queue, _refusals, _preemptions, _prefixes, _pages, _restarts)]
    return found if causes is None else [*found, _stalls(causes), _misses(causes)]


def _stalls(causes: Causes) -> Finding:
    """Why requests waited."""
    shown, worst, seconds = _ranked(causes.stalls, "{} {:.1f} s")
    last = f"the last {causes.num_requests} requests waited"
    is_fine = seconds < max(1, causes.num_requests)  # a second each
    return Finding.of("stalls", is_fine, f"{last} for: {shown}" if shown else f"none of {last}", STALLS.get(worst, ""))


def _misses(causes: Causes) -> Finding:
    """Why prompts were not in the prefix cache."""
    shown, worst, tokens = _ranked(causes.misses, "{} {:,}")
    last = f"the last {causes.num_requests} prompts"
    is_fine = tokens < max(_MANY_MISSES, sum(causes.misses.values()) / 2)
    seen = f"tokens of {last}: {shown}" if shown else f"none in {last}"
    return Finding.of("prefix misses", is_fine, seen, MISSES.get(worst, ""))


def _ranked(amounts: Mapping[str, float], form: str) -> tuple[str, str, float]:
    """The four largest causes as a text; and the largest that is not fine, with its amount."""
    ranked = sorted(((cause, amount) for cause, amount in amounts.items() if amount), key=lambda item: -item[1])
    worst = next((each for each in ranked if each[0] not in _FINE_CAUSES), ("", 0))
    return ", ".join(form.format(*each) for each in ranked[:4]), worst[0], worst[1]


def _queue(figures: Mapping[str, float]) -> Finding:
    waiting, running = figures["num_requests_waiting"], figures["num_requests_running"]
    mean = figures["request_queue_time_seconds_sum"] / max(figures["request_queue_time_seconds_count"], 1.0)
    seen = f"{running:.0f} run, {waiting:.0f} wait; {mean:.2f} s in the queue on average"
    to_do = "pages are free: a larger --max-num-seqs lets more run at once; else more servers"
    if figures["kv_cache_usage_perc"] > 0.9:
        to_do = "memory is the limit: --kv-cache-dtype fp8, shorter --max-model-len, or more devices"
    return Finding.of("queue", waiting <= running and mean < 1.0, seen, to_do)


def _refusals(figures: Mapping[str, float]) -> Finding:
    refused = figures["admission_rejections_total"]
    seen = f"{refused:.0f} requests got status 429" if refused else "none"
    to_do = "--max-num-waiting, --max-waiting-tokens and --max-waiting-time bound the queue; clients should heed Retry-After"
    return Finding.of("refusals", not refused, seen, to_do)


def _preemptions(figures: Mapping[str, float]) -> Finding:
    count, ended = figures["num_preemptions_total"], max(figures["request_success_total"], 1.0)
    to_do = (
        "pages run out while requests run: a smaller --max-num-seqs, --kv-cache-dtype fp8, or more memory for the cache"
    )
    return Finding.of("preemptions", count / ended <= 0.05, f"{count:.0f}, of {ended:.0f} requests", to_do)


def _prefixes(figures: Mapping[str, float]) -> Finding:
    asked, hits = figures["prefix_cache_queries_total"], figures["prefix_cache_hits_total"]
    seen = f"{hits / asked:.0%} of {asked:,.0f} prompt tokens were there" if asked else "nothing was looked up"
    to_do = "prompts share no beginning: put what changes (dates, ids) behind what stays"
    return Finding.of("prefix cache", asked <= 100_000 or hits >= asked / 20, seen, to_do)


def _pages(figures: Mapping[str, float]) -> Finding:
    return Finding("KV cache", FINE, f"{figures['kv_cache_usage_perc']:.0%} in use")


def _restarts(figures: Mapping[str, float]) -> Finding:
    restarts = figures["engine_restarts_total"]
    seen = f"{restarts:.0f}; {figures['requests_given_up_total']:.0f} requests given up"
    to_do = "the server's log names the cause of each (docs/reliability.md)"
    return Finding.of("engine restarts", not restarts, seen, to_do, WRONG)
