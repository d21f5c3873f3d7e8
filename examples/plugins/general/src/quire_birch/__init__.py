"""What a vendor adds beside a device: a variable of the environment, a log field, a report, a metric, defaults of settings."""

import os
from collections.abc import Iterable
from typing import Any

from prometheus_client.core import GaugeMetricFamily

from quire import envs
from quire.config.hf_config import HFConfig
from quire.plugins.vendor import LOG_FIELDS, METRICS, REPORT_SECTIONS, SETTING_DEFAULTS, VARIABLES, Variable

ROLES: list[str] = []
"""Of this process: `frontend`, `core`, `worker`, `inspector`."""


def register(process_kind: str) -> None:
    """Quire calls this once for each kind that a process is of."""
    ROLES.append(process_kind)
    VARIABLES.register("BIRCH_SITE", Variable("somewhere", "Where this machine stands.", str))
    LOG_FIELDS.register("birch_site", lambda: envs.BIRCH_SITE)
    REPORT_SECTIONS.register("birch", report)
    METRICS.register("birch", metrics)
    SETTING_DEFAULTS.register("birch", defaults)


def report() -> dict[str, Any]:
    """A section of `quire collect-env`."""
    return {"site": envs.BIRCH_SITE, "roles": ", ".join(ROLES)}


def metrics() -> Iterable[GaugeMetricFamily]:
    """Metrics of the server, for each scrape."""
    gauge = GaugeMetricFamily("birch:load", "How busy this machine is.", labels=["site"])
    gauge.add_metric([envs.BIRCH_SITE], os.getloadavg()[0])
    return [gauge]


def defaults(hf_config: HFConfig) -> dict[str, Any]:
    """Values of settings that the user leaves open, for a model: an overlay for one family."""
    return {"max_num_seqs": 24} if hf_config.model_type == "llama" else {}
