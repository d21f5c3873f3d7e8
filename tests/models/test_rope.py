"""Rotary tables against Transformers' own rotary embedding, for every scaling scheme and both ways of writing it."""

import pytest
import torch
import transformers
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import load_oracle
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.config import HFConfig
from quire.errors import ConfigError
from quire.models.rope import Rope

HEAD_DIM = 32
LENGTH = 64
"""Longest context that the oracle sees; the tables are made for it."""

PAIRS = HEAD_DIM // 2
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(PAIRS)],
    "long_factor": [2.0 + 0.5 * i for i in range(PAIRS)],
}

SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn: own ramp": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn: mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.3,
    },
    "yarn: attention factor": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.3,
    },
    "longrope: beyond the original length": {**LONGROPE, "original_max_position_embeddings": 16},
    "longrope: within it": {**LONGROPE, "original_max_position_embeddings": 64},
    "longrope: factor": {**LONGROPE, "original_max_position_embeddings": 16, "factor": 6.0},
}  # fmt: skip


def config(scaling: dict, theta: float = 500.0, **fields) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=HEAD_DIM * 2, num_attention_heads=2, head_dim=HEAD_DIM, max_position_embeddings=fields.pop("length", LENGTH),
        rope_parameters={"rope_theta": theta, **scaling}, **fields,
    )  # fmt: skip


def oracle_table(hf: transformers.LlamaConfig, length: int = LENGTH) -> torch.Tensor:
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), torch.arange(length)[None])
    rotary = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :rotary], sin[0, :, :rotary]), dim=-1)


@pytest.mark.parametrize("name", SCALINGS)
def test_a_table_is_transformers_cosines_and_sines(name):
    hf = config(SCALINGS[name])
    rope = Rope.from_hf(HFConfig(hf.to_dict()), HEAD_DIM)
    torch.testing.assert_close(rope.table(LENGTH), oracle_table(hf), rtol=1e-5, atol=1e-5)


def test_a_dynamic_table_is_that_of_the_longest_context():
    """Transformers changes the base as a request grows; a table is made for one length, where the two agree."""
    hf = config({"rope_type": "dynamic", "factor": 2.0}, length=24)
    rope = Rope.from_hf(HFConfig(hf.to_dict()), HEAD_DIM)
    torch.testing.assert_close(rope.table(LENGTH), oracle_table(hf), rtol=1e-5, atol=1e-5)
    plain = Rope(theta=500.0, rotary_dim=HEAD_DIM)
    torch.testing.assert_close(rope.table(24), plain.table(24))


@pytest.mark.parametrize("name", SCALINGS)
def test_older_configs_with_rope_scaling_give_the_same(name):
    new = HFConfig(config(SCALINGS[name]).to_dict())
    scaling = dict(SCALINGS[name])
    scaling["type"] = scaling.pop("rope_type")
    old = HFConfig({"rope_theta": 500.0, "rope_scaling": scaling, "max_position_embeddings": LENGTH})
    assert Rope.from_hf(old, HEAD_DIM) == Rope.from_hf(new, HEAD_DIM)


def test_a_users_override_beats_the_checkpoints_parameters():
    values = config(SCALINGS["default"]).to_dict() | {"rope_theta": 7.0, "rope_scaling": SCALINGS["linear"]}
    rope = Rope.from_hf(HFConfig(values), HEAD_DIM)
    assert rope.theta == 7.0
    assert rope.scaling is not None
    assert rope.scaling.kind == "linear"


def test_layer_types_may_have_their_own_parameters():
    values = {"rope_parameters": {"a": {"rope_theta": 1.0, "rope_type": "default"}, "b": {"rope_theta": 2.0}}}
    assert [Rope.from_hf(HFConfig(values), HEAD_DIM, kind).theta for kind in "ab"] == [1.0, 2.0]


def test_a_part_of_the_head_may_rotate():
    values = {"rope_theta": 10.0, "partial_rotary_factor": 0.25}
    assert Rope.from_hf(HFConfig(values), HEAD_DIM).rotary_dim == 8


def test_an_unknown_scheme_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'spiral' is not known; known: default, linear"):
        Rope.from_hf(HFConfig({"rope_scaling": {"type": "spiral"}}), HEAD_DIM)


def test_longrope_needs_a_factor_for_each_pair():
    scaling = {**LONGROPE, "long_factor": [1.0], "original_max_position_embeddings": 8}
    rope = Rope.from_hf(HFConfig({"rope_scaling": scaling, "max_position_embeddings": 64}), HEAD_DIM)
    with pytest.raises(ConfigError, match=r"rope_scaling\.long_factor has 1 values; rotary dimension 32 needs 16"):
        rope.table(64)


@pytest.mark.parametrize("name", [name for name in SCALINGS if "longrope" not in name])
def test_a_scaled_llama_gives_transformers_logprobs(name, kernels, tiny):
    path = tiny(
        "LlamaForCausalLM", head_dim=HEAD_DIM, max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": 500.0, **SCALINGS[name]},
    )  # fmt: skip
    token_ids = torch.randint(4, 300, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    logprobs = ModelDriver(build_tiny(path)).prefill(Sequence(token_ids, row=0), chunk=16)
    with torch.no_grad():
        expected = load_oracle(path)(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-3)


def test_a_long_phi3_gives_transformers_logprobs(kernels, tiny):
    path = tiny(
        "Phi3ForCausalLM", max_position_embeddings=LENGTH, original_max_position_embeddings=16, head_dim=16,
        rope_parameters={"rope_theta": 500.0, "rope_type": "longrope", "short_factor": [1.0] * 8,
                         "long_factor": [1.0 + i for i in range(8)], "original_max_position_embeddings": 16},
    )  # fmt: skip
    token_ids = torch.randint(4, 300, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    logprobs = ModelDriver(build_tiny(path)).prefill(Sequence(token_ids, row=0), chunk=16)
    with torch.no_grad():
        expected = load_oracle(path)(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-3)
