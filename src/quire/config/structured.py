"""Settings of structured outputs."""

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError

BACKENDS = ("auto", "xgrammar", "guidance")
_PACKAGES = {"xgrammar": ("xgrammar", "xgrammar"), "guidance": ("llguidance", "structured")}


@dataclasses.dataclass(frozen=True)
class StructuredOutputsConfig:
    """What holds for all answers of a wanted form; the names are vLLM's, but for the last.

    Attributes:
        backend: who makes the masks; `auto` is llguidance.
        disable_any_whitespace, disable_additional_properties: as if every request had said so.
        enable_in_reasoning: the form holds while a model thinks, too.
        disable_jump_forward: tokens that a form leaves no choice about are drawn one a step, too; None: where a device works
            beside the host.
    """

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False
    disable_jump_forward: bool | None = None


def read_structured_outputs_config(
    given: Mapping[str, Any] | None, old_backend: str | None = None
) -> StructuredOutputsConfig:
    """The settings as `--structured-outputs-config` has them; `old_backend` is `--guided-decoding-backend`.

    Raises:
        ConfigError: an unknown key or value, or a backend whose package is not installed.
    """
    setting = "structured_outputs_config"
    values = dict(given or {})
    if old_backend is not None:
        setting = "guided_decoding_backend" if "backend" not in values else setting
        values.setdefault("backend", old_backend)
    if values.get("reasoning_parser") in ("", None):
        values.pop("reasoning_parser", None)
    known = {field.name: field.default for field in dataclasses.fields(StructuredOutputsConfig)}
    if unknown := sorted(set(values) - set(known)):
        raise ConfigError(
            f"structured_outputs_config has {', '.join(map(repr, unknown))}; allowed: {', '.join(known)} "
            f"(--reasoning-parser is a setting of its own)",
            setting=setting,
        )
    for name, value in values.items():
        if name != "backend" and not isinstance(value, bool):
            raise ConfigError(f"structured_outputs_config.{name}={value!r} must be true or false", setting=setting)
    config = StructuredOutputsConfig(**values)
    if config.backend not in BACKENDS:
        raise ConfigError.of(setting, f"backend={config.backend!r} is not one of {', '.join(BACKENDS)}")
    if config.backend != "auto":
        package, extra = _PACKAGES[config.backend]
        if importlib.util.find_spec(package) is None:
            raise ConfigError.of(
                setting,
                f"backend={config.backend!r} needs the package {package}, which is not installed: "
                f"pip install 'quire[{extra}]'",
            )
    return config
