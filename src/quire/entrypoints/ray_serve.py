"""A Ray Serve application: each replica is what `quire serve` starts, behind Ray's proxies in place of a port.

`serve run quire.entrypoints.ray_serve:build_app model=MODEL max-model-len=32K`. Importing this module does not import Ray.
"""

import argparse
import asyncio
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from quire.entrypoints.cli.main import build_parser
from quire.entrypoints.cli.serve import check_flags, make_app
from quire.entrypoints.deploy.plan import count_gpus
from quire.entrypoints.several.models_file import flag_words
from quire.errors import ConfigError, EngineDeadError, QuireError
from quire.extras import install_command
from quire.logger import init_logger

logger = init_logger(__name__)

DEPLOYMENT = "deployment"
"""The argument that has options of `ray.serve.deployment` (`num_replicas`, `autoscaling_config`, `ray_actor_options` …)."""
_MOST_ONGOING = 1 << 16
"""Requests that Ray gives a replica: the engine has a queue of its own, and bounds it."""


def build_app(args: Mapping[str, Any]) -> Any:
    """The application that `serve run`, a Serve config file and `ray.serve.run` take.

    Args:
        args: flags of `quire serve` by name; `deployment`: options of Ray's deployment.

    Raises:
        ConfigError: Ray Serve is not installed, or a flag is wrong.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError.of("ray", f"Ray Serve is not installed; install it with `{install_command('ray')}`.")
    flags = dict(args)
    options = {"name": "quire", "max_ongoing_requests": _MOST_ONGOING, **flags.pop(DEPLOYMENT, {})}
    words = flag_words(flags)
    parsed = _parse(words)
    check_flags(parsed)
    options.setdefault("ray_actor_options", {"num_gpus": count_gpus(parsed)})

    def build() -> "ServedEngine":
        return ServedEngine(words)

    serve: Any = importlib.import_module("ray.serve")
    return serve.deployment(serve.ingress(build)(Replica), **options).bind()


def _parse(words: Sequence[str]) -> argparse.Namespace:
    return build_parser("serve").parse_args([*words])


class Replica:
    """What Ray asks besides requests. Attributes: app: the engine; Ray Serve sets it."""

    app: "ServedEngine"

    async def check_health(self) -> None:
        """Raises EngineDeadError: Ray replaces this replica."""
        await self.app.check_health()


class ServedEngine:
    """ASGI: the application of `quire serve`, whose engine lives from the server's start to its end (ASGI's lifespan).

    Args:
        words: flags of `quire serve`.
    """

    def __init__(self, words: Sequence[str]) -> None:
        args = _parse(words)
        self._engine_args, keys = check_flags(args)
        self._app, self._state = make_app(args, keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        try:
            await asyncio.to_thread(self._start)
        except QuireError as error:
            logger.error("%s", error)
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._state.draining = True
        await asyncio.to_thread(self._state.engine.shutdown)
        await send({"type": "lifespan.shutdown.complete"})

    def _start(self) -> None:
        from quire.entrypoints.server.engine_start import begin_engine, connect_engine

        self._state.engine_or_none = connect_engine(begin_engine(self._engine_args).result(), self._state)

    async def check_health(self) -> None:
        """Raises EngineDeadError: the engine has died for good. One that is being started again is healthy."""
        if self._state.engine.errored:
            raise EngineDeadError(str(self._state.engine.dead_error))
