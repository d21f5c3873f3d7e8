"""Ranks of one engine on two hosts, here processes of this one: they join, give one process's tokens, may be lost."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.whole_engines import SETTINGS, a_host, free_port, tokens
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM
from quire.engine.arg_utils import EngineArgs
from quire.entrypoints.cli.main import main as quire
from quire.errors import ConfigError, EngineError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def words(port: int, **sizes: int) -> list[str]:
    flags: dict[str, Any] = {"nnodes": 2, "master-port": port, "dtype": "float32", "max-model-len": 128, **sizes}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def a_node(model: Path, port: int, **sizes: int) -> "contextlib.AbstractContextManager[subprocess.Popen[bytes]]":
    """Node 1, by the command that a user gives there."""
    options = ["--node-rank", "1", "--headless", "--skip-tokenizer-init"]
    return a_host("quire", "serve", str(model), *words(port, **sizes), *options)


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    with LLM(str(llama), **SETTINGS) as alone:
        return tokens(alone)


def test_two_nodes_of_two_ranks_give_the_tokens_of_one_process_and_end_together(
    llama: Path, expected: list[list[int]]
) -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with a_node(llama, port := free_port(), **{name.replace("_", "-"): size for name, size in sizes.items()}) as node:
        with LLM(str(llama), nnodes=2, master_port=port, **sizes, **SETTINGS) as llm:
            assert tokens(llm) == tokens(llm) == expected
            assert len({rank["pid"] for rank in llm.llm_engine.explain()["ranks"]}) == 4
        assert node.wait(60) == 0


@pytest.mark.exhaustive
def test_a_node_that_is_lost_is_named_and_one_that_comes_again_serves_the_next_engine(
    llama: Path, expected: list[list[int]]
) -> None:
    port, sizes = free_port(), {"tensor-parallel-size": 2}
    both = {"nnodes": 2, "master_port": port, "tensor_parallel_size": 2, **SETTINGS}
    with a_node(llama, port, **sizes) as node, LLM(str(llama), **both) as llm:
        assert tokens(llm) == expected
        node.kill()
        with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) on 127.0.0.1 has ended"):
            while True:
                tokens(llm)
    with a_node(llama, port, **sizes) as node:
        with LLM(str(llama), **both) as llm:
            rank = llm.llm_engine.explain()["ranks"][1]["pid"]
            os.kill(rank, signal.SIGKILL)
            with pytest.raises(EngineError, match="rank 1"):
                while True:
                    tokens(llm)
        # The node lives, and joins the next one.
        with LLM(str(llama), **both) as llm:
            assert tokens(llm) == expected
        assert node.wait(60) == 0


def test_a_node_that_does_not_come_is_missed_in_words(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENGINE_READY_TIMEOUT_S", "0.05")
    with pytest.raises(EngineError, match="node 1 has not joined within"):
        LLM(str(llama), nnodes=2, master_port=free_port(), tensor_parallel_size=2, **SETTINGS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nnodes": 2}, "cannot be divided among 2 hosts"),
        ({"nnodes": 2, "node_rank": 2, "tensor_parallel_size": 2}, "node_rank: it is 2"),
        ({"nnodes": 2, "data_parallel_size": 3}, "data_parallel_size=3 copies cannot be divided among 2 hosts"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, "not 'ray'"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(llama: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(model=str(llama), **settings, **SETTINGS).create_engine_config()


def test_an_engine_on_another_node_and_a_first_node_without_one_are_refused(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="the engine is on node 0"):
        LLM(str(llama), nnodes=2, node_rank=1, tensor_parallel_size=2, **SETTINGS)
    assert quire(["serve", str(llama), *words(free_port()), "--tensor-parallel-size", "2", "--headless"]) != 0
    assert "leave --headless out" in capsys.readouterr().err
