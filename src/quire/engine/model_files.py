"""A model's weights on this machine, before an engine starts: one process fetches them, whatever number of ranks reads them.

A child has a limited time to start, so the parent calls this before the child; afterwards nothing is left to fetch.
"""

from quire.config import EngineConfig
from quire.config.hub import fetch_weights
from quire.engine.arg_resolve import hub_settings
from quire.timeline import STARTUP


def fetch_missing_weights(config: EngineConfig) -> None:
    """Fetch the weights of a hub's model that are not here yet; what could not run is refused first.
    Raises ConfigError: the model cannot run on this machine, or its weights cannot be fetched."""
    hub = config.model.hub
    if hub is None or config.load.load_format == "dummy" or not (hub.refusal or hub.missing()):
        return
    if not hub.refusal:
        from quire.platforms import current_platform
        from quire.worker.dry_run import check_without_weights

        check_without_weights(config, current_platform(config.device.device))
    with STARTUP.phase("download"):
        fetch_weights(hub, hub_settings(config.load, config.model.revision))
