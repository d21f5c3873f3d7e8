"""Whole decoders with parts that few families have on Triton's kernels: Transformers' logprobs."""

import pytest
import torch
from tests.models.test_parity import prompts
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import load_oracle, make_tiny_model

from quire.kernels import ops, triton

NAMES = {
    "Gemma4ForCausalLM": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1},
}
RARER = (
    "LongcatFlashForCausalLM",
    "HYV4ForCausalLM",
    "DiffLlamaForCausalLM",
    "JetMoeForCausalLM",
    "DeepseekV4ForCausalLM",
)


@pytest.fixture(autouse=True)
def kernels(kept_selection):
    if torch.cuda.is_available():  # noqa: TID251
        pytest.skip("the driver's tensors live on the CPU, where only Triton's interpreter can run")
    triton.register()
    ops.select("cuda")


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in RARER)])
def test_logprobs_are_those_of_transformers(name, tmp_path):
    path = make_tiny_model(name, tmp_path, tokenizer=False, **NAMES.get(name, {}))
    token_ids = prompts()[2]
    driver, sequence = ModelDriver(build_tiny(path)), Sequence(token_ids, row=0)
    logprobs = torch.cat([*driver.step([(sequence, len(token_ids) - 1)]), *driver.step([(sequence, 1)])])
    with torch.no_grad():
        expected = load_oracle(path)(torch.tensor([token_ids]), use_cache=False).logits[0].float().log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-3)
