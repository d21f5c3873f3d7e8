"""Mixtures over several processes: every expert split, or each rank with some of them whole, gives what one process gives."""

from pathlib import Path

import pytest
from tests.distributed.test_models_over_ranks import check, restored_choice
from tests.models.test_parity_moe import SHAPES

from quire.errors import ConfigError
from quire.layers.parallel import ParallelPlan

__all__ = ["restored_choice"]

QUICK = ("gpt-oss", "llama4", "glm4 moe", "phimoe", "granite moe shared", "deepseek v2: groups")


@pytest.mark.parametrize(
    ("experts", "kernels", "count"), [("split", "native", 6), ("whole", "native", 4), ("whole", "fused", 2)]
)
def test_two_ranks_compute_what_one_computes(experts, kernels, count, tmp_path: Path) -> None:
    check(2, tmp_path, {name: SHAPES[name] for name in QUICK[:count]}, kernels, experts=experts)


@pytest.mark.parametrize(("ranks", "kernels", "count"), [(2, "native", 4), (2, "fused", 2), (4, "native", 2)])
def test_tokens_that_go_to_their_experts_compute_what_one_computes(ranks, kernels, count, tmp_path: Path) -> None:
    check(ranks, tmp_path, {name: SHAPES[name] for name in QUICK[:count]}, kernels, experts="exchanged")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernels", ["native", "reference", "fused"])
@pytest.mark.parametrize("experts", ["split", "whole", "exchanged"])
def test_every_mixture_over_two_ranks(experts, kernels, tmp_path: Path) -> None:
    check(2, tmp_path, SHAPES, kernels, experts=experts)


def test_whole_experts_are_shared_out_in_order_and_all_of_them():
    shares = [ParallelPlan(3, rank, expert_parallel=True).experts(8) for rank in range(3)]
    assert shares == [slice(0, 2), slice(2, 5), slice(5, 8)]


def test_ranks_without_an_expert_are_refused():
    with pytest.raises(ConfigError, match="2 experts for tensor_parallel_size=4") as refused:
        ParallelPlan(4, 0, expert_parallel=True).experts(2)
    assert refused.value.setting == "enable_expert_parallel"
