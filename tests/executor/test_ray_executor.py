"""Ranks on a Ray cluster of two nodes: the tokens of one process, and an error when one is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.whole_engines import SETTINGS, tokens
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM
from quire.config import ParallelConfig
from quire.errors import ConfigError, EngineError

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with room for a rank each, on this host."""
    pytest.importorskip("ray")
    os.environ.update(RAY_worker_niceness="0")  # else ranks starve beside other tests
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster
    import ray

    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def test_ranks_on_two_nodes_give_the_tokens_of_one_process_and_one_that_is_killed_is_told(
    cluster: Any, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with LLM(str(llama), **SETTINGS) as alone:
        expected = tokens(alone)
    with LLM(str(llama), tensor_parallel_size=2, distributed_executor_backend="ray", **SETTINGS) as llm:
        assert tokens(llm) == tokens(llm) == expected
        told = llm.llm_engine.explain()
        assert told["executor"] == "ray" and len({rank["pid"] for rank in told["ranks"]}) == 2
        os.kill(told["ranks"][1]["pid"], signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 1"):
            while True:
                tokens(llm)
    with LLM(str(llama), tensor_parallel_size=2, distributed_executor_backend="ray", **SETTINGS) as again:
        assert tokens(again) == expected  # its places were given back


def test_stages_on_two_nodes_give_the_tokens_of_one_process(
    cluster: Any, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with LLM(str(llama), **SETTINGS) as alone:
        expected = tokens(alone)
    with LLM(str(llama), pipeline_parallel_size=2, distributed_executor_backend="ray", **SETTINGS) as llm:
        assert tokens(llm) == tokens(llm) == expected


def test_what_ray_has_no_room_for_is_refused(cluster: Any, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    from quire.executor.ray import initialize_ray_cluster

    with pytest.raises(ConfigError, match="the Ray cluster"):
        initialize_ray_cluster(ParallelConfig(tensor_parallel_size=64))
