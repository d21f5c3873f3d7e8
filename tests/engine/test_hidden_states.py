"""Hidden states of requests' tokens in files: those that Transformers gives, whatever steps they are computed in."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.oracles.tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.engine import arg_utils
from quire.errors import ConfigError
from quire.executor import selector
from quire.hidden_states import cleanup_hidden_states, load_hidden_states

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 160, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 4,
    "max_num_batched_tokens": 24, "disable_log_stats": True,
}  # fmt: skip
PROMPTS = [[3 + (i * i * 31 + i * n) % 300 for i in range(length)] for n, length in enumerate((50, 7, 50, 1))]


def speculative(*layers: int) -> dict[str, Any]:
    """vLLM's way to name layers."""
    named = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    return {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": named}


def transfer(folder: Path, **extra: Any) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder), **extra}
    return {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def num_layers(model: Path) -> int:
    return json.loads((model / "config.json").read_text())["num_hidden_layers"]


@pytest.fixture(scope="module")
def engine(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    layers = speculative(0, 1, num_layers(llama))
    folder = transfer(tmp_path_factory.mktemp("states"), allow_custom_save_path=True)
    with LLM(str(llama), speculative_config=layers, kv_transfer_config=folder, **SETTINGS) as llm:
        yield llm


def asked(max_tokens: int, **params: Any) -> SamplingParams:
    extra = {"kv_transfer_params": params} if params else None
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, extra_args=extra)


def ask(llm: LLM, prompts: list[list[int]], params: Any) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [(output, load_hidden_states(output.kv_transfer_params["hidden_states_path"])) for output in outputs]


def reference(model: Path, tokens: list[int]) -> torch.Tensor:
    """Transformers' states before the first layer, before the second, and behind the last without its norm: [T, 3, D]."""
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    behind: list[torch.Tensor] = []
    oracle.model.layers[-1].register_forward_hook(lambda module, args, out: behind.append(out))
    with torch.no_grad():
        states = oracle(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    last = behind[0][0] if isinstance(behind[0], tuple) else behind[0]
    return torch.stack([states[0][0], states[1][0], last.reshape(states[0][0].shape)], dim=1)


def test_states_of_prompts_are_those_of_transformers_in_chunks_and_side_by_side(engine: LLM, llama: Path) -> None:
    for prompt, (output, found) in zip(PROMPTS, ask(engine, PROMPTS, asked(3)), strict=True):
        assert len(output.outputs[0].token_ids) == 3 and output.num_cached_tokens == 0
        assert found["token_ids"].tolist() == prompt
        torch.testing.assert_close(found["hidden_states"], reference(llama, prompt), atol=2e-5, rtol=2e-5)


def test_a_prompt_that_comes_again_has_its_states_again(engine: LLM) -> None:
    ((_, first),) = ask(engine, PROMPTS[:1], asked(1))
    ((output, second),) = ask(engine, PROMPTS[:1], asked(1))
    assert output.num_cached_tokens == 0 and torch.equal(first["hidden_states"], second["hidden_states"])


def test_output_tokens_have_states_too_where_they_are_asked_for(engine: LLM, llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "made" / "custom.safetensors"
    params = [asked(2), asked(9, hidden_states_path=str(path), include_output_tokens=True)]
    (_, few), (output, found) = ask(engine, PROMPTS[:2], params)
    assert output.kv_transfer_params["hidden_states_path"] == str(path) and len(few["token_ids"]) == len(PROMPTS[0])
    tokens = [*PROMPTS[1], *output.outputs[0].token_ids]
    assert found["token_ids"].tolist() == tokens[:-1]
    torch.testing.assert_close(found["hidden_states"], reference(llama, tokens[:-1]), atol=2e-5, rtol=2e-5)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"hidden_states", "token_ids"}
    cleanup_hidden_states(str(path))
    assert list(path.parent.iterdir()) == []


def test_a_request_that_is_preempted_has_whole_states(llama: Path, tmp_path: Path) -> None:
    layers = {"layers": [0, 1, num_layers(llama)], "path": str(tmp_path)}
    own = {"kv_connector": "hidden_states", "kv_connector_extra_config": layers}
    small = {**SETTINGS, "num_gpu_blocks_override": 9, "max_model_len": 100, "disable_log_stats": False}
    prompts = [prompt * 8 if len(prompt) < 10 else prompt for prompt in PROMPTS[:3]]
    with LLM(str(llama), kv_transfer_config=own, **small) as llm:
        for output, found in ask(llm, prompts, asked(30, include_output_tokens=True)):
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
            assert found["token_ids"].tolist() == tokens
            torch.testing.assert_close(found["hidden_states"], reference(llama, tokens), atol=2e-5, rtol=2e-5)
        preempted = next(each.value for each in llm.get_metrics() if each.name == "quire:num_preemptions")
    assert preempted > 0


def test_a_device_that_works_beside_the_host_gives_the_same(llama: Path, tmp_path: Path, monkeypatch) -> None:
    for module in (arg_utils, selector):
        monkeypatch.setattr(module, "current_platform", lambda _name: AsyncCpuPlatform("reference"))
    layers = speculative(0, 1, num_layers(llama))
    with LLM(str(llama), speculative_config=layers, kv_transfer_config=transfer(tmp_path), **SETTINGS) as llm:
        params = [asked(3), asked(12, include_output_tokens=True), asked(1), asked(5)]
        for (output, found), few in zip(ask(llm, PROMPTS, params), (True, False, True, True), strict=True):
            tokens = output.prompt_token_ids if few else [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
            assert found["token_ids"].tolist() == tokens
            torch.testing.assert_close(found["hidden_states"], reference(llama, tokens), atol=2e-5, rtol=2e-5)


def test_ranks_in_processes_of_their_own_give_them_once(llama: Path, tmp_path: Path) -> None:
    layers, both = speculative(0, 1, num_layers(llama)), {**SETTINGS, "tensor_parallel_size": 2}
    with LLM(str(llama), speculative_config=layers, kv_transfer_config=transfer(tmp_path), **both) as llm:
        ((_, found),) = ask(llm, PROMPTS[:1], asked(2))
    torch.testing.assert_close(found["hidden_states"], reference(llama, PROMPTS[0]), atol=2e-5, rtol=2e-5)


def test_an_aborted_request_leaves_no_lock_and_no_file_of_half_a_prompt(engine: LLM, tmp_path: Path) -> None:
    core, path = engine.llm_engine, tmp_path / "aborted.safetensors"
    core.add_request("aborted", {"prompt_token_ids": PROMPTS[0]}, asked(4, hidden_states_path=str(path)))
    core.step()
    assert Path(f"{path}.lock").exists()
    core.abort_request(["aborted"])
    ask(engine, PROMPTS[1:2], asked(1))
    with pytest.raises(FileNotFoundError):
        load_hidden_states(str(path))
    assert list(tmp_path.iterdir()) == []


def test_files_have_names_in_the_folder_alone(engine: LLM, llama: Path, tmp_path: Path) -> None:
    for path, told in (
        (7, "hidden_states_path=7 must be a file's name"),
        ("/proc/none/x", "hidden states cannot be made"),
    ):
        (output,) = engine.generate([{"prompt_token_ids": [3]}], asked(1, hidden_states_path=path), use_tqdm=False)
        assert output.outputs[0].finish_reason == "error" and told in output.error
    with LLM(str(llama), speculative_config=speculative(1), kv_transfer_config=transfer(tmp_path), **SETTINGS) as llm:
        core = llm.llm_engine
        core.add_request("../a/b", {"prompt_token_ids": PROMPTS[1]}, asked(1, hidden_states_path="/etc/x"))
        outputs = [output for _ in range(8) if core.has_unfinished_requests() for output in core.step()]
    path = Path(outputs[-1].kv_transfer_params["hidden_states_path"])
    assert path.parent == tmp_path and load_hidden_states(str(path))["hidden_states"].shape[:2] == (7, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative_config": speculative(1)}, "needs kv_transfer_config with kv_connector 'hidden_states'"),
        (
            {"speculative_config": speculative(), "kv_transfer_config": transfer(Path("x"))},
            "layers=.* must be a list of",
        ),
        ({"speculative_config": speculative(99), "kv_transfer_config": transfer(Path("x"))}, "has . layers, give 0 to"),
        ({"kv_transfer_config": transfer(Path("x"))}, "name the layers whose states are wanted"),
        ({"speculative_config": speculative(1), "kv_transfer_config": transfer(Path("x"), pth=1)}, "pth"),
    ],
)
def test_what_cannot_be_is_refused(llama: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(llama), **given, **SETTINGS)
