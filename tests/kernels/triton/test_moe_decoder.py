"""Whole decoders with mixtures of experts on Triton's kernels, fused where they can be: Transformers' logprobs."""

import pytest
import torch
from tests.models.test_parity_moe import SHAPES
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import load_oracle, make_tiny_model

from quire.kernels import ops, triton

TOKENS = [5, 99, 301, 17, 5, 44, 200, 81, 9, 150, 33, 7]


@pytest.fixture(autouse=True)
def kernels(kept_selection):
    if torch.cuda.is_available():  # noqa: TID251
        pytest.skip("the driver's tensors live on the CPU, where only Triton's interpreter can run")
    triton.register()
    ops.select("cuda")


FUSED = {
    "qwen3": ("Qwen3MoeForCausalLM", {}),
    "qwen2": ("Qwen2MoeForCausalLM", {}),
    "gpt-oss": SHAPES["gpt-oss"],
    "glm4: groups, a bias": SHAPES["glm4 moe"],
}
UNFUSED = {
    "phimoe": SHAPES["phimoe"],
    "granite: multipliers": SHAPES["granite moe shared"],
    "cohere2": SHAPES["cohere2 moe"],
}
COMMON = ("qwen3", "gpt-oss", "granite: multipliers")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in COMMON else pytest.mark.exhaustive) for name in (*FUSED, *UNFUSED)]
)
def test_mixtures_give_transformers_logprobs(name, tmp_path):
    architecture, overrides = (FUSED | UNFUSED)[name]
    first = {"first_k_dense_replace": 0, "num_hidden_layers": 1}
    kinds = {"mlp_layer_types": ["sparse"]} if "mlp_layer_types" in overrides else {}
    path = make_tiny_model(architecture, tmp_path, tokenizer=False, **(overrides | first | kinds))
    model = build_tiny(path)
    assert model._operations.is_fused == (name in FUSED)
    driver, sequence = ModelDriver(model), Sequence(list(TOKENS), row=0)
    logprobs = torch.cat([*driver.step([(sequence, 9)]), *driver.step([(sequence, 3)])])
    with torch.no_grad():
        expected = load_oracle(path)(torch.tensor([TOKENS])).logits[0].float().log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-3)
