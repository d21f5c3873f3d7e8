"""Keys and values in fp8: whole models equal Transformers' with a cache that rounds them on their way in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.oracles.tiny_models import load_oracle, make_tiny_model
from tests.worker.test_end_to_end import make_prompts
from tests.worker.tiny_engine import TinyEngine, make_request
from transformers import DynamicCache

from quire.executor import selector

Scales = dict[int, tuple[float, float]]
"""Of keys and of values, by layer."""


class RoundingCache(DynamicCache):
    def __init__(self, scales: Scales) -> None:
        super().__init__()
        self.scales = scales

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        both = zip((key_states, value_states), self.scales.get(layer_idx, (1.0, 1.0)), strict=True)
        rounded = ((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale for x, scale in both)
        return super().update(*rounded, layer_idx, *args, **kwargs)


def oracle_logprobs(model: Any, prompt: list[int], tokens: list[int], scales: Scales) -> list[float]:
    with torch.no_grad():
        cache = RoundingCache(scales)
        logits = model(torch.tensor([prompt + tokens]), past_key_values=cache, use_cache=True).logits
    logprobs = torch.log_softmax(logits[0, len(prompt) - 1 : -1].float(), -1)
    return logprobs[range(len(tokens)), tokens].tolist()


@pytest.mark.parametrize("model", ["llama", "mistral", "gemma"])
def test_logprobs_are_those_of_a_cache_that_rounds(
    model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert largest_difference(request.getfixturevalue(model), "reference", monkeypatch) < 1e-4


@pytest.mark.exhaustive
def test_a_gpus_kernels_read_what_they_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # They multiply in float16. In a second layer some keys would be rounded the other way for that.
    path = make_tiny_model("LlamaForCausalLM", tmp_path, num_hidden_layers=1)
    assert largest_difference(path, "cuda", monkeypatch) < 3e-3


SCALES = {
    "one for both": {"self_attn.kv_scale": 0.3},
    "beside attention": {"self_attn.k_scale": 0.006, "self_attn.attn.v_scale": 37.0},
    "beside the matrices": {"self_attn.k_proj.k_scale": 0.7, "self_attn.v_proj.v_scale": 0.003},
    "of outputs": {"self_attn.k_proj.output_scale": 0.3, "self_attn.v_proj.output_scale": 1.7},
    "not calibrated": {"self_attn.k_scale": -1.0, "self_attn.v_scale": 0.0, "self_attn.q_scale": 0.2},
}


def with_scales(path: Path, scales: dict[str, Any]) -> Path:
    """A model of one layer (in a second one some keys would be rounded the other way) with scales as some tool writes them."""
    make_tiny_model("LlamaForCausalLM", path, num_hidden_layers=1)
    tensors = load_file(path / "model.safetensors")
    for number, (name, value) in enumerate(scales.items()):
        tensors[f"model.layers.0.{name}"] = torch.tensor(value if number else [value])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("names", SCALES)
def test_scales_of_a_checkpoint_divide_what_is_written_and_multiply_what_is_read(
    names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [value if value > 0 else 1.0 for value in SCALES[names].values()]
    path, scales = with_scales(tmp_path, SCALES[names]), {0: (values[0], values[min(len(values) - 1, 1)])}
    assert largest_difference(path, "reference", monkeypatch, scales) < 1e-4


@pytest.mark.exhaustive
def test_a_gpus_kernels_scale_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_scales(tmp_path, {"self_attn.k_scale": 0.3, "self_attn.v_scale": 0.003})
    assert largest_difference(path, "cuda", monkeypatch, {0: (0.3, 0.003)}) < 3e-3


def test_a_cache_in_another_type_has_no_use_for_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selector, "current_platform", lambda _name: AsyncCpuPlatform("reference"))
    paths = (with_scales(tmp_path / name, scales) for name, scales in (("plain", {}), ("scaled", SCALES["of outputs"])))
    tokens = [TinyEngine(path).generate([make_request("r", [5, 6, 7, 8], max_tokens=12)]) for path in paths]
    assert tokens[0] == tokens[1]


def test_of_scales_by_head_the_largest_serves_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_scales(tmp_path, {"self_attn.v_scale": 0.7, "self_attn.k_scale": [[[0.1]], [[0.3]]]})
    assert largest_difference(path, "reference", monkeypatch, {0: (0.3, 0.7)}) < 1e-4


def largest_difference(
    path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch, scales: Scales | None = None
) -> float:
    monkeypatch.setattr(selector, "current_platform", lambda _name: AsyncCpuPlatform(kernels))
    engine = TinyEngine(path, depth=2, block_size=16, kv_cache_dtype="fp8")
    prompts = make_prompts()
    requests = [make_request(f"r{n}", prompt, logprobs=0, max_tokens=8) for n, prompt in enumerate(prompts)]
    tokens = engine.generate(requests)
    oracle = load_oracle(path).float()
    differences: list[float] = []
    for number, prompt in enumerate(prompts):
        told = [entry.logprobs for entry in engine.news[f"r{number}"] if entry.logprobs is not None]
        ours = [values[0] for logprobs in told for values in logprobs.logprobs]
        theirs = oracle_logprobs(oracle, prompt, tokens[f"r{number}"], scales or {})
        differences += [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return max(differences)
