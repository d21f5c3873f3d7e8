"""Experts that move between ranks to where the load is even: the same tokens before and after, and a busy one has two places."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.distributed.thread_ranks import on_ranks
from tests.distributed.whole_engines import SETTINGS, tokens
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM
from quire.config.engine import EplbConfig
from quire.distributed.communicator import Communicator
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError
from quire.layers.expert_balance import EMPTY, ExpertPlaces, deal_places, evenness
from quire.layers.parallel import ParallelPlan
from quire.worker.expert_balancing import ExpertBalancing
from quire.worker.worker import Worker


class PlacedWorker(Worker):
    """Tells by which loads experts were dealt, and where they are."""

    def load_model(self) -> None:
        super().load_model()
        self.loads: list[list[int]] = []
        for mixture in self.runner.model.mixtures():
            mixture.places.read_loads = functools.partial(self._note, mixture.places.read_loads)

    def _note(self, read: Callable[[], list[int]]) -> list[int]:
        self.loads.append(read())
        return self.loads[-1]

    def places(self) -> tuple[list[list[int]], list[list[int]]]:
        """The loads of all deals, layer after layer, and of each layer the expert of each place."""
        return self.loads, [list(mixture.places.now) for mixture in self.runner.model.mixtures()]


@given(st.data())
def test_every_expert_has_a_place_and_no_rank_more_than_it_has(data: st.DataObject) -> None:
    ranks, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 16))
    room = -(-(experts + data.draw(st.integers(0, 5))) // ranks)
    loads = data.draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    now = [*range(experts), *[EMPTY] * (room * ranks - experts)]
    places = deal_places(loads, now, ranks)
    assert len(places) == len(now) and set(places) == set(range(experts))
    again = deal_places(loads, places, ranks)
    assert [sorted(again[i * room : (i + 1) * room]) for i in range(ranks)] == [
        sorted(places[i * room : (i + 1) * room]) for i in range(ranks)
    ]
    assert again == places  # who stays on a rank does not move


def test_a_busy_expert_gets_a_copy_on_the_other_rank() -> None:
    places = deal_places([90, 10, 10, 10], [0, 1, EMPTY, 2, 3, EMPTY], 2)
    assert places.count(0) == 2 and 0 in places[:3] and 0 in places[3:]
    assert evenness([90, 10, 10, 10], places, 2) > 0.85 > 0.7 > evenness([90, 10, 10, 10], [0, 1, 2, 3], 2)


class CountedLayer:
    """Stands for a layer whose experts get one token a step."""

    def __init__(self, number: int, dealt: list[tuple[int, int]]) -> None:
        self.places, self._number, self._dealt, self.load = self, number, dealt, 0

    def read_loads(self) -> list[int]:
        load, self.load = self.load, 0
        return [load]

    def forget_loads(self) -> None:
        self.load = 0

    def balance(self, loads: list[int], name: str) -> None:
        self._dealt.append((self._number, *loads))


@pytest.mark.parametrize(("window", "counted"), [(4, 4), (5, 5), (9, 5)])
def test_layers_are_dealt_one_a_step_by_the_load_of_the_window(window: int, counted: int) -> None:
    dealt = list[tuple[int, int]]()
    layers: Any = [CountedLayer(number, dealt) for number in range(3)]
    runtime: Any = SimpleNamespace(synchronize=lambda: None)
    balancing = ExpertBalancing(EplbConfig(window_size=window, step_interval=5), layers, runtime)
    seen = []
    for _ in range(14):
        balancing.begin_step()
        seen.append(len(dealt))
        for layer in layers:
            layer.load += 1
    assert seen == [0] * 5 + [1, 2, 3, 3, 3] + [4, 5, 6, 6]
    assert dealt == [(number, counted) for number in range(3)] * 2


@pytest.mark.parametrize(("size", "redundant"), [(2, 0), (2, 2), (3, 3)])
def test_weights_follow_their_experts_and_tokens_find_them(size: int, redundant: int) -> None:
    weights = [torch.randn(6, 5, 3), torch.randn(6, 7).bfloat16()]  # of all experts
    ids_TK = torch.randint(0, 6, (40, 2), generator=torch.Generator().manual_seed(1)) // 3  # two experts are busy
    counted = torch.tensor([30])

    def work(ranks: Communicator) -> tuple[list[int], torch.Tensor]:
        plan = ParallelPlan(size, ranks.rank, expert_parallel=True, redundant=redundant)
        places, own = ExpertPlaces(6, plan, ranks, torch.device("cpu")), plan.experts(6)
        mine = [
            torch.cat((each[own], each.new_zeros(places.room - len(each[own]), *each.shape[1:]))) for each in weights
        ]
        places.as_loaded()
        found_TK = ids_TK
        for loads in ([1] * 6, None, [1, 1, 1, 9, 9, 1]):
            if loads is None:
                loads = places.read_loads()
                assert loads == (ids_TK[:30].flatten().bincount(minlength=6) * size).tolist()
            places.deal(loads, mine)
            for place, expert in enumerate(places.now[places.first : places.first + places.room]):
                assert all(torch.equal(have[place], every[expert]) for have, every in zip(mine, weights, strict=True))
            found_TK = places.find(ids_TK, counted)
            assert torch.equal(torch.tensor(places.now)[found_TK.long()], ids_TK)
            assert {*found_TK.flatten().tolist()} == {place for place, expert in enumerate(places.now) if expert < 2}
        return places.now, found_TK

    (first, found), *others = on_ranks(size, work)
    assert all(now == first and torch.equal(each, found) for now, each in others)


def skewed(path: Path) -> Path:
    """A mixture whose router chooses one of the first two experts of each layer."""
    make_tiny_model("Qwen3MoeForCausalLM", path, num_experts_per_tok=1)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[0] *= 20
            tensor[1] = -tensor[0]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["allgather_reducescatter", "all_to_all"])
def test_experts_move_between_steps_and_tokens_stay_the_same(tmp_path: Path, backend: str) -> None:
    path = skewed(tmp_path)
    with LLM(str(path), **SETTINGS) as alone:
        expected = tokens(alone)
    settings: dict[str, Any] = {
        "tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True, "all2all_backend": backend,
        "eplb_config": {"step_interval": 10, "window_size": 8, "num_redundant_experts": 2},
        "worker_cls": "tests.distributed.test_expert_balance:PlacedWorker",
    }  # fmt: skip
    with LLM(str(path), **settings, **SETTINGS) as llm:
        _, start = llm.collective_rpc("places")[0]
        assert tokens(llm) == tokens(llm) == tokens(llm) == expected
        one, other = llm.collective_rpc("places")
        assert one == other
        loads, places = one
        assert len(loads) % len(places) == 0 and len(loads) >= len(places)
        last = loads[-len(places) :]
        for load, before, after in zip(last, start, places, strict=True):
            assert len(after) == len(before) == len(load) + 2 and set(after) == set(range(len(load)))
            assert after.count(load.index(max(load))) == 2
            assert evenness(load, after, 2) > evenness(load, range(len(load)), 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs enable_expert_parallel and several ranks"),
        ({"enable_expert_parallel": True}, "needs enable_expert_parallel and several ranks"),
        ({"enable_eplb": False, "eplb_config": {"window_size": 4}}, "needs enable_eplb"),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2, "eplb_config": {"windows": 4}}, "'windows'"),
        (
            {"enable_expert_parallel": True, "tensor_parallel_size": 2, "eplb_config": {"step_interval": 0}},
            "step_interval",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    path = make_tiny_model("Qwen3MoeForCausalLM", tmp_path, tokenizer=False)
    with pytest.raises(ConfigError, match=message):
        EngineArgs(model=str(path), **{"enable_eplb": True, **settings}, **SETTINGS).create_engine_config()
