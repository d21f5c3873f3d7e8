"""IO processors: an application's data in, and its own answers out, in place of prompts and a pooler's numbers.

A plugin of the group `quire.io_processors`, which `io_processor_plugin` names. It runs in the frontend, for `LLM.encode` and for
`POST /pooling` with `data`. Knows no route and no tensor.
"""

import abc
from collections.abc import Sequence
from typing import Any, cast

from quire.config import EngineConfig
from quire.errors import ConfigError, did_you_mean, refusing
from quire.guards import is_dict
from quire.inputs import PromptType
from quire.outputs import PoolingOutput, PoolingRequestOutput
from quire.plugins import IO_PROCESSORS_GROUP, find_plugins, load
from quire.plugins.registry import import_path
from quire.pooling_params import PoolingParams

SETTING = "io_processor_plugin"
Pooled = PoolingRequestOutput[PoolingOutput]


class IOProcessor(abc.ABC):
    """Base of a plugin's processor. One instance serves one frontend; requests may call it from several threads."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def parse_data(self, data: Any) -> Any:
        """Check what a client sent, and give what `pre_process` takes. Raise ValueError for data that cannot be used: its
        message is the client's answer."""
        return data

    def merge_pooling_params(self, params: PoolingParams | None) -> PoolingParams:
        """The parameters of the prompts, from those that the client gave."""
        return params or PoolingParams()

    @abc.abstractmethod
    def pre_process(self, data: Any, request_id: str | None = None) -> PromptType | Sequence[PromptType]:
        """The prompts that stand for the data. Raises ValueError as `parse_data` does."""

    @abc.abstractmethod
    def post_process(self, outputs: Sequence[Pooled], request_id: str | None = None) -> Any:
        """The answer, from the pooler's output for each prompt, in their order. A server writes it as JSON."""


def load_io_processor(config: EngineConfig) -> IOProcessor | None:
    """The processor that `io_processor_plugin` names; None where it names none.

    Raises:
        ConfigError: there is no such plugin, it fails, or the model does not pool.
    """
    name = config.model.io_processor_plugin
    if name is None:
        return None
    plugins = find_plugins(IO_PROCESSORS_GROUP)
    if name not in plugins:
        known = ", ".join(plugins) or "none is installed"
        raise ConfigError.of(SETTING, f"{name!r} is not known{did_you_mean(name, plugins)}; allowed: {known}.")
    if config.model.pooling is None:
        raise ConfigError.of(SETTING, f"{name!r} needs a pooling model, and {config.model.model!r} generates.")
    try:
        found = load(plugins[name])
        processor = (import_path(found) if isinstance(found, str) else found)(config)
    except Exception as error:
        plugins[name].fail(error)
        raise ConfigError.of(SETTING, f"{name!r} failed: {type(error).__name__}: {error}") from error
    if not isinstance(processor, IOProcessor):
        raise ConfigError.of(SETTING, f"{name!r} makes {processor!r}, which is not an IOProcessor.")
    return processor


def prompts_of(processor: IOProcessor, data: Any, request_id: str | None = None) -> list[PromptType]:
    """The prompts of a client's data.

    Raises:
        RequestError: the processor refuses the data.
    """
    with refusing(ValueError, param="data", what="data cannot be used"):
        prompts = processor.pre_process(processor.parse_data(data), request_id)
    is_one = isinstance(prompts, str) or is_dict(prompts)
    if is_one or any(isinstance(item, int) for item in prompts):
        return [cast(PromptType, prompts)]
    return list(cast(Sequence[PromptType], prompts))
