"""Settings that are objects: a dict, the text of a flag, or a config class of one's own, all as plain dicts; and what the
objects are made of that hold other settings (`attention_config`, `kernel_config`, `logging_config`).

Knows names and values. Builds nothing.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any, cast

from quire.errors import ConfigError, did_you_mean
from quire.guards import is_mapping
from quire.logger import init_logger, leave_logging_alone, use_log_config, use_log_format, use_log_level

logger = init_logger(__name__)

_KERNELS = "kernels are chosen by what is measured (`quire explain MODEL`)"

ATTENTION_KEYS = ("backend",)
ATTENTION_KEYS_WITHOUT_EFFECT = (
    "backend_per_kind", "disable_flashinfer_q_quantization", "flash_attn_max_num_splits_for_cuda_graph",
    "flash_attn_version", "flex_attn_block_m", "flex_attn_block_n", "flex_attn_kv_block_size",
    "flex_attn_q_block_size", "indexer_kv_dtype", "indexer_sparse_logits", "indexer_tp_shard_min_rows",
    "minimax_m3_indexer_cp", "minimax_m3_msa_decode_backend", "mla_prefill_backend", "sparse_mla_force_mqa",
    "sparse_mla_prefill_workspace_factor", "tokenspeed_mla_min_split_kv", "tq_max_kv_splits_for_cuda_graph",
    "trtllm_ragged_backend", "use_prefill_query_quantization", "use_trtllm_attention",
)  # fmt: skip
KERNEL_KEYS = (
    "enable_cutedsl_warmup", "enable_flashinfer_autotune", "enable_jit_warmup", "enable_rocm_segmented_attn_autotune",
    "ir_op_priority", "linear_backend", "linear_backend_per_quant", "moe_backend", "monokernel",
    "sparse_indexer_topk_backend",
)  # fmt: skip
LOGGING_KEYS = ("log_level", "formatter", "configure_logging", "pylogging_config_file")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "NOTSET")


def as_plain(value: Any) -> Any:
    """A config object (a dataclass, or what has `model_dump`) as a dict of what is not at its default; else the value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {field.name: (getattr(value, field.name), field) for field in dataclasses.fields(value)}
        return {name: each for name, (each, field) in given.items() if each is not None and each != _default_of(field)}
    dump = getattr(value, "model_dump", None)
    return dump(exclude_defaults=True) if callable(dump) else value


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def normalise(args: Any) -> None:
    """Bring the values of a dataclass of settings to their plain forms: objects as dicts, paths as text, None as the default of
    a setting that always has an object."""
    for field in dataclasses.fields(args):
        value, check = getattr(args, field.name), field.metadata["check"]
        if value is None and callable(field.default_factory):
            setattr(args, field.name, field.default_factory())
        elif value is None and field.name == "seed":  # older releases of vLLM had None there
            args.seed = field.default
        elif isinstance(value, os.PathLike):
            setattr(args, field.name, os.fspath(cast("os.PathLike[str]", value)))
        elif check.is_object and not is_mapping(value):
            setattr(args, field.name, as_plain(value))


def check_keys(setting: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise a ConfigError for a key that an object does not have."""
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known, "{}", f"known: {', '.join(sorted(known))}")
            raise ConfigError(f"{setting} has {key!r}, which is not known; {hint}", setting=setting)


def attention_backend(asked: str | None, given: Mapping[str, Any] | None) -> str | None:
    """The backend that `attention_backend` or `attention_config` names.
    Raises ConfigError: they name two, or the object has a key that is not known."""
    values = {name: value for name, value in (given or {}).items() if value is not None}
    check_keys("attention_config", values, (*ATTENTION_KEYS, *ATTENTION_KEYS_WITHOUT_EFFECT))
    for name in values.keys() - set(ATTENTION_KEYS):
        logger.info("attention_config.%s has no effect: %s", name, _KERNELS)
    backend = values.get("backend")
    if backend is None:
        return asked
    name = str(getattr(backend, "name", backend))  # a member of vLLM's enumeration has the name
    if asked not in (None, "auto", name):
        message = f"attention_backend={asked!r} and attention_config.backend={name!r} are one setting: give one of them"
        raise ConfigError(message, setting="attention_config")
    return name


def apply_logging(given: Mapping[str, Any]) -> None:
    """Write the log as `logging_config` says, in this process and its children.
    Raises ConfigError: a key or a value that is not known."""
    check_keys("logging_config", given, LOGGING_KEYS)
    allowed = {"log_level": LOG_LEVELS, "formatter": ("text", "json"), "configure_logging": (True, False)}
    values = {name: value for name, value in given.items() if value is not None}
    if isinstance(level := values.get("log_level"), str):
        values["log_level"] = level.upper()
    for name, words in allowed.items():
        if name in values and values[name] not in words:
            message = f"logging_config.{name}={values[name]!r} is not one of {', '.join(map(str, words))}"
            raise ConfigError(message, setting="logging_config")
    if values.get("configure_logging") is False:
        leave_logging_alone()
        return
    if "pylogging_config_file" in values:
        use_log_config(str(values["pylogging_config_file"]))
    if "log_level" in values:
        level = values["log_level"]
        use_log_level("DEBUG" if level == "NOTSET" else level)
    if "formatter" in values:
        use_log_format(values["formatter"])
