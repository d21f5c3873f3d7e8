"""Prompts of embeddings: the logprobs of Transformers' `inputs_embeds`, in chunks, beside token prompts, over both runners.
Over two ranks, and in a core that is replaced: `tests/lora`."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from starlette.testclient import TestClient
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.oracles.tiny_models import load_oracle, make_tiny_model

from quire import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.engine import arg_utils
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app
from quire.errors import ConfigError, RequestError
from quire.executor import selector
from quire.multimodal import given_embeds
from quire.multimodal.given_embeds import decode_embeds, embeds_items, read_embeds

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "max_logprobs": -1, "enable_prompt_embeds": True,
    "max_num_batched_tokens": 32,
}  # fmt: skip
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True, logprobs=-1)
TOLERANCE = 5e-4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def drawn(oracle: Any, count: int, seed: int = 0) -> torch.Tensor:
    """Embeddings like those of tokens, of none that there is."""
    table = oracle.get_input_embeddings().weight.detach()
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, table.shape[1], generator=generator) * table.std()


@torch.no_grad()
def worst_difference(oracle: Any, embeds: torch.Tensor, output: Any) -> float:
    """How far an output's logprobs are from those of Transformers behind the same embeddings."""
    completion = output.outputs[0]
    behind = oracle.get_input_embeddings()(torch.tensor(completion.token_ids))
    logits = oracle(inputs_embeds=torch.cat([embeds, behind])[None]).logits[0].float()
    expected = logits.log_softmax(-1)[len(embeds) - 1 : -1]
    ours = torch.tensor([[row[i].logprob for i in range(expected.shape[1])] for row in completion.logprobs])
    return float((ours - expected).abs().max())


def check(llm: LLM, oracle: Any) -> None:
    """One batch of embeddings, longer than a step and short, and of tokens; each as Transformers has it."""
    table = oracle.get_input_embeddings()
    tokens = [3, 4, 5, 6, 7]
    given = [drawn(oracle, 70), drawn(oracle, 3, 1), table(torch.tensor(tokens)).detach(), None]
    prompts: Any = [{"prompt_token_ids": tokens} if each is None else {"prompt_embeds": each} for each in given]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * 4
    for embeds, output in zip(given, outputs, strict=True):
        assert worst_difference(oracle, given[2] if embeds is None else embeds, output) < TOLERANCE
    assert [len(output.prompt_token_ids or ()) for output in outputs] == [70, 3, 5, 5]


def check_family(architecture: str, tmp_path: Path) -> None:
    base = make_tiny_model(architecture, tmp_path)
    check(LLM(str(base), **SETTINGS), load_oracle(base))


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "Gemma3ForCausalLM", "GraniteForCausalLM"])
def test_a_prompt_of_embeddings_equals_transformers(architecture: str, tmp_path: Path):
    check_family(architecture, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "BloomForCausalLM"])
def test_more_prompts_of_embeddings_equal_transformers(architecture: str, tmp_path: Path):
    check_family(architecture, tmp_path)


def test_a_device_that_works_beside_the_host_gives_the_same(
    llama: Path, monkeypatch: pytest.MonkeyPatch, kept_selection: None
):
    platform = AsyncCpuPlatform()
    for module in (selector, arg_utils):
        monkeypatch.setattr(module, "current_platform", lambda _name: platform)
    llm = LLM(str(llama), block_size=16, kv_cache_memory_bytes=1 << 24, **SETTINGS)
    for _ in range(3):  # with other graphs captured each time
        check(llm, load_oracle(llama))


def test_prompts_that_begin_alike_share_pages_and_others_do_not(llama: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(given_embeds, "PIECE", 32)
    llm, oracle = LLM(str(llama), **SETTINGS), load_oracle(llama)
    first = drawn(oracle, 70)
    other_end, other = torch.cat([first[:40], drawn(oracle, 30, 1)]), drawn(oracle, 70, 2)
    for embeds, cached in ((first, 0), (first, 64), (other_end, 32), (other, 0)):
        (output,) = llm.generate({"prompt_embeds": embeds}, PARAMS, use_tqdm=False)
        assert output.num_cached_tokens == cached
        assert worst_difference(oracle, embeds, output) < TOLERANCE
    (output,) = llm.generate({"prompt_token_ids": [0] * 70}, PARAMS, use_tqdm=False)
    assert output.num_cached_tokens == 0


def test_a_prompt_that_gives_its_pages_up_is_computed_anew(llama: Path):
    llm, oracle = LLM(str(llama), block_size=16, num_gpu_blocks_override=9, **SETTINGS), load_oracle(llama)
    given = [drawn(oracle, 50, seed) for seed in range(3)]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True, logprobs=-1)
    outputs = llm.generate([{"prompt_embeds": each} for each in given], params, use_tqdm=False)
    assert llm.call("stats").num_preemptions > 0
    for embeds, output in zip(given, outputs, strict=True):
        assert worst_difference(oracle, embeds, output) < TOLERANCE


def test_what_is_no_prompt_of_embeddings_is_refused(llama: Path):
    llm, width = LLM(str(llama), **SETTINGS), load_oracle(llama).config.hidden_size
    rows = torch.zeros(3, width)
    wrong: list[tuple[Any, str]] = [
        ({"prompt_embeds": rows[0]}, r"has shape \[\d+\]; it must be"),
        ({"prompt_embeds": rows[:0]}, "it must be"),
        ({"prompt_embeds": rows / 0.0}, "not finite"),
        ({"prompt_embeds": "text"}, "no tensor"),
        ({"prompt_embeds": rows, "prompt": "x"}, "leave prompt out"),
        ({"prompt_embeds": torch.zeros(200, width)}, "max_model_len is 128"),
    ]
    for given, message in wrong:
        with pytest.raises(RequestError, match=message):
            llm.generate(given, PARAMS, use_tqdm=False)
    with pytest.raises(RequestError, match="no prompt_logprobs"):
        llm.generate({"prompt_embeds": rows}, SamplingParams(prompt_logprobs=1), use_tqdm=False)
    (output,) = llm.generate({"prompt_embeds": rows[:, :-1]}, PARAMS, use_tqdm=False)
    assert output.error is not None and "the model's hidden size is" in output.error
    assert llm.generate({"prompt_embeds": rows}, PARAMS, use_tqdm=False)[0].error is None
    off = LLM(str(llama), **SETTINGS | {"enable_prompt_embeds": False})
    with pytest.raises(RequestError, match="start the engine with enable_prompt_embeds"):
        off.generate({"prompt_embeds": rows}, PARAMS, use_tqdm=False)


def test_a_model_that_projects_what_it_looks_up_takes_none(tmp_path: Path):
    base = make_tiny_model("OPTForCausalLM", tmp_path, word_embed_proj_dim=24)
    with pytest.raises(ConfigError, match="it projects what it looks up"):
        LLM(str(base), **SETTINGS)


def as_text(embeds: torch.Tensor) -> str:
    return base64.b64encode(save({"embeds": embeds.contiguous()})).decode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_of_any_float_type_are_read(dtype: torch.dtype):
    embeds = torch.randn(5, 8).to(dtype)
    np.testing.assert_array_equal(decode_embeds(as_text(embeds)).astype(np.float32), embeds.float().numpy())
    assert [item.length for item in embeds_items(read_embeds(torch.zeros(600, 2)))] == [256, 256, 88]


def test_other_bytes_are_refused_and_pickles_never_read():
    saved = io.BytesIO()
    torch.save(torch.zeros(2, 2), saved)
    two = save({"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)})
    ints, cut = save({"a": torch.zeros(2, 2, dtype=torch.int64)}), save({"a": torch.zeros(2, 2)})[:-4]
    for data, message in (
        (saved.getvalue(), "a pickle, which is never read"),
        (two, "one tensor"), (ints, "type F32"), (cut, "one tensor"), (b"", "one tensor"), (b"\xff" * 40, "one tensor"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=message):
            decode_embeds(base64.b64encode(data).decode())
    with pytest.raises(RequestError, match="must be base64"):
        decode_embeds("no base64!")


def test_the_completions_route_takes_safetensors(llama: Path):
    oracle = load_oracle(llama)
    embeds = oracle.get_input_embeddings()(torch.tensor([3, 4, 5])).detach()
    state = ServerState(ServerSettings())
    with TestClient(build_app(state)) as client:
        state.engine_or_none = engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(llama), **SETTINGS))
        try:
            base = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
            answers = [
                client.post("/v1/completions", json=base | fields).json()["choices"]
                for fields in (
                    {"prompt": [3, 4, 5]},
                    {"prompt_embeds": as_text(embeds)},
                    {"prompt": "", "prompt_embeds": [as_text(embeds)] * 2},
                    {"prompt": [3, 4, 5], "prompt_embeds": as_text(embeds)},
                )
            ]
            assert [len(choices) for choices in answers] == [1, 1, 2, 2]
            assert len({choice["text"] for choices in answers for choice in choices}) == 1
            refused = client.post("/v1/completions", json=base | {"prompt_embeds": as_text(embeds), "echo": True})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "echo"
            refused = client.post("/v1/completions", json=base | {"prompt_embeds": as_text(embeds[:, :-1])})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_embeds"
        finally:
            engine.shutdown()
