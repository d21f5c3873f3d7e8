"""Mixtures of experts on an NVIDIA GPU: sends each mixture to the kernels for its number of tokens.

A few tokens are three launches: logits, both halves of the experts. More are six: norm, logits, the choice, two
grouped products, and the sum over each token's experts with the residual. The functions named `invariant_…` compute every
token in one way, whatever the number of tokens.
"""

from typing import Any

import torch

from quire.kernels import ops
from quire.kernels.registry import kernel
from quire.kernels.triton.experts import configs as moe_configs
from quire.kernels.triton.experts.configs import Config, FewConfig, ManyConfig
from quire.kernels.triton.experts.few import fits, launch_few_down, launch_few_gate_up
from quire.kernels.triton.experts.grouped import GroupedConfig, launch_combine, launch_grouped
from quire.kernels.triton.experts.packed import PackedConfig, launch_packed_experts
from quire.kernels.triton.experts.route import launch_choose, launch_lists
from quire.kernels.triton.launch import two_ways
from quire.kernels.types import ExpertCodes, ExpertScratch, ExpertWeights, LinearWeight, Routing


def _config(
    x_TD: torch.Tensor, experts: ExpertWeights, top_k: int, scratch: ExpertScratch, is_invariant: bool
) -> Config:
    if is_invariant:
        return _invariant_config(experts)
    num_experts, item_size = len(scratch.counts_E), experts.down_EDI.element_size()
    config = moe_configs.choose(x_TD.shape[0], num_experts, top_k, item_size)
    if isinstance(config, FewConfig) and not (fits(experts) and _are_plain(experts, scratch)):
        return moe_configs.choose(moe_configs.MAX_FEW_TOKENS + 1, num_experts, top_k, item_size)
    return config


def _are_plain(experts: ExpertWeights, scratch: ExpertScratch) -> bool:
    """Whether all experts are here, as values, and have gates and neither biases nor ways of their own."""
    own_ways = experts.clamp is not None or experts.scales_input or experts.gate_up_bias_E2I is not None
    own_ways |= experts.gate_up_codes is not None or experts.down_codes is not None
    return not own_ways and experts.is_gated and _are_all(experts, scratch)


def _are_all(experts: ExpertWeights, scratch: ExpertScratch) -> bool:
    return experts.count == scratch.counts_E.shape[0]


def _is_plain(routing: Routing) -> bool:
    """Whether a choice is so little work that every program may make it for itself: no groups, not one after the other."""
    return routing.top_groups >= routing.groups and routing.scoring != "sparsemixer"


def _invariant_config(experts: ExpertWeights) -> ManyConfig:
    is_float = experts.down_EDI.dtype == torch.float32
    return moe_configs.INVARIANT_FLOAT if is_float else moe_configs.INVARIANT


@kernel("moe_route", platform="cuda", priority=10)
def moe_route(
    logits_TE: torch.Tensor,
    routing: Routing,
    num_tokens: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    bias_E: torch.Tensor | None = None,
) -> None:
    """As `ops.moe_route`."""
    if not logits_TE.shape[0]:
        return
    launch_choose(logits_TE, routing, num_tokens, ids_TK, weights_TK, bias_E)


def _product(
    x: torch.Tensor,
    matrix: torch.Tensor | ExpertCodes,
    out_PN: torch.Tensor,
    pairs: int,
    scratch: ExpertScratch,
    plain: GroupedConfig,
    packed: PackedConfig,
    **how: Any,
) -> None:
    """One product over the scratch's lists, with a plain matrix or a packed one; `how` as `launch_grouped` has it."""
    if isinstance(matrix, torch.Tensor):
        launch_grouped(x, matrix, out_PN, pairs, scratch, plain, **how)
    else:
        launch_packed_experts(x, matrix, out_PN, pairs, scratch, packed, **how)


def _experts_of_many(
    config: ManyConfig,
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    experts: ExpertWeights,
    kind: str,
    num_tokens: torch.Tensor,
    out_TD: torch.Tensor,
    scratch: ExpertScratch,
    *,
    add: bool,
) -> None:
    """Both products over the scratch's lists, and the sum."""
    top_k = ids_TK.shape[1]
    pairs, scaled = x_TD.shape[0] * top_k, experts.scales_input
    gated, plain = (kind, None) if experts.is_gated else (None, kind)
    _product(
        x_TD,
        experts.gate_up_codes or experts.gate_up_E2ID,
        scratch.activated_PI,
        pairs,
        scratch,
        config.gate_up,
        config.packed,
        divisor=top_k,
        kind=gated,
        activation=plain,
        scaled=scaled,
        bias=experts.gate_up_bias_E2I,
        clamp=experts.clamp,
    )
    _product(
        scratch.activated_PI,
        experts.down_codes or experts.down_EDI,
        scratch.out_PD,
        pairs,
        scratch,
        config.down,
        config.packed,
        divisor=1,
        weighted=not scaled,
        bias=experts.down_bias_ED,
    )
    ids = None if _are_all(experts, scratch) else ids_TK
    launch_combine(out_TD, num_tokens, scratch, top_k, add=add, ids_TK=ids, first=experts.first, count=experts.count)


def _few_down(
    config: FewConfig,
    experts: ExpertWeights,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    num_tokens: torch.Tensor,
    out_TD: torch.Tensor,
    scratch: ExpertScratch,
    *,
    add: bool,
) -> None:
    launch_few_down(
        experts,
        num_tokens,
        ids_TK,
        weights_TK,
        out_TD,
        scratch,
        add=add,
        block_n=config.down_n,
        block_k=config.down_k,
        num_warps=config.down_warps,
    )


@two_ways("moe_experts")
def moe_experts(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: ExpertWeights,
    kind: str,
    num_tokens: torch.Tensor,
    out_TD: torch.Tensor,
    scratch: ExpertScratch,
    *,
    is_invariant: bool = False,
) -> None:
    """As `ops.moe_experts`."""
    if not x_TD.shape[0]:
        return
    config = _config(x_TD, experts, ids_TK.shape[1], scratch, is_invariant)
    if isinstance(config, FewConfig):
        launch_few_gate_up(
            x_TD,
            None,
            0.0,
            experts,
            None,
            ids_TK.shape[1],
            kind,
            num_tokens,
            ids_TK,
            weights_TK,
            scratch,
            None,
            block_n=config.gate_up_n,
            block_k=config.gate_up_k,
            num_warps=config.gate_up_warps,
        )
        _few_down(config, experts, ids_TK, weights_TK, num_tokens, out_TD, scratch, add=False)
        return
    if weights_TK.data_ptr() != scratch.weights_TK.data_ptr():
        scratch.weights_TK[: len(weights_TK)].copy_(weights_TK)
    launch_lists(ids_TK, num_tokens, scratch, experts.first, experts.count)
    _experts_of_many(config, x_TD, ids_TK, experts, kind, num_tokens, out_TD, scratch, add=False)


@two_ways("norm_moe")
def norm_moe(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    router: LinearWeight,
    routing: Routing,
    experts: ExpertWeights,
    kind: str,
    num_tokens: torch.Tensor,
    scratch_TD: torch.Tensor,
    scratch: ExpertScratch,
    bias_E: torch.Tensor | None = None,
    *,
    is_invariant: bool = False,
) -> None:
    """As `ops.norm_moe`."""
    if not x_TD.shape[0]:
        return
    rows, top_k = x_TD.shape[0], routing.top_k
    config = _config(x_TD, experts, top_k, scratch, is_invariant)
    logits_TE, ids_TK, weights_TK = scratch.logits_TE[:rows], scratch.ids_TK[:rows], scratch.weights_TK[:rows]
    if isinstance(config, FewConfig) and _is_plain(routing):
        ops.norm_linear(x_TD, norm_D, eps, router, logits_TE, scratch_TD)
        launch_few_gate_up(
            x_TD,
            norm_D,
            eps,
            experts,
            routing,
            top_k,
            kind,
            num_tokens,
            ids_TK,
            weights_TK,
            scratch,
            bias_E,
            block_n=config.gate_up_n,
            block_k=config.gate_up_k,
            num_warps=config.gate_up_warps,
        )
        _few_down(config, experts, ids_TK, weights_TK, num_tokens, x_TD, scratch, add=True)
        return
    ops.rms_norm(x_TD, norm_D, eps, scratch_TD)
    ops.linear(scratch_TD, router, logits_TE)
    if not _are_all(experts, scratch):
        launch_choose(logits_TE, routing, num_tokens, ids_TK, weights_TK, bias_E)
        launch_lists(ids_TK, num_tokens, scratch, experts.first, experts.count)
    else:
        launch_choose(logits_TE, routing, num_tokens, ids_TK, weights_TK, bias_E, scratch)
    many = config if isinstance(config, ManyConfig) else _invariant_config(experts)
    _experts_of_many(many, scratch_TD, ids_TK, experts, kind, num_tokens, x_TD, scratch, add=True)
