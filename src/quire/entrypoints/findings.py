"""What is wrong with a server, and which setting changes it: judged by figures, and by where requests' time and tokens went.

Knows figures by Prometheus' names, and the causes that timelines have. Asks nobody.
"""

from collections.abc import Mapping
from typing import NamedTuple

FINE, LOOK, WRONG = "fine", "look", "wrong"


class Finding(NamedTuple):
    """One check: what was seen, and what to do where it is not fine."""

    check: str
    state: str
    seen: str
    to_do: str = ""


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
    checks = (_queue, _refusals, _preemptions, _prefixes, _pages, _restarts)
    found = [check(metrics) for check in checks]
    return found if causes is None else [*found, _stalls(causes), _misses(causes)]


def _stalls(causes: Causes) -> Finding:
    """Why requests waited."""
    if not causes.stalls:
        return Finding("stalls", FINE, f"none of the last {causes.num_requests} requests waited")
    ranked = sorted(causes.stalls.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in ranked[:4])
    seen = f"the last {causes.num_requests} requests waited for: {shown}"
    worst, seconds = next(((cause, s) for cause, s in ranked if cause not in _FINE_CAUSES), ("", 0.0))
    if seconds < max(1, causes.num_requests):  # a second each
        return Finding("stalls", FINE, seen)
    return Finding("stalls", LOOK, seen, STALLS.get(worst, ""))


def _misses(causes: Causes) -> Finding:
    """Why prompts were not in the prefix cache."""
    total = sum(causes.misses.values())
    if not total:
        return Finding("prefix misses", FINE, f"none in the last {causes.num_requests} prompts")
    ranked = sorted(causes.misses.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{cause} {tokens:,}" for cause, tokens in ranked[:4])
    seen = f"tokens of the last {causes.num_requests} prompts: {shown}"
    worst, tokens = next(((cause, n) for cause, n in ranked if cause not in _FINE_CAUSES), ("", 0))
    if tokens < _MANY_MISSES or tokens < total / 2:
        return Finding("prefix misses", FINE, seen)
    return Finding("prefix misses", LOOK, seen, MISSES.get(worst, ""))


def _value(metrics: Mapping[str, float], name: str) -> float:
    return metrics.get(name, 0.0)


def _queue(metrics: Mapping[str, float]) -> Finding:
    waiting, running = _value(metrics, "num_requests_waiting"), _value(metrics, "num_requests_running")
    count = _value(metrics, "request_queue_time_seconds_count")
    mean = _value(metrics, "request_queue_time_seconds_sum") / count if count else 0.0
    seen = f"{running:.0f} run, {waiting:.0f} wait; {mean:.2f} s in the queue on average"
    if waiting <= running and mean < 1.0:
        return Finding("queue", FINE, seen)
    if _value(metrics, "kv_cache_usage_perc") > 0.9:
        return Finding(
            "queue", LOOK, seen, "memory is the limit: --kv-cache-dtype fp8, shorter --max-model-len, or more devices"
        )
    return Finding(
        "queue", LOOK, seen, "pages are free: a larger --max-num-seqs lets more run at once; else more servers"
    )


def _refusals(metrics: Mapping[str, float]) -> Finding:
    refused = _value(metrics, "admission_rejections_total")
    if refused:
        to_do = "--max-num-waiting, --max-waiting-tokens and --max-waiting-time bound the queue; clients should heed Retry-After"
        return Finding("refusals", LOOK, f"{refused:.0f} requests got status 429", to_do)
    return Finding("refusals", FINE, "none")


def _preemptions(metrics: Mapping[str, float]) -> Finding:
    count = _value(metrics, "num_preemptions_total")
    ended = max(_value(metrics, "request_success_total"), 1.0)
    seen = f"{count:.0f}, of {ended:.0f} requests"
    if count / ended > 0.05:
        to_do = "pages run out while requests run: a smaller --max-num-seqs, --kv-cache-dtype fp8, or more memory for the cache"
        return Finding("preemptions", LOOK, seen, to_do)
    return Finding("preemptions", FINE, seen)


def _prefixes(metrics: Mapping[str, float]) -> Finding:
    asked, hits = _value(metrics, "prefix_cache_queries_total"), _value(metrics, "prefix_cache_hits_total")
    seen = f"{hits / asked:.0%} of {asked:,.0f} prompt tokens were there" if asked else "nothing was looked up"
    if asked > 100_000 and hits < asked / 20:
        to_do = "prompts share no beginning: put what changes (dates, ids) behind what stays"
        return Finding("prefix cache", LOOK, seen, to_do)
    return Finding("prefix cache", FINE, seen)


def _pages(metrics: Mapping[str, float]) -> Finding:
    share = _value(metrics, "kv_cache_usage_perc")
    return Finding("KV cache", FINE, f"{share:.0%} in use")


def _restarts(metrics: Mapping[str, float]) -> Finding:
    restarts, given_up = _value(metrics, "engine_restarts_total"), _value(metrics, "requests_given_up_total")
    seen = f"{restarts:.0f}; {given_up:.0f} requests given up"
    if restarts:
        return Finding("engine restarts", WRONG, seen, "the server's log names the cause of each (docs/reliability.md)")
    return Finding("engine restarts", FINE, seen)
