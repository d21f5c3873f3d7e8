"""What a vendor's package adds beside its parts: environment variables, log fields, sections of `quire collect-env`, metrics, and
defaults of settings. Each is a registry; a general plugin calls its `register(name, …)`.

Knows tables. Their readers (`envs`, `logger`, `collect-env`, the metrics of a server, the settling of settings) know what to do.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire import envs, logger
from quire.envs import Variable
from quire.plugins.registry import Registry

__all__ = ["LOG_FIELDS", "METRICS", "REPORT_SECTIONS", "SETTING_DEFAULTS", "VARIABLES", "Variable"]

VARIABLES: Registry[Variable] = Registry("environment variable", "the environment")
"""Read as `envs.NAME`. `quire collect-env` lists those that are set, and a name in the environment that is nearly one of
them is warned of."""

LOG_FIELDS: Registry[Callable[[], object]] = Registry("log field", "the log")
"""Each is called for each line that is logged, in the process that logs it."""

REPORT_SECTIONS: Registry[Callable[[], Mapping[str, Any]]] = Registry("section of collect-env", "collect-env")
"""Called for a report; one that fails is told of in its place."""

METRICS: Registry[Callable[[], Iterable[Any]]] = Registry("metrics", "the metrics")
"""Called in a server for each scrape of `/metrics`; gives `prometheus_client` metric families. It must not wait for anything."""

SETTING_DEFAULTS: Registry[Callable[[Any], Mapping[str, Any]]] = Registry("setting defaults", "the settings")
"""Called with a model's config.json (an `HFConfig`); gives values of settings (fields of `EngineArgs`) that the user left open.
They go before the platform's. An overlay for a family of models looks at `hf_config.model_type`, or at any other field."""

envs.know(VARIABLES)
logger.show_fields(LOG_FIELDS)
