"""Experts that copies on several hosts share, one of them a process of this one: one process's tokens, behind losses too."""

import concurrent.futures
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.test_expert_balance import skewed
from tests.distributed.whole_engines import SETTINGS, a_host, free_port, tokens

from quire import LLM
from quire.processes import family


def a_node(model: Path, port: int, count: int, first: int, *flags: str) -> "contextlib.AbstractContextManager[Any]":
    """A host with copies, by the command that a user gives there."""
    sizes = {"data-parallel-size-local": count, "data-parallel-start-rank": first, "data-parallel-rpc-port": port}
    return a_headless(model, *[word for name, size in sizes.items() for word in (f"--{name}", str(size))], *flags)


def a_headless(model: Path, *flags: str) -> "contextlib.AbstractContextManager[Any]":
    """A host that joins, as its flags say."""
    words = ["--dtype", "float32", "--max-model-len", "128", "--skip-tokenizer-init", "--enable-expert-parallel"]
    words += ["--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(8 << 20)]
    return a_host("quire", "serve", str(model), "--headless", *words, *flags)


def head(model: Path, port: int, size: int, here: int, **settings: Any) -> LLM:
    sizes = {"data_parallel_size": size, "data_parallel_size_local": here, "data_parallel_rpc_port": port}
    return LLM(str(model), enable_expert_parallel=True, **{**sizes, **SETTINGS, **settings})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skewed(tmp_path_factory.mktemp("skewed"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with LLM(str(model), **SETTINGS) as alone:
        return tokens(alone)


@pytest.mark.exhaustive
def test_two_hosts_of_one_copy_each_give_one_process_s_tokens_and_end_together(
    model: Path, expected: list[list[int]]
) -> None:
    nodes = {"data_parallel_size": 2, "nnodes": 2, "master_port": free_port()}
    words = [word for name, size in nodes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    with a_headless(model, *words, "--node-rank", "1") as node:
        with LLM(str(model), enable_expert_parallel=True, **nodes, **SETTINGS) as llm:
            assert tokens(llm) == tokens(llm) == expected
            assert llm.llm_engine.config.parallel.data_parallel_elsewhere == 1
            llm.sleep(1)
            llm.wake_up()
            assert tokens(llm) == expected
        assert node.wait(60) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "here", "settings"),
    [
        (3, 1, {}),
        (2, 0, {}),
        (2, 1, {"tensor_parallel_size": 2}),
        (2, 1, {"all2all_backend": "all_to_all"}),
        (2, 1, {"enable_eplb": True, "eplb_config": '{"step_interval": 10, "window_size": 8}'}),
    ],
)
def test_hosts_share_experts_in_any_number_and_way(
    model: Path, expected: list[list[int]], size: int, here: int, settings: dict[str, Any]
) -> None:
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags = [word for word in flags if word != "True"]
    settings = {name: json.loads(value) if name == "eplb_config" else value for name, value in settings.items()}
    with a_node(model, port := free_port(), size - here, here, "-dp", str(size), *flags) as node:
        with head(model, port, size, here, **settings) as llm:
            assert tokens(llm) == tokens(llm) == expected
        assert node.wait(60) == 0


@pytest.mark.exhaustive
def test_whichever_copy_or_host_is_lost_all_start_again_together(model: Path, expected: list[list[int]]) -> None:
    port, flags = free_port(), ("-dp", "2")
    with contextlib.ExitStack() as stack, head_in_thread(model, port) as starting:
        node = stack.enter_context(a_node(model, port, 1, 1, *flags))
        llm = stack.enter_context(starting())
        assert tokens(llm) == expected
        client: Any = llm.llm_engine._client
        here = client.client.clients[0]
        for victim in ("core here", "core there", "host", "silent host"):
            before = here.client.pid
            match victim:
                case "core here":
                    os.kill(before, signal.SIGKILL)
                case "core there":
                    os.kill(family(node.pid)[-1].pid, signal.SIGKILL)
                case "host":
                    node.kill()
                    node = stack.enter_context(a_node(model, port, 1, 1, *flags))
                case _:
                    node.send_signal(signal.SIGSTOP)
                    threading.Timer(12, node.send_signal, (signal.SIGCONT,)).start()
            while here.client.pid == before:
                assert tokens(llm) == expected, victim
            assert tokens(llm) == expected, victim
        llm.shutdown()
        assert node.wait(60) == 0


@contextlib.contextmanager
def head_in_thread(model: Path, port: int) -> Iterator[Callable[[], LLM]]:
    """A head node that is started at once, and waits for its hosts."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool.submit(head, model, port, 2, 1, recovery=True).result


@pytest.mark.exhaustive
def test_a_host_that_is_lost_while_it_starts_is_waited_for(model: Path, expected: list[list[int]]) -> None:
    port, flags = free_port(), ("-dp", "2")
    with contextlib.ExitStack() as stack, head_in_thread(model, port) as starting:
        with a_node(model, port, 1, 1, *flags) as node:
            while len(family(node.pid)) < 2:  # until its core starts
                time.sleep(0.01)
        node = stack.enter_context(a_node(model, port, 1, 1, *flags))
        llm = stack.enter_context(starting())
        assert tokens(llm) == expected
        llm.shutdown()
        assert node.wait(60) == 0
