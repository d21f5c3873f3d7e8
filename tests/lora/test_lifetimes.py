"""Adapters over the life of an engine: a core that dies under them, more of them than places, adapters of a hub."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from tests.lora.conftest import PROMPTS, request, run
from tests.oracles.fake_hub import FakeHub
from tests.oracles.peft_adapters import make_adapter
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, AsyncEngineArgs, AsyncLLM, LoRARequest, SamplingParams

SETTINGS = {"dtype": "float32", "enable_lora": True, "max_model_len": 64, "max_num_seqs": 8, "max_logprobs": -1}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def test_a_core_that_is_killed_under_adapters_is_replaced_and_tokens_stay_the_same(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paths = [make_adapter(llama, tmp_path / f"a{n}", n, r=4, target_modules="all-linear") for n in range(2)]
    adapters = [None, *(request(path, number) for number, path in enumerate(paths, 1))]
    expected = run(LLM(str(llama), **SETTINGS), PROMPTS, adapters, max_tokens=30)
    now = tmp_path / "now"
    now.touch()
    monkeypatch.setenv("QUIRE_FAULTS", f"before-execute@core:kill:12:{now}")
    llm = LLM(str(llama), recovery=True, **SETTINGS)
    try:
        outputs = run(llm, PROMPTS, adapters, max_tokens=30)
        assert not now.exists()
        assert [output.outputs[0].token_ids for output in outputs] == [each.outputs[0].token_ids for each in expected]
        assert llm.list_loras() == {1, 2}
    finally:
        llm.shutdown()


def test_an_adapter_that_was_pinned_is_pinned_in_the_core_that_comes_after(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paths = [make_adapter(llama, tmp_path / f"a{n}", n, r=4, target_modules=["q_proj"]) for n in range(3)]
    now = tmp_path / "now"
    monkeypatch.setenv("QUIRE_FAULTS", f"before-execute@core:kill:1:{now}")
    llm = LLM(str(llama), recovery=True, max_loras=2, **SETTINGS)
    try:
        first, second, third = (request(path, number) for number, path in enumerate(paths, 1))
        assert llm.add_lora(first) and llm.pin_lora(1)
        now.touch()
        run(llm, PROMPTS[:1], [first])
        assert not now.exists()
        for adapter in (second, third):
            run(llm, PROMPTS[:1], [adapter])
        assert {place["name"]: place["is_pinned"] for place in llm.call("inspect")["adapters"]} == {
            "a0": True,
            "a2": False,
        }
    finally:
        llm.shutdown()


def test_fifty_adapters_share_four_places_and_each_gives_its_own_tokens(llama: Path, tmp_path: Path):
    llm = LLM(str(llama), max_loras=4, max_cpu_loras=10, disable_log_stats=False, **SETTINGS)
    for number in range(50):
        llm.collective_rpc(
            "write_random_adapter", args=(str(tmp_path / str(number)), 1 + number % 9, number, None, 0.5)
        )
    adapters = [LoRARequest(f"a{number}", number + 1, str(tmp_path / str(number))) for number in range(50)]
    together = run(llm, [PROMPTS[0]] * 100, adapters * 2, max_tokens=4)
    first, again = together[:50], together[50:]
    assert [each.outputs[0].token_ids for each in first] == [each.outputs[0].token_ids for each in again]
    assert len({tuple(each.outputs[0].token_ids) for each in first}) > 40
    for number in (0, 17, 49):
        (alone,) = run(llm, [PROMPTS[0]], [adapters[number]], max_tokens=4)
        assert alone.outputs[0].token_ids == first[number].outputs[0].token_ids
    assert len(llm.list_loras()) <= 4 + 10 and len(llm.call("inspect")["adapters"]) == 4


def test_requests_of_the_base_go_on_while_an_adapter_waits_for_a_place(llama: Path, tmp_path: Path):
    paths = [make_adapter(llama, tmp_path / f"a{n}", n, r=2, target_modules=["q_proj"]) for n in range(2)]
    one, two = (request(path, number) for number, path in enumerate(paths, 1))

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(llama), max_loras=1, **SETTINGS))
        ended: list[str] = []

        async def generate(name: str, adapter: LoRARequest | None, count: int) -> None:
            params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
            async for output in engine.generate({"prompt_token_ids": [1, 2]}, params, name, lora_request=adapter):
                assert output.error is None
            ended.append(name)

        try:
            await engine.add_lora(one)
            holder = asyncio.ensure_future(generate("holder", one, 60))
            await asyncio.gather(holder, generate("waits", two, 1), generate("base", None, 1))
            assert ended == ["base", "holder", "waits"]
        finally:
            engine.shutdown()

    asyncio.run(main())


_OF_A_HUB = """
import asyncio, sys
from quire import LLM, LoRARequest, SamplingParams
from quire.config.hub.listing import HubSettings
from quire.entrypoints.http.served_adapters import ServedAdapters
from quire.lora.resolvers import active_resolvers
if __name__ == "__main__":
    served = ServedAdapters([{"name": "style", "path": "owner/style"}])
    print(served.listed()[0].root, served.find("style").lora_path)
    (resolver,) = active_resolvers(HubSettings()).values()
    for name in ("owner/many/inner", "owner/style", "owner/many/../style", "other/secret"):
        found = asyncio.run(resolver.resolve_lora(sys.argv[1], name))
        print(name, None if found is None else found.lora_path.rpartition("snapshots")[2].partition("/")[2][41:])
    llm = LLM(sys.argv[1], dtype="float32", enable_lora=True, max_model_len=64)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for path in ("owner/style", "owner/absent"):
        (output,) = llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, lora_request=LoRARequest("s", 1, path))
        print(output.outputs[0].token_ids, output.error)
"""


def test_an_adapter_of_a_hub_is_fetched_by_its_name(llama: Path, tmp_path: Path):
    adapter = make_adapter(llama, tmp_path / "style", 3, r=4, target_modules="all-linear")
    (tmp_path / "many").mkdir()
    adapter.rename(tmp_path / "many" / "inner")
    hub = FakeHub()
    try:
        hub.add("owner/many", tmp_path / "many")
        hub.add("owner/style", tmp_path / "many" / "inner")
        script = tmp_path / "script.py"
        script.write_text(_OF_A_HUB)
        environment = hub.environment(tmp_path / "home", QUIRE_LORA_RESOLVER_HF_REPO_LIST="owner/many")
        ran = subprocess.run(
            [sys.executable, str(script), str(llama)], env=environment, capture_output=True, text=True, timeout=200
        )
    finally:
        hub.close()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [line for line in ran.stdout.splitlines() if line.startswith(("owner", "other", "["))]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    local = request(tmp_path / "many" / "inner")
    prompt = [{"prompt_token_ids": [3, 4, 5]}]
    (expected,) = LLM(str(llama), **SETTINGS).generate(prompt, params, lora_request=local, use_tqdm=False)
    assert lines[0].startswith("owner/style ") and "/snapshots/" in lines[0]
    assert lines[1:5] == ["owner/many/inner inner", "owner/style None", "owner/many/../style None", "other/secret None"]
    assert lines[5] == f"{expected.outputs[0].token_ids} None" and "lora_path='owner/absent'" in lines[6]
