"""Settings of expert parallelism load balancing, called as in vLLM."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire.config.checks import FLAG, read_object, setting, whole
from quire.errors import ConfigError

SETTING = "eplb_config"


@dataclasses.dataclass(frozen=True)
class EplbConfig:
    """How often experts are dealt anew, and by which load.

    Attributes:
        window_size: the last so many steps before are counted.
        num_redundant_experts: places beyond one for each expert, on all ranks together.
    """

    window_size: int = setting(1000, whole(1))
    step_interval: int = setting(3000, whole(1))
    num_redundant_experts: int = setting(0, whole(0))
    log_balancedness: bool = setting(False, FLAG)


def read_eplb_config(is_enabled: bool, given: Mapping[str, Any], has_ranks: bool) -> EplbConfig | None:
    """The settings; None where experts stay.
    Raises ConfigError: a key or a value that is none, or there are no ranks that have whole experts."""
    if not is_enabled:
        if given:
            raise ConfigError.of(SETTING, "it needs enable_eplb.")
        return None
    if not has_ranks:
        text = "experts are balanced over ranks that have some of them whole: it needs enable_expert_parallel and several ranks."
        raise ConfigError.of("enable_eplb", text)
    return read_object(EplbConfig, SETTING, given)
