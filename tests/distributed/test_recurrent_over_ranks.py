"""Recurrent layers over two processes that sum through gloo, and what cannot be shared."""

from pathlib import Path

import pytest
from tests.distributed.test_models_over_ranks import check
from tests.models.test_parity_recurrent import SHAPES
from tests.oracles.model_driver import build_tiny
from tests.oracles.tiny_models import make_tiny_model

from quire.distributed.communicator import SingleRank
from quire.errors import ConfigError
from quire.kernels import ops

NAMES = (
    "mamba", "mamba2", "jamba", "bamba: four groups, biases", "falcon h1", "falcon h1: norm before the gate", "nemotron h",
    "granite hybrid", "lfm2: biases, width 4, untied", "qwen3 next", "qwen3.5", "olmo hybrid",
    "kimi linear", "bailing hybrid", "minimax", "lfm3", "recurrent gemma", "rwkv",
)  # fmt: skip
ONE_GROUP = {
    "mamba2: one group": ("Mamba2ForCausalLM", {"n_groups": 1}),
    "falcon h1: one group, norm before the gate": (
        "FalconH1ForCausalLM",
        {"mamba_n_groups": 1, "mamba_rms_norm": True},
    ),
}
ADAPTED = {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "use_mem_rope": True}
ZAMBA2 = {
    "zamba2: two blocks": ("Zamba2ForCausalLM", {**ADAPTED, "num_mem_blocks": 2, "mamba_ngroups": 2}),
    "zamba2: attention adapted, one block twice": (
        "Zamba2ForCausalLM",
        {**ADAPTED, "num_mem_blocks": 1, "use_shared_attention_adapter": True, "num_key_value_heads": 4},
    ),
    "zamba2: biases, untied": (
        "Zamba2ForCausalLM",
        {**ADAPTED, "tie_word_embeddings": False, "add_bias_linear": True, "adapter_rank": 3},
    ),
}
FOUR_RANKS = ("FalconH1ForCausalLM", {"mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_rms_norm": True})


@pytest.fixture(autouse=True)
def restored_choice(kept_selection: None) -> None:
    """Which kernels are chosen is the process's state: other rooms' tests get back what they had."""


@pytest.mark.exhaustive
def test_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    check(2, tmp_path, {name: SHAPES[name] for name in NAMES} | ONE_GROUP, "native", tolerance=5e-4)


def test_ranks_share_zamba2s_blocks(tmp_path: Path) -> None:
    check(2, tmp_path, ZAMBA2, "native", tolerance=5e-4)


def test_fused_layers_over_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    names = ("mamba", "nemotron h", "qwen3.5")
    check(2, tmp_path, {name: SHAPES[name] for name in names} | ONE_GROUP, "fused", tolerance=5e-4)


@pytest.mark.exhaustive  # four processes; by default two ranks share a norm (ONE_GROUP)
def test_a_norm_may_go_over_several_of_four_ranks(tmp_path: Path) -> None:
    check(4, tmp_path, {"mamba2": SHAPES["mamba2"], "falcon h1": FOUR_RANKS}, "native")


class FirstOfTwo(SingleRank):
    size = 2


@pytest.mark.parametrize(
    ("architecture", "overrides", "message"),
    [
        ("NemotronHForCausalLM", {"n_groups": 3, "mamba_num_heads": 9}, r"layers\.0\.ssm_in: 9 is"),
        ("Qwen3NextForCausalLM", {"linear_num_key_heads": 1}, r"layers\.0\.delta_out: it has 1 parts"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_numbers(architecture, overrides, message, tmp_path):
    ops.select("any")
    path = make_tiny_model(architecture, tmp_path, tokenizer=False, **overrides)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size=2 does not fit {message}"):
        build_tiny(path, communicator=FirstOfTwo())
