"""What plugins and a platform say of settings, before anything is derived: values for what the user left open, then rules.

A setting whose value is its default counts as left open. Knows settings and platforms; knows nothing of what settings mean.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from quire.config import EngineConfig
from quire.config.checks import default_of
from quire.config.engine import exchanges_tokens
from quire.config.hf_config import HFConfig
from quire.engine.copies_here import copies_here
from quire.engine.settings import EngineSettings
from quire.errors import ConfigError, did_you_mean
from quire.logger import init_logger
from quire.platforms.interface import Platform, SettingRule
from quire.plugins.vendor import SETTING_DEFAULTS

logger = init_logger(__name__)
SettingsT = TypeVar("SettingsT", bound=EngineSettings)


def settle_settings(args: SettingsT, platform: Platform, hf_config: HFConfig) -> tuple[SettingsT, dict[str, str]]:
    """The settings as plugins and the platform have them, and for each that is not at its default who set it: `user`,
    `plugin NAME` or `platform NAME`.

    Raises:
        ConfigError: the platform refuses a value, or somebody names a setting that there is not, or gives it a wrong value.
    """
    fields = {field.name: field for field in dataclasses.fields(args)}
    set_by = {name: "user" for name, field in fields.items() if getattr(args, name) != default_of(field)}
    who, changes = f"platform {platform.name}", dict[str, Any]()
    for source, defaults in (*_plugin_defaults(hf_config), (who, platform.setting_defaults(hf_config))):
        for name, value in defaults.items():
            _check_name(name, fields, source)
            if name not in set_by:
                fields[name].metadata["check"](name, value)
                changes[name], set_by[name] = value, source
    for rule in platform.setting_rules():
        _check_name(rule.setting, fields, who)
        value = changes.get(rule.setting, getattr(args, rule.setting))
        if value not in rule.allowed:
            changes[rule.setting], set_by[rule.setting] = _reset(rule, value, platform), who
    return (dataclasses.replace(args, **changes) if changes else args), set_by


def _reset(rule: SettingRule, value: Any, platform: Platform) -> Any:
    if not rule.reset_to:
        allowed = ", ".join(map(repr, rule.allowed))
        message = (
            f"{rule.setting}={value!r} cannot run on the {platform.name} platform ({rule.why}); allowed: {allowed}"
        )
        raise ConfigError(message, setting=rule.setting)
    logger.warning(
        "%s=%r becomes %r on the %s platform: %s", rule.setting, value, *rule.reset_to, platform.name, rule.why
    )
    return rule.reset_to[0]


def _plugin_defaults(hf_config: HFConfig) -> list[tuple[str, Mapping[str, Any]]]:
    """What plugins give to settings that are left open, and who they are."""
    return [
        (f"plugin {SETTING_DEFAULTS.entry(name).owner}", defaults(hf_config))
        for name, defaults in SETTING_DEFAULTS.items()
    ]


def _check_name(name: str, fields: Mapping[str, Any], who: str) -> None:
    if name not in fields:
        message = f"the {who} speaks of a setting {name!r} that there is not{did_you_mean(name, fields)}"
        raise ConfigError(message, setting="device")


def check_stages(config: EngineConfig) -> None:
    """Refuse what stages of a pipeline cannot do. Raises ConfigError."""
    if config.parallel.pipeline_parallel_size == 1:
        return
    asked = {
        "enable_lora": config.lora is not None,
        "merge_lora": config.load.merge_lora is not None,
        "enable_prompt_embeds": config.multimodal is not None and config.multimodal.prompt_embeds,
        "speculative_config": config.speculative is not None,
        "load_format": config.load.load_format == "sharded_state",
    }
    stages = config.parallel.pipeline_parallel_size
    refuse_together(asked, f"pipeline_parallel_size={stages} does not go with {{}} yet: use 1")


def refuse_together(asked: Mapping[str, bool], text: str) -> None:
    """Raises ConfigError for the first setting that is asked for; its name is where `text` has braces."""
    for setting, is_asked in asked.items():
        if is_asked:
            raise ConfigError(text.format(setting), setting=setting)


def check_ranks(args: EngineSettings, platform: Platform) -> None:
    """Refuse numbers of ranks that the platform cannot have. Raises ConfigError."""
    capabilities, size = platform.capabilities(), args.tensor_parallel_size
    stages, here = args.pipeline_parallel_size, copies_here(args)
    copies = here.on_this_host
    if here.count > 1 and args.distributed_executor_backend == "ray":
        message = (
            f"data_parallel_size={here.count} does not go with distributed_executor_backend='ray' yet: start an engine for "
            "each copy, or use 'mp'"
        )
        raise ConfigError(message, setting="data_parallel_size")
    shares = here.shares_experts(args)
    exchanges = exchanges_tokens(args.all2all_backend) or shares
    asked = (
        ("pipeline_parallel_size", stages > 1, capabilities.pipeline_parallel),
        ("tensor_parallel_size", size > 1, capabilities.tensor_parallel),
        ("enable_expert_parallel", args.enable_expert_parallel, capabilities.expert_parallel),
        ("all2all_backend", exchanges, capabilities.token_exchange),
    )
    for setting, is_asked, able in asked:
        if is_asked and not able.value:
            message = f"{setting}={getattr(args, setting)!r} cannot run on the {platform.name} platform: {able.why}"
            raise ConfigError(message, setting=setting)
    if exchanges and (args.enable_lora or not args.enable_expert_parallel):
        why = (
            "adapters do not follow tokens: leave enable_lora out" if args.enable_lora else "set enable_expert_parallel"
        )
        what = f"data_parallel_size={here.count} with enable_expert_parallel" if shares else "all2all_backend"
        raise ConfigError(f"{what}: {why}", setting="all2all_backend")
    if shares:
        _check_shared_experts(args)
    count, parts = platform.device_count(), args.prefill_context_parallel_size
    if count is not None and size * stages * copies * parts > count:
        wishes = {"tensor_parallel_size": size, "pipeline_parallel_size": stages, "data_parallel_size": copies}
        wishes["prefill_context_parallel_size"] = parts
        asked_for = {name: value for name, value in wishes.items() if value > 1} or {"tensor_parallel_size": 1}
        named = " and ".join(f"{name}={value}" for name, value in asked_for.items())
        message = f"{named}, but the {platform.name} platform sees {count} devices"
        raise ConfigError(message, setting=next(iter(asked_for)))


def _check_shared_experts(args: EngineSettings) -> None:
    """Raise ConfigError for what copies that share experts cannot do."""
    asked = {
        "pipeline_parallel_size": args.pipeline_parallel_size > 1,
        "load_format": args.load_format == "sharded_state",
        "prefill_context_parallel_size": args.prefill_context_parallel_size > 1,
    }
    text = "data_parallel_size with enable_expert_parallel does not go with {}: leave one of them out"
    refuse_together(asked, text)
