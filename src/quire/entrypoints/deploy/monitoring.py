"""Prometheus and Grafana: what to scrape, when to wake somebody, and the board."""

from importlib.resources import files
from typing import Any, NamedTuple

from quire.entrypoints.deploy.plan import Plan
from quire.metrics.prometheus import PREFIX

PROMETHEUS_KEY = "prometheus-key"
"""The file with the key that Prometheus sends where `/metrics` wants one."""


class Alert(NamedTuple):
    """One rule. `expression` has the names of metrics under the prefix `quire:`."""

    name: str
    expression: str
    minutes: int
    severity: str
    summary: str
    to_do: str


_MODEL = "by (job, model_name)"
ALERTS = (
    Alert("QuireDown", 'up{job="JOB"} == 0', 2, "page", "A server cannot be scraped.", "Look at its log and at /live."),
    Alert(
        "QuireRestarts",
        f"sum {_MODEL} (increase(quire:engine_restarts_total[15m])) > 0",
        0,
        "page",
        "The engine core ended by itself and was started again.",
        "The server's log has the cause; requests went on.",
    ),
    Alert(
        "QuireHangs",
        f"sum {_MODEL} (increase(quire:engine_hangs_total[15m])) > 0",
        0,
        "page",
        "The engine core made no progress and was replaced.",
        "Look for errors of the device in the kernel's log.",
    ),
    Alert(
        "QuireRequestsLost",
        f"sum {_MODEL} (increase(quire:requests_given_up_total[15m])) > 0",
        0,
        "page",
        "Requests failed because engine cores ended under them.",
        "The log names them: a request that kills cores is given up.",
    ),
    Alert(
        "QuireRefuses",
        f"sum {_MODEL} (rate(quire:admission_rejections_total[5m])) > 0.1",
        10,
        "ticket",
        "Requests get status 429, as the queue is full.",
        "Add servers, or raise --max-num-waiting if clients may wait longer.",
    ),
    Alert(
        "QuireQueueGrows",
        f'min {_MODEL} (min_over_time(quire:num_requests_waiting_by_reason{{reason="capacity"}}[10m])) > 0',
        10,
        "ticket",
        "Requests have waited for room for ten minutes.",
        "`quire doctor URL` says whether rows or memory are the limit.",
    ),
    Alert(
        "QuirePreempts",
        f"sum {_MODEL} (rate(quire:num_preemptions_total[15m]))"
        f" > 0.05 * sum {_MODEL} (rate(quire:request_success_total[15m]))",
        15,
        "ticket",
        "More than one request in twenty is preempted: the KV cache is too small for what runs.",
        "A smaller --max-num-seqs, --kv-cache-dtype fp8, or more memory for the cache.",
    ),
    Alert(
        "QuireSlowFirstToken",
        "histogram_quantile(0.9, sum by (job, model_name, le) (rate(quire:time_to_first_token_seconds_bucket[5m]))) > 10",
        10,
        "ticket",
        "One request in ten waits more than 10 s for its first token.",
        "Compare queue and prefill on the board: more servers for the one, --enable-prefix-caching for the other.",
    ),
)


def scrape_config(plan: Plan) -> dict[str, Any]:
    """`prometheus.yml`."""
    target = "127.0.0.1" if plan.host in ("127.0.0.1", "0.0.0.0", "::") else plan.host
    job: dict[str, Any] = {"job_name": plan.name, "metrics_path": "/metrics", "scheme": plan.scheme}
    if plan.guards_metrics:
        job["authorization"] = {"type": "Bearer", "credentials_file": PROMETHEUS_KEY}
    job["static_configs"] = [{"targets": [f"[{target}]:{plan.port}" if ":" in target else f"{target}:{plan.port}"]}]
    return {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": ["quire-alerts.yml"],
        "scrape_configs": [job],
    }


def alert_rules(plan: Plan) -> dict[str, Any]:
    """`quire-alerts.yml`."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expression.replace("JOB", plan.name).replace(PREFIX, plan.prefix),
            "for": f"{alert.minutes}m",
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.to_do},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "quire", "rules": rules}]}


def board(plan: Plan) -> str:
    """The Grafana board, which is part of the package, for this server's names of metrics."""
    text = (files("quire") / "assets" / "grafana" / "quire.json").read_text("utf-8")
    return text.replace(PREFIX, plan.prefix)


def grafana_provisioning() -> dict[str, dict[str, Any]]:
    """Files below Grafana's folder `provisioning`, so that the board is there at its start."""
    source = {"name": "Prometheus", "type": "prometheus", "url": "http://127.0.0.1:9090", "isDefault": True}
    provider = {"name": "quire", "type": "file", "options": {"path": "/etc/grafana/boards"}}
    return {
        "provisioning/datasources/quire.yaml": {"apiVersion": 1, "datasources": [source]},
        "provisioning/dashboards/quire.yaml": {"apiVersion": 1, "providers": [provider]},
    }
