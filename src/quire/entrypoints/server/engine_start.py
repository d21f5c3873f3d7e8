"""Makes the server's engine, and connects its figures to `/metrics`."""

import concurrent.futures
import threading
from typing import TYPE_CHECKING

from quire.engine.arg_resolve import UsageContext
from quire.engine.arg_utils import AsyncEngineArgs

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM
    from quire.entrypoints.http.state import ServerState


def begin_engine(engine_args: AsyncEngineArgs) -> "concurrent.futures.Future[AsyncLLM]":
    """Load the asynchronous engine in a thread. Its core, in a process of its own, works while the caller imports its routes.
    The result raises ConfigError: a setting that cannot work."""
    from quire.engine.async_llm import AsyncLLM  # not in the thread: the caller imports too
    from quire.engine.process_client import chosen_core

    future: concurrent.futures.Future[AsyncLLM] = concurrent.futures.Future()

    def load() -> None:
        try:
            future.set_result(
                AsyncLLM.from_engine_args(engine_args, usage_context=UsageContext.API_SERVER, core=chosen_core())
            )
        except BaseException as error:  # raised again where the result is asked for
            future.set_exception(error)

    threading.Thread(target=load, name="engine-start", daemon=True).start()
    return future


def connect_engine(engine: "AsyncLLM", state: "ServerState") -> "AsyncLLM":
    """Show an engine's figures at `/metrics`."""
    from quire.metrics.prometheus import PrometheusExposition, cache_info

    if engine.metrics is not None:
        engine.metrics.model_name = engine.config.model.served_model_name[0]
        info, names = cache_info(engine.config.cache), state.settings.metrics_names
        state.metrics = PrometheusExposition(engine.metrics, info, names, [state.http])
    return engine
