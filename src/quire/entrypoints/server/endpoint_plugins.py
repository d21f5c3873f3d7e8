"""Routes from plugins of the group `quire.endpoints`, which load only if `QUIRE_PLUGINS` names them.

An entry point names a function that is given the server's state and returns `Endpoint`s. They stand behind the same keys and
middleware as all others. A plugin that fails, or wants a path that is taken, is named in the log and left out.
"""

from collections.abc import Sequence

from quire.entrypoints.http.route_tools import Endpoint
from quire.entrypoints.http.state import ServerState
from quire.errors import ConfigError
from quire.logger import init_logger
from quire.plugins import ENDPOINTS_GROUP, find_plugins, load

logger = init_logger(__name__)


def plugin_endpoints(state: ServerState, own: Sequence[Endpoint]) -> list[Endpoint]:
    """The routes of the plugins; `own`: the server's."""
    owners = dict.fromkeys((endpoint.path for endpoint in own), "quire")
    added: list[Endpoint] = []
    for name, plugin in find_plugins(ENDPOINTS_GROUP).items():
        try:
            endpoints: Sequence[Endpoint] = list(load(plugin)(state))
            _check(endpoints, owners)
        except Exception as error:  # a plugin's code: whatever it raises, the server starts
            plugin.fail(error)
            logger.exception("The endpoints of plugin %r cannot be added and are left out", name)
            continue
        owners |= dict.fromkeys((endpoint.path for endpoint in endpoints), plugin.owner)
        added += endpoints
    return added


def _check(endpoints: Sequence[Endpoint], owners: dict[str, str]) -> None:
    for endpoint in endpoints:
        if not isinstance(endpoint, Endpoint):
            raise ConfigError(f"{endpoint!r} is not a quire.entrypoints.http.route_tools.Endpoint")
        if endpoint.path in owners:
            raise ConfigError(f"the route {endpoint.path!r} belongs to {owners[endpoint.path]!r} already")
