"""Speculation with layers that keep a state: the same tokens, on both runners, for each kind of recurrent layer."""

from pathlib import Path
from typing import Any

import pytest
from tests.oracles.tiny_mixtures import RECURRENT
from tests.oracles.tiny_models import make_tiny_model
from tests.spec_decode import test_draft_model
from tests.spec_decode.test_end_to_end import PARAMS, check
from tests.worker.tiny_engine import TinyEngine

from quire.errors import ConfigError

KINDS = {
    "Mamba": "MambaForCausalLM",
    "Mamba-2 beside attention": "BambaForCausalLM",
    "Gated DeltaNet": "Qwen3_5ForCausalLM",
    "Kimi Delta Attention": "KimiLinearForCausalLM",
    "lightning attention": "MiniMaxForCausalLM",
    "short convolutions": "Lfm2ForCausalLM",
    "linear recurrent units": "RecurrentGemmaForCausalLM",
    "RWKV": "RwkvForCausalLM",
    "attention with short convolutions": "InklingForCausalLM",
}


@pytest.mark.parametrize("runner", ["host", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_guesses_leave_no_trace_in_a_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runner: str, kind: str
) -> None:
    monkeypatch.setattr("tests.spec_decode.test_end_to_end.MAX_TOKENS", 14)
    path = make_tiny_model(KINDS[kind], tmp_path)
    check(monkeypatch, path, runner, PARAMS[:4], kv_cache_memory_bytes=32 << 20)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("runner", ["host", "device"])
@pytest.mark.parametrize("model", sorted(set(RECURRENT) - set(KINDS.values()) - {"InklingForConditionalGeneration"}))
def test_every_other_model_with_states(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runner: str, model: str
) -> None:
    check(monkeypatch, make_tiny_model(model, tmp_path), runner, PARAMS[:4], kv_cache_memory_bytes=32 << 20)


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 4},
        {"max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 30},
        {"num_gpu_blocks_override": 30, "preemption_mode": "swap", "swap_space": 0.05},
        {"deterministic": True, "enforce_eager": True},
    ],
    ids=str,
)
def test_small_pages_chunks_and_preemption_change_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("tests.spec_decode.test_end_to_end.MAX_TOKENS", 16)
    path = make_tiny_model("BambaForCausalLM", tmp_path)
    check(monkeypatch, path, "host", PARAMS[:4], **{"kv_cache_memory_bytes": 32 << 20} | settings)


@pytest.mark.parametrize("runner", ["host", "device"])
def test_a_draft_model_without_states_guesses_for_one_that_has_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runner: str
) -> None:
    monkeypatch.setattr("tests.spec_decode.test_end_to_end.MAX_TOKENS", 14)
    path, smaller = (make_tiny_model(name, tmp_path / name) for name in ("BambaForCausalLM", "LlamaForCausalLM"))
    test_draft_model.check(monkeypatch, path, smaller, runner, PARAMS[:4], kv_cache_memory_bytes=32 << 20)


def test_a_draft_model_with_states_is_refused(tmp_path: Path) -> None:
    path, smaller = (make_tiny_model(name, tmp_path / name) for name in ("LlamaForCausalLM", "BambaForCausalLM"))
    with pytest.raises(ConfigError, match="its layers keep a state"):
        TinyEngine(path, **test_draft_model.drafted_by(smaller))
