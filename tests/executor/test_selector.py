"""Which executor a setting means, and that asking loads no torch."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from tests.oracles.hash_model import HashExecutor

from quire.config import ParallelConfig
from quire.errors import ConfigError
from quire.executor import executor_class, make_executor
from quire.executor.multiproc import MultiprocExecutor
from quire.executor.uniproc import UniprocExecutor


@dataclasses.dataclass
class OnlyParallel:
    """The one part of a configuration that the choice reads."""

    parallel: ParallelConfig


def config_with(backend: Any, size: int = 1) -> Any:
    return OnlyParallel(ParallelConfig(distributed_executor_backend=backend, tensor_parallel_size=size))


@pytest.mark.parametrize("backend", [None, "uni"])
def test_the_default_is_one_worker_in_this_process(backend: str | None) -> None:
    assert executor_class(config_with(backend)) is UniprocExecutor


@pytest.mark.parametrize(("backend", "size"), [(None, 2), ("mp", 2), ("mp", 1)])
def test_more_workers_than_one_get_a_process_each(backend: str | None, size: int) -> None:
    assert executor_class(config_with(backend, size)) is MultiprocExecutor


def test_one_worker_cannot_be_two_ranks() -> None:
    with pytest.raises(ConfigError, match="'uni' runs one worker, but tensor_parallel_size=2"):
        executor_class(config_with("uni", 2))


@pytest.mark.parametrize(
    "backend", [HashExecutor, "tests.oracles.hash_model:HashExecutor", "tests.oracles.hash_model.HashExecutor"]
)
def test_a_class_or_its_path_is_taken(backend: Any) -> None:
    assert executor_class(config_with(backend)) is HashExecutor


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("threads", "'threads' is unknown: use None"),
        ("no.such:Thing", "cannot be imported"),
        ("json:JSONDecoder", "not a subclass"),
        (dict, "not a subclass"),
    ],
)
def test_what_cannot_serve_is_refused_with_the_setting_and_a_way_out(backend: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_executor(config_with(backend))
    assert caught.value.setting == "distributed_executor_backend"


def test_the_interface_and_the_selector_load_no_torch() -> None:
    modules = "quire.executor, quire.executor.uniproc, quire.executor.multiproc, quire.executor.worker_process"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
