"""A whole decoder on Triton's kernels, fused, with mixtures of experts: Transformers' logprobs."""

import pytest
import torch
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import load_oracle, make_tiny_model

from quire.kernels import ops, triton

TOKENS = [5, 99, 301, 17, 5, 44, 200, 81, 9, 150, 33, 7]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    if torch.cuda.is_available():  # noqa: TID251
        pytest.skip("the driver's tensors live on the CPU, where only Triton's interpreter can run")
    monkeypatch.setattr(ops, "_chosen", dict(ops._chosen))
    monkeypatch.setattr(ops, "_choices", dict(ops._choices))
    triton.register()
    ops.select("cuda")


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM"])
def test_the_fused_way_gives_transformers_logprobs(architecture, tmp_path):
    path = make_tiny_model(architecture, tmp_path, tokenizer=False, num_hidden_layers=1)
    model = build_tiny(path)
    assert model._is_fused
    driver, sequence = ModelDriver(model), Sequence(list(TOKENS), row=0)
    logprobs = torch.cat([*driver.step([(sequence, 9)]), *driver.step([(sequence, 3)])])
    with torch.no_grad():
        expected = load_oracle(path)(torch.tensor([TOKENS])).logits[0].float().log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-3)
