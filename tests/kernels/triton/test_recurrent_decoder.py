"""Whole decoders with recurrent layers on Triton's kernels, fused: Transformers' logprobs."""

import random

import pytest
import torch
from tests.models.test_parity import prompts
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import VOCAB_SIZE, load_oracle, make_tiny_model

from quire.kernels import ops, triton
from quire.kernels.triton.recurrent import selective as recurrent_selective

ARCHITECTURES = {
    "MambaForCausalLM": {"num_hidden_layers": 1},
    "NemotronHForCausalLM": {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
    "Lfm2ForCausalLM": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "Qwen3_5ForCausalLM": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}


@pytest.fixture(autouse=True)
def kernels(kept_selection):
    if torch.cuda.is_available():  # noqa: TID251
        pytest.skip("the driver's tensors live on the CPU, where only Triton's interpreter can run")
    triton.register()
    ops.select("cuda")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_fused_way_gives_transformers_logprobs(architecture, tmp_path):
    path = make_tiny_model(architecture, tmp_path, tokenizer=False, **ARCHITECTURES[architecture])
    model = build_tiny(path)
    assert model._operations.is_fused
    token_ids = prompts()[2]
    driver, sequence = ModelDriver(model), Sequence(token_ids, row=0)
    logprobs = torch.cat([*driver.step([(sequence, 9)]), *driver.step([(sequence, 7)]), *driver.step([(sequence, 1)])])
    with torch.no_grad():
        expected = load_oracle(path)(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-3)


def test_a_prompt_in_chunks_gives_transformers_logprobs(tmp_path, monkeypatch):
    """Mamba's alone: others' go token by token in float32. Its first page ends in the second step's chunk."""
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32}
    path = make_tiny_model("MambaForCausalLM", tmp_path, tokenizer=False, **small)
    launch, launches = recurrent_selective.launch_selective_chunks, []
    monkeypatch.setattr(
        recurrent_selective, "launch_selective_chunks", lambda *x, **y: launches.append(launch(*x, **y))
    )
    draw = random.Random(0)
    token_ids = [draw.randrange(4, VOCAB_SIZE) for _ in range(92)]
    driver, sequence = ModelDriver(build_tiny(path, block_size=48)), Sequence(token_ids, row=0)
    logprobs = torch.cat(
        [*driver.step([(sequence, 40)]), *driver.step([(sequence, 50)]), *driver.step([(sequence, 2)])]
    )
    with torch.no_grad():
        expected = load_oracle(path)(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-3)
