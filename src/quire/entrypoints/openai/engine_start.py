"""Makes the server's engine, and connects its figures to `/metrics`."""

from typing import TYPE_CHECKING

from quire.engine.arg_resolve import UsageContext
from quire.engine.arg_utils import AsyncEngineArgs
from quire.entrypoints.openai.state import ServerState
from quire.metrics.prometheus import PrometheusExposition, cache_info

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM


def start_engine(engine_args: AsyncEngineArgs, state: ServerState) -> "AsyncLLM":
    """The asynchronous engine, loaded and ready. Takes as long as the weights do.
    Raises ConfigError: a setting that cannot work."""
    from quire.engine.async_llm import AsyncLLM

    return connect_engine(AsyncLLM.from_engine_args(engine_args, usage_context=UsageContext.API_SERVER), state)


def connect_engine(engine: "AsyncLLM", state: ServerState) -> "AsyncLLM":
    """Show an engine's figures at `/metrics`."""
    if engine.metrics is not None:
        engine.metrics.model_name = engine.config.model.served_model_name[0]
        info, names = cache_info(engine.config.cache), state.settings.metrics_names
        state.metrics = PrometheusExposition(engine.metrics, info, names, [state.http])
    return engine
