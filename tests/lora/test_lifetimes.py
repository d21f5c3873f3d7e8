"""Adapters over the life of an engine: a core that dies under them, more of them than places, adapters of a hub."""

import asyncio
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lora.conftest import PROMPTS, request, run
from tests.oracles.fake_hub import FakeHub
from tests.oracles.peft_adapters import make_adapter, make_virtual
from tests.oracles.tiny_models import load_oracle, make_tiny_model

from quire import LLM, AsyncEngineArgs, AsyncLLM, LoRARequest, SamplingParams
from quire.outputs import RequestOutput

SETTINGS = {"dtype": "float32", "enable_lora": True, "max_model_len": 64, "max_num_seqs": 8, "max_logprobs": -1}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def drawn_embeddings(base: Path) -> torch.Tensor:
    """Embeddings like those of tokens, of none that there is."""
    table = load_oracle(base).get_input_embeddings().weight.detach()
    return torch.randn(40, table.shape[1], generator=torch.Generator().manual_seed(1)) * table.std()


@dataclasses.dataclass
class Killed:
    """What was asked of a core that was killed under its requests, what the same engine without a death gives, and what is known
    of the adapters afterwards, when others have been used too."""

    names: list[str]
    expected: list[RequestOutput]
    outputs: list[RequestOutput]
    known: set[int]
    places: dict[str, bool]


@pytest.fixture(scope="module")
def killed(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    loras = [make_adapter(llama, folder / f"a{n}", n, r=4, target_modules="all-linear") for n in range(4)]
    virtual = [make_virtual(llama, folder / kind, kind, 3) for kind in ("PROMPT_TUNING", "PREFIX_TUNING")]
    adapters = [request(path, number) for number, path in enumerate([*loras, *virtual], 1)]
    embeds = {"prompt_embeds": drawn_embeddings(llama)}
    asked = [(prompt, adapter) for adapter in (None, *adapters[:2], *adapters[4:]) for prompt in PROMPTS[1:]]
    given = [*({"prompt_token_ids": prompt} for prompt, _ in asked), embeds]
    requests = [*(adapter for _, adapter in asked), None]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True)
    settings = SETTINGS | {"max_num_seqs": 16, "enable_prompt_embeds": True}
    expected = LLM(str(llama), **settings).generate(given, params, lora_request=requests, use_tqdm=False)
    now = folder / "now"
    now.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_FAULTS", f"before-execute@core:kill:8:{now}")
        llm = LLM(str(llama), recovery=True, max_loras=4, **settings)
    try:
        assert llm.add_lora(adapters[0]) and llm.pin_lora(1)
        outputs = llm.generate(given, params, lora_request=requests, use_tqdm=False)
        assert not now.exists()
        known = llm.list_loras()
        for adapter in adapters[2:]:
            run(llm, PROMPTS[:1], [adapter], max_tokens=1)
        places = {place["name"]: place["is_pinned"] for place in llm.call("inspect")["adapters"]}
    finally:
        llm.shutdown()
    names = ["base" if each is None else each.lora_name for each in requests[:-1]]
    return Killed([*names, "embeddings"], expected, outputs, known, places)


@pytest.mark.parametrize("name", ["base", "a0", "a1", "PROMPT_TUNING", "PREFIX_TUNING", "embeddings"])
def test_requests_of_a_core_that_was_killed_go_on_with_the_same_tokens(killed: Killed, name: str):
    pairs = [
        (one, other)
        for its, one, other in zip(killed.names, killed.outputs, killed.expected, strict=True)
        if its == name
    ]
    assert pairs
    for output, expected in pairs:
        assert output.error is None and output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.prompt_token_ids == expected.prompt_token_ids


def test_adapters_are_known_and_pinned_in_the_core_that_comes_after(killed: Killed):
    assert killed.known == {1, 2, 5, 6}
    assert killed.places == {"a0": True, "a3": False, "PROMPT_TUNING": False, "PREFIX_TUNING": False}


def test_thirty_adapters_share_four_places_and_each_gives_its_own_tokens(llama: Path, tmp_path: Path):
    llm = LLM(str(llama), max_loras=4, max_cpu_loras=10, disable_log_stats=False, **SETTINGS)
    for number in range(30):
        llm.collective_rpc(
            "write_random_adapter", args=(str(tmp_path / str(number)), 1 + number % 9, number, None, 0.5)
        )
    adapters = [LoRARequest(f"a{number}", number + 1, str(tmp_path / str(number))) for number in range(30)]
    together = run(llm, [PROMPTS[0]] * 60, adapters * 2, max_tokens=3)
    first, again = together[:30], together[30:]
    assert [each.outputs[0].token_ids for each in first] == [each.outputs[0].token_ids for each in again]
    assert len({tuple(each.outputs[0].token_ids) for each in first}) > 22
    for number in (0, 17, 29):
        (alone,) = run(llm, [PROMPTS[0]], [adapters[number]], max_tokens=3)
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
from quire.entrypoints.http.adapter_finder import ServedAdapters
from quire.lora.resolver import active_resolvers
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
    prompt: Any = [{"prompt_token_ids": [3, 4, 5]}]
    (expected,) = LLM(str(llama), **SETTINGS).generate(prompt, params, lora_request=local, use_tqdm=False)
    assert lines[0].startswith("owner/style ") and "/snapshots/" in lines[0]
    assert lines[1:5] == ["owner/many/inner inner", "owner/style None", "owner/many/../style None", "other/secret None"]
    assert lines[5] == f"{expected.outputs[0].token_ids} None" and "lora_path='owner/absent'" in lines[6]
