"""What an engine is told about adapters: to load one, to list them, to keep one, to forget one, to read one again."""

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.lora.conftest import PROMPTS, TOLERANCE, request, run, worst_difference
from tests.oracles.peft_adapters import PeftOracle, make_adapter
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, AsyncEngineArgs, AsyncLLM, LoRARequest, SamplingParams
from quire.errors import RequestError
from quire.lora.request import LoRARequest as AsInVllm

SETTINGS = {"dtype": "float32", "enable_lora": True, "max_loras": 2, "max_model_len": 64, "max_logprobs": -1}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(llama, folder / f"a{n}", n, r=4, target_modules="all-linear") for n in range(3)]


def test_the_name_of_vllm_is_the_same_class():
    assert AsInVllm is LoRARequest
    adapter = AsInVllm("a", 3, "/x", load_inplace=True, is_3d_lora_weight=True)
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("a", 3, "/x")


def test_adapters_are_loaded_listed_kept_and_forgotten(llama: Path, adapters: list[Path]):
    llm = LLM(str(llama), **SETTINGS)
    first, second, third = (request(path, number) for number, path in enumerate(adapters, 1))
    assert llm.list_loras() == set()
    assert llm.add_lora(first) and llm.pin_lora(1)
    assert llm.add_lora(second) and llm.list_loras() == {1, 2}
    with pytest.raises(RequestError, match="one place must stay"):
        llm.pin_lora(2)
    llm.add_lora(third)
    assert {each.lora_int_id for each in llm.llm_engine._client.core._preparations.adapters.loaded()} == {1, 3}
    assert llm.remove_lora(1) and not llm.remove_lora(1)
    assert llm.list_loras() == {2, 3}
    with pytest.raises(RequestError, match="add_lora first"):
        llm.pin_lora(1)
    with pytest.raises(RequestError, match=r"adapter_config\.json"):
        llm.add_lora(LoRARequest("none", 9, str(llama)))


def test_what_other_requests_get_while_an_adapter_is_loaded_is_told_by_the_next_step(llama: Path, adapters: list[Path]):
    engine = LLM(str(llama), **SETTINGS).llm_engine
    engine.add_request("other", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=1, ignore_eos=True))
    engine.add_lora(request(adapters[0]))
    (output,) = engine.step()
    assert output.request_id == "other" and output.finished and not engine.has_unfinished_requests()


def test_files_that_have_changed_are_read_again_for_this_and_later_requests(
    llama: Path, adapters: list[Path], tmp_path: Path
):
    path = tmp_path / "changing"
    shutil.copytree(adapters[0], path)
    llm = LLM(str(llama), **SETTINGS)
    adapter, prompt = request(path), list(range(20, 60))
    (before,) = run(llm, [prompt], [adapter])
    shutil.copytree(adapters[1], path, dirs_exist_ok=True)
    (same,) = run(llm, [prompt], [adapter])
    assert same.outputs[0].token_ids == before.outputs[0].token_ids and same.num_cached_tokens == 32
    anew = LoRARequest(adapter.lora_name, 1, adapter.lora_path, load_inplace=True)
    oracle = PeftOracle(llama, path)
    prompts = [prompt, PROMPTS[0]]
    for outputs in (run(llm, prompts, [anew, adapter]), run(llm, prompts, [adapter] * 2)):
        for output in outputs:
            assert worst_difference(output, oracle) < TOLERANCE
    assert outputs[0].lora_request.version == 1 and outputs[0].outputs[0].lora_request.lora_name == "changing"


def test_the_asynchronous_engine_has_the_same_verbs(llama: Path, adapters: list[Path]):
    async def main() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(llama), **SETTINGS))
        try:
            assert await engine.add_lora(request(adapters[0], 1)) and await engine.pin_lora(1)
            assert await engine.list_loras() == {1}
            await asyncio.gather(*(engine.add_lora(request(adapters[n - 1], n)) for n in (2, 3)))
            assert await engine.list_loras() == {1, 2, 3} and await engine.remove_lora(2)
            assert await engine.list_loras() == {1, 3}
        finally:
            engine.shutdown()

    asyncio.run(main())


def test_figures_tell_which_adapters_are_in_use_and_what_loading_them_took(llama: Path, adapters: list[Path]):
    llm = LLM(str(llama), **SETTINGS | {"max_loras": 1, "disable_log_stats": False})
    first, second = request(adapters[0], 1), request(adapters[1], 2)
    engine = llm.llm_engine
    for number, adapter in enumerate((first, first, second)):
        params = SamplingParams(max_tokens=3 - number % 2, ignore_eos=True)
        engine.add_request(str(number), {"prompt_token_ids": [1, 2, 3]}, params, lora_request=adapter)
    told = set()
    while engine.has_unfinished_requests():
        engine.step()
        (info,) = (metric for metric in llm.get_metrics() if metric.name == "quire:lora_requests_info")
        told.add((info.labels["running_lora_adapters"], info.labels["waiting_lora_adapters"]))
        assert info.labels["max_lora"] == "1"
    assert {("a0", "a1"), ("a1", ""), ("", "")} <= told
    assert ("a1", "a0") not in told  # the second request of the first adapter came before the other adapter's
    values = {metric.name: metric for metric in llm.get_metrics()}
    assert values["quire:lora_evictions"].value == 1 and values["quire:lora_load_failures"].value == 0
    assert values["quire:lora_load_time_seconds"].count == 2
    assert [place["name"] for place in llm.call("inspect")["adapters"]] == ["a1"]
