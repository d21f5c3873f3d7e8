"""Whole dense decoders on Triton's kernels, with what attention has before, beside and after it: Transformers' logprobs."""

import pytest
import torch
from tests.models.test_parity import prompts
from tests.models.test_parity_dense import SHAPES
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import load_oracle, make_tiny_model

from quire.kernels import ops, triton

NAMES = ("stablelm: parallel, norms of heads, biases",)
RARER = ("bloom", "olmo: clipped", "apertus", "ministral3", "hunyuan dense")


@pytest.fixture(autouse=True)
def kernels(kept_selection):
    if torch.cuda.is_available():  # noqa: TID251
        pytest.skip("the driver's tensors live on the CPU, where only Triton's interpreter can run")
    triton.register()
    ops.select("cuda")


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in RARER)])
def test_logprobs_are_those_of_transformers(name, tmp_path):
    architecture, overrides = SHAPES[name]
    layers = "n_layer" if architecture == "BloomForCausalLM" else "num_hidden_layers"
    path = make_tiny_model(architecture, tmp_path, tokenizer=False, **overrides | {layers: 1})
    token_ids = prompts()[2] + [7] * (8 if architecture == "Ministral3ForCausalLM" else 0)
    driver, sequence = ModelDriver(build_tiny(path)), Sequence(token_ids, row=0)
    logprobs = torch.cat([*driver.step([(sequence, len(token_ids) - 1)]), *driver.step([(sequence, 1)])])
    with torch.no_grad():
        expected = load_oracle(path)(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-3)
