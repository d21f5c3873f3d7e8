"""The parts that a model runner is put together from, each a class that a platform may replace by a subclass of its own.

They are resolved once, when a runner is made, and nothing else makes one. So a device whose rows, inputs, sampler or graphs
differ needs neither a runner of its own nor a changed one. Knows classes; knows nothing of what they do.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError, did_you_mean
from quire.plugins.registry import import_class
from quire.sample.sampler import Sampler
from quire.worker.batch_state import BatchState
from quire.worker.device_inputs import DeviceInputs
from quire.worker.input_prep import InputPreparation
from quire.worker.page_store import PageStore
from quire.worker.step_graphs import StepGraphs


@dataclasses.dataclass(frozen=True)
class RunnerComponents:
    """One class for each part; a part's constructor takes what its base takes.

    Attributes:
        batch_state: the rows of running requests, on the host.
        input_preparation: a step's inputs, in buffers of the host.
        device_inputs: their way to a device that works beside the host; `ModelRunner` has none.
        page_store: the tensors behind pages, and copies of pages.
        sampler: from logits to tokens.
        step_graphs: which steps are captured, and when; `ModelRunner` has none.
    """

    batch_state: type[BatchState] = BatchState
    input_preparation: type[InputPreparation] = InputPreparation
    device_inputs: type[DeviceInputs] = DeviceInputs
    page_store: type[PageStore] = PageStore
    sampler: type[Sampler] = Sampler
    step_graphs: type[StepGraphs] = StepGraphs


def resolve_components(paths: Mapping[str, str]) -> RunnerComponents:
    """The usual parts, but for those that `Platform.runner_components` names.

    Raises:
        ConfigError: a name that is none of the fields, a path that cannot be imported, or a class that is no subclass.
    """
    usual: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(RunnerComponents)}
    found: dict[str, Any] = {}
    for name, path in paths.items():
        if name not in usual:
            message = f"runner_components() names {name!r}{did_you_mean(name, usual)}; a runner has {', '.join(usual)}"
            raise ConfigError(message, setting="device")
        found[name] = import_class(path, "device", usual[name], f"runner_components()[{name!r}]")
    return RunnerComponents(**found)
