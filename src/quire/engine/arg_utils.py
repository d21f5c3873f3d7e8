"""What a user asks of an engine: keywords or flags, `EngineArgs`, and from them the one frozen `EngineConfig`.

`settings` holds the fields; `arg_resolve` decides what was left open.
"""

import argparse
import dataclasses
import uuid
from typing import Self

from quire import envs
from quire.config import AttentionConfig, EngineConfig, ObservabilityConfig
from quire.config.checks import FLAG, setting, whole
from quire.config.kv_events import read_kv_events_config
from quire.config.kv_transfer import read_kv_transfer_config
from quire.config.observability import read_histogram_buckets, read_structured_outputs_config, resolve_profiler
from quire.config.reasoning import read_reasoning_config
from quire.engine import arg_parser
from quire.engine.arg_resolve import Resolver, UsageContext, apply_logging, attention_backend, section
from quire.engine.copies_here import copies_of_nodes
from quire.engine.platform_settings import check_stages
from quire.engine.settings import EngineSettings, check_settings, normalise
from quire.engine.vllm_settings import refuse_unknown
from quire.logger import init_logger, trace_this_thread_if_asked
from quire.patch import bootstrap, settle
from quire.platforms import current_platform

logger = init_logger(__name__)

__all__ = ["AsyncEngineArgs", "EngineArgs", "UsageContext"]


@refuse_unknown
@dataclasses.dataclass
class EngineArgs(EngineSettings):
    """What a user asks of an engine. Field names are the ones that users of vLLM know; None lets the engine decide.

    Raises:
        ConfigError: a keyword is not a setting, or belongs to a feature that is not available yet.
    """

    def __post_init__(self) -> None:
        normalise(self)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every field, grouped; returns the parser. Plugins are loaded first: they add values of flags."""
        from quire.plugins import load_general_plugins

        load_general_plugins("frontend")
        arg_parser.add_engine_flags(parser, cls)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The fields that the parsed flags hold."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    def create_engine_config(self, usage_context: UsageContext | None = None) -> EngineConfig:
        """Resolve, check and freeze. `usage_context` is the kind of use: the size of a step and the number of rows have a default
        for each kind.
        Raises ConfigError if a setting cannot work; the message names it, its value and what is allowed."""
        from quire.plugins import load_general_plugins

        bootstrap("frontend", only_first=True)
        load_general_plugins("frontend")
        _warn_unknown_variables()
        check_settings(self)
        if self.logging_config:
            apply_logging(self.logging_config)
        instance_id = uuid.uuid4().hex[:8]
        trace_this_thread_if_asked(instance_id)
        platform = current_platform(self.device)
        provenance: dict[str, str] = {}
        resolver = Resolver(
            copies_of_nodes(self),
            platform,
            platform.capabilities(),
            provenance,
            usage_context or UsageContext.ENGINE_CONTEXT,
        )
        set_by = resolver.settle()
        settled, model = resolver.args, resolver.model()
        speculative = resolver.speculative(model)
        config = EngineConfig(
            model=model,
            cache=resolver.cache(model),
            parallel=resolver.parallel(),
            scheduler=resolver.scheduler(model),
            device=resolver.device(),
            load=resolver.load(),
            attention=AttentionConfig(backend=attention_backend(settled.attention_backend, settled.attention_config)),
            observability=section(
                ObservabilityConfig,
                settled,
                log_stats_interval_s=settled.log_stats_interval or envs.QUIRE_LOG_STATS_INTERVAL,
                otlp_traces_endpoint=settled.otlp_traces_endpoint or None,
                profiler=resolve_profiler(settled.profiler_config),
                custom_histogram_buckets=read_histogram_buckets(settled.custom_histogram_buckets),
            ),
            structured_outputs=read_structured_outputs_config(
                settled.structured_outputs_config, settled.guided_decoding_backend
            ),
            reasoning=read_reasoning_config(settled.reasoning_config, settled.structured_outputs_config),
            lora=resolver.lora(model),
            multimodal=resolver.multimodal(model),
            speculative=speculative,
            drafter=resolver.drafter(model, speculative),
            kv_events=read_kv_events_config(settled.kv_events_config),
            kv_transfer=read_kv_transfer_config(
                settled.kv_transfer_config, settled.kv_offloading_size, settled.speculative_config
            ),
            instance_id=instance_id,
            provenance=provenance,
            set_by=set_by,
        )
        check_stages(config)
        config = platform.check_config(config)
        settle(config)
        return config


@refuse_unknown
@dataclasses.dataclass
class AsyncEngineArgs(EngineArgs):
    """As `EngineArgs`, for the asynchronous engine."""

    enable_log_requests: bool = setting(False, FLAG, "log each request's id and parameters")
    enable_log_outputs: bool = setting(False, FLAG, "log how each request ended")
    log_prompts: bool = setting(False, FLAG, "with these two, log prompts and answers too, and not only their lengths")
    max_log_len: int | None = setting(None, whole(0), "characters of a text in the log (all)")


def _warn_unknown_variables() -> None:
    for name, near in envs.unknown_variables():
        hint = f"; did you mean {near}?" if near else ""
        logger.warning_once("The environment variable %s is not known%s", name, hint)
