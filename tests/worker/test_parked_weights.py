"""Weights that wait in host memory: what a model reaches is parked, and is the same afterwards."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.test_engine_parity import make_prompts
from tests.worker.test_end_to_end import TinyEngine, greedy_requests, run

from quire.distributed.communicator import SingleRank
from quire.platforms.cpu import CpuRuntime
from quire.worker.parked_weights import ParkedWeights, pool_of, tensors_of

RUNTIME: Any = SimpleNamespace(
    device=lambda: torch.device("cpu"), pinned=lambda tensor: tensor.clone(), synchronize=lambda: None
)


class Model:
    """Tensors in every kind of place."""

    def __init__(self) -> None:
        self.weight = torch.arange(6.0).reshape(2, 3)
        self.alias = self.weight[1]
        self.by_name = {"layers": [torch.ones(3), (torch.zeros(2),)]}
        hidden = torch.full((4,), 7.0)
        self.closure = lambda: hidden
        self.communicator = SingleRank()
        self.communicator.buffer = torch.ones(5)  # type: ignore[attr-defined]


def test_every_tensor_of_a_model_is_parked_and_comes_back_with_its_views():
    model = Model()
    parked = ParkedWeights(model, RUNTIME)
    assert parked.num_bytes == 4 * (6 + 3 + 2 + 4)
    held = [model.weight, model.by_name["layers"][0], model.closure()]
    assert all(not tensor.untyped_storage().nbytes() for tensor in held)
    assert model.communicator.buffer.untyped_storage().nbytes(), "what other ranks may read stays"  # type: ignore[attr-defined]
    parked.restore()
    assert model.weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    model.weight[1] += 1
    assert model.alias.tolist() == [4, 5, 6]
    assert model.closure().tolist() == [7] * 4
    assert model.by_name["layers"][1][0].tolist() == [0, 0]


def test_objects_that_refer_to_one_another_are_walked_once():
    loop: dict[str, Any] = {"tensor": torch.ones(1)}
    loop["self"] = loop
    assert len(list(tensors_of([loop, loop]))) == 1


def test_an_engine_whose_weights_were_parked_gives_the_same_tokens(llama: Path, monkeypatch: pytest.MonkeyPatch):
    prompts = make_prompts()
    engine = TinyEngine(llama)
    expected = run(engine, greedy_requests(prompts))
    monkeypatch.setattr(CpuRuntime, "is_host", False)
    worker: Any = engine.executor._worker  # type: ignore[attr-defined]
    worker.sleep_pool = pool_of(worker.runtime)
    engine.executor.sleep(1)
    assert worker.sleep_pool.usage()["weights"] > 10_000
    engine.executor.sleep(1)
    engine.executor.wake_up(["weights"])
    engine.executor.wake_up(["kv_cache"])
    engine.scheduler.reset_prefix_cache()
    assert run(engine, greedy_requests(prompts)) == expected
