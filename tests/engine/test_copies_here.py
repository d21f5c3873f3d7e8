"""Hybrid and external load balancing: which of a model's copies an engine has, and under which numbers it tells of them."""

import asyncio
import dataclasses
from typing import Any

import pytest
from tests.engine.test_async_llm import collect, sampling
from tests.engine.test_data_parallel import copies_config
from tests.engine.test_weight_updates import SETTINGS, connected, fresh, send, tensors_of
from tests.engine.test_weight_updates import tokens_of as weight_tokens
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM
from quire.distributed.weight_transfer import TrainerGroup
from quire.engine.async_llm import AsyncLLM
from quire.engine.copies_here import CopiesHere, copies_here, copies_of_nodes
from quire.engine.settings import EngineSettings
from quire.errors import ConfigError
from quire.metrics.prometheus import PrometheusExposition, cache_info


def here(**given: Any) -> CopiesHere:
    names = {f"data_parallel_{name}": value for name, value in given.items()}
    return copies_here(EngineSettings(**names))


def test_settings_of_load_balancing_give_the_copies_of_an_engine() -> None:
    assert here() == CopiesHere(1)
    assert here(size=3) == here(size=3, size_local=3) == CopiesHere(3)
    assert here(size=4, rank=2) == here(size=4, rank=2, external_lb=True, size_local=1) == CopiesHere(1, 2)
    assert here(size=4, size_local=1) == CopiesHere(4, 0, 3) and here(size=4, size_local=1).on_this_host == 1
    assert here(size=4, size_local=0) == CopiesHere(4, 0, 4)
    assert here(size=8, size_local=2, start_rank=6) == CopiesHere(2, 6)
    assert here(size=8, size_local=2, hybrid_lb=True) == CopiesHere(2)


def test_nodes_have_whole_copies_in_their_order() -> None:
    sizes = {"data_parallel_size": 6, "nnodes": 2, "master_addr": "10.0.0.1", "master_port": 7}
    nodes = [copies_of_nodes(EngineSettings(node_rank=rank, **sizes)) for rank in (0, 1)]
    assert [copies_here(node) for node in nodes] == [CopiesHere(6, 0, 3), CopiesHere(3, 3)]
    places = {(node.data_parallel_address, node.data_parallel_rpc_port, node.nnodes) for node in nodes}
    assert places == {("10.0.0.1", 7, 1)}
    one = EngineSettings(tensor_parallel_size=2, nnodes=2)
    assert copies_of_nodes(one) is one  # its ranks are divided


@pytest.mark.parametrize(
    ("given", "setting", "message"),
    [
        ({"size": 2, "rank": 2}, "rank", "below that"),
        ({"size": 2, "external_lb": True}, "rank", "needs it"),
        ({"size": 4, "rank": 1, "size_local": 2}, "size_local", "1 copy"),
        ({"size": 4, "rank": 1, "hybrid_lb": True}, "hybrid_lb", "does not go with"),
        ({"size": 4, "hybrid_lb": True}, "size_local", "need it"),
        ({"size": 4, "size_local": 5}, "size_local", "it is 5, of data_parallel_size=4"),
        ({"size": 4, "size_local": 2, "start_rank": 3}, "start_rank", "not among"),
        ({"size": 4, "size_local": 0, "hybrid_lb": True}, "size_local", "not among"),
    ],
)
def test_settings_that_contradict_one_another_are_refused_by_name(
    given: dict[str, Any], setting: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        here(**given)
    assert error.value.setting == f"data_parallel_{setting}"


def test_figures_have_the_numbers_that_copies_have_among_those_of_all_engines() -> None:
    async def main() -> None:
        config = copies_config()
        parallel = dataclasses.replace(config.parallel, data_parallel_start=4)
        engine = AsyncLLM.from_engine_config(dataclasses.replace(config, parallel=parallel))
        try:
            await collect(engine.generate([5, 6], sampling(max_tokens=3), "a", data_parallel_rank=1))
            text = PrometheusExposition(engine.metrics, cache_info(engine.config.cache)).exposition()[0].decode()
        finally:
            engine.shutdown()
        assert 'quire:generation_tokens_total{engine="5",model_name="hash"} 3.0' in text
        assert 'quire:generation_tokens_total{engine="4",model_name="hash"} 0.0' in text
        assert 'engine="0"' not in text

    asyncio.run(main())


@pytest.mark.exhaustive
def test_a_trainer_s_weights_reach_the_ranks_of_all_copies(tmp_path_factory: pytest.TempPathFactory) -> None:
    old, new = (
        make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"), tokenizer=False, seed=seed)
        for seed in (0, 1)
    )
    expected = fresh(new)
    with LLM(str(old), data_parallel_size=2, **SETTINGS) as llm:
        group, tensors = connected(llm, 2), tensors_of(new)
        llm.start_weight_update()
        sender = send(group, tensors)
        llm.update_weights({"update_info": TrainerGroup.update_info(tensors)})
        sender.join()
        llm.finish_weight_update()
        for _ in range(2):
            assert weight_tokens(llm) == expected
        llm.shutdown_weight_transfer_engine()
        group.close()
