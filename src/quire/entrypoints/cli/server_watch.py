"""A running server's figures: read from its metrics, and from `/console/state` where it has that.

Knows Prometheus' text and the names that Quire and vLLM share. Knows nothing of screens.
"""

import dataclasses
import json
import time
from typing import Any

from quire.entrypoints.cli.http_client import OpenAIClient
from quire.errors import EngineError, QuireError, RequestError

TIMEOUT_S = 10.0
PREFIXES = ("quire:", "vllm:")
GAUGES = {"running": "num_requests_running", "waiting": "num_requests_waiting", "kv_usage": "kv_cache_usage_perc"}
COUNTERS = {
    "prompt_tokens": "prompt_tokens_total",
    "generation_tokens": "generation_tokens_total",
    "prefix_queries": "prefix_cache_queries_total",
    "prefix_hits": "prefix_cache_hits_total",
    "preemptions": "num_preemptions_total",
    "steps": "engine_steps_total",
}
MEANS = {
    "first_token_s": "time_to_first_token_seconds",
    "inter_token_s": "inter_token_latency_seconds",
    "request_s": "e2e_request_latency_seconds",
}
FINISHED = "request_success_total"


@dataclasses.dataclass
class Sample:
    """A server's figures at one moment. Counters are since its start."""

    at: float
    model: str = ""
    values: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    sums: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict[str, tuple[float, float]])
    finished: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    state: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


class ServerWatch:
    """Takes samples of the server at `url`.

    Raises:
        ConfigError: nobody answers there.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = OpenAIClient(self.url, api_key, base="", timeout_s=TIMEOUT_S)
        self._has_state = True

    def sample(self) -> Sample:
        """The figures now. Raises QuireError: the server cannot be reached, or gives none."""
        sample = read_metrics(self._client.get("/metrics").decode("utf-8", "replace"), time.monotonic())
        if self._has_state:
            try:
                sample.state = json.loads(self._client.get("/console/state"))
            except (RequestError, EngineError):
                self._has_state = False  # another server, or one that tells less
            except (QuireError, ValueError):
                pass
        return sample


def read_metrics(text: str, at: float) -> Sample:
    """A sample of Prometheus' text; engines of one server are added up, their cache use is the mean.

    Raises:
        EngineError: it has none of the figures.
    """
    from prometheus_client.parser import text_string_to_metric_families

    sample = Sample(at)
    totals: dict[str, list[float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            prefix = next((prefix for prefix in PREFIXES if family.name.startswith(prefix)), None)
            if prefix is None:
                continue
            for each in family.samples:
                name = each.name.removeprefix(prefix)
                sample.model = sample.model or each.labels.get("model_name", "")
                if name == FINISHED:
                    reason = each.labels.get("finished_reason", "?")
                    sample.finished[reason] = sample.finished.get(reason, 0.0) + each.value
                elif not name.endswith("_bucket"):
                    totals.setdefault(name, []).append(each.value)
    except ValueError as error:
        raise EngineError(f"what /metrics gives cannot be read: {error}") from None
    if not totals:
        raise EngineError("what /metrics gives has none of the figures of Quire or vLLM")
    for ours, name in {**GAUGES, **COUNTERS}.items():
        if name in totals:
            sample.values[ours] = sum(totals[name])
    if "kv_usage" in sample.values:
        sample.values["kv_usage"] /= len(totals[GAUGES["kv_usage"]])
    for ours, name in MEANS.items():
        if f"{name}_count" in totals:
            sample.sums[ours] = (sum(totals[f"{name}_sum"]), sum(totals[f"{name}_count"]))
    return sample


def figures(before: Sample, now: Sample) -> dict[str, Any]:
    """What happened between two samples, for people and scripts: rates a second, means in seconds, shares from 0 to 1.

    None stands where nothing happened or the server does not tell.
    """
    seconds = max(now.at - before.at, 1e-9)

    def grown(name: str) -> float:
        return max(0.0, now.values.get(name, 0.0) - before.values.get(name, 0.0))

    def mean(name: str) -> float | None:
        total, count = now.sums.get(name, (0.0, 0.0))
        past_total, past_count = before.sums.get(name, (0.0, 0.0))
        return (total - past_total) / (count - past_count) if count > past_count else None

    def ratio(part: float, whole: float) -> float | None:
        return part / whole if whole > 0 else None

    state = now.state
    step = state.get("step") or {}
    seen = {entry["id"] for entry in before.state.get("steps", ())}
    steps = [entry for entry in state.get("steps", ()) if entry["id"] not in seen]
    finished = {reason: count - before.finished.get(reason, 0.0) for reason, count in now.finished.items()}
    return {
        "model": state.get("model") or now.model,
        "version": state.get("version"),
        "uptime_s": state.get("uptime_s"),
        "running": int(now.values.get("running", 0)),
        "waiting": int(now.values.get("waiting", 0)),
        "kv_usage": now.values.get("kv_usage"),
        "num_pages": state.get("num_pages"),
        "free_pages": state.get("free_pages"),
        "generation_tokens_per_s": round(grown("generation_tokens") / seconds, 2),
        "prompt_tokens_per_s": round(grown("prompt_tokens") / seconds, 2),
        "prefix_hit_share": ratio(grown("prefix_hits"), grown("prefix_queries")),
        "prefix_hit_share_ever": ratio(now.values.get("prefix_hits", 0.0), now.values.get("prefix_queries", 0.0)),
        "steps_per_s": round(grown("steps") / seconds, 2),
        "step_ms": _mean_of(steps, "ms"),
        "step_predicted_ms": _mean_of(steps, "predicted_ms"),
        "step_tokens": _mean_of(steps, "num_tokens"),
        "last_step_ms": step.get("ms"),
        **{name: mean(name) for name in MEANS},
        "finished_per_s": {reason: round(count / seconds, 2) for reason, count in finished.items()},
        "preemptions": int(grown("preemptions")),
        "requests": slowest(state.get("requests", ())),
        "finished": slowest(state.get("finished", ())),
    }


def _mean_of(entries: list[dict[str, Any]], name: str) -> float | None:
    values = [entry[name] for entry in entries if name in entry]
    return round(sum(values) / len(values), 3) if values else None


def slowest(requests: Any) -> list[dict[str, Any]]:
    """Requests, the longest-lived first."""
    return sorted(requests, key=lambda request: -(request.get("total_s") or 0.0))
