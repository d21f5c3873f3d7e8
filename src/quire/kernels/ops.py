"""The operations that models are made of. `ops.rms_norm(...)` calls the implementation that was chosen at `select`.

Every operation writes into a tensor given as `out` (or in place), so that a step allocates nothing and can be recorded.
Rows (first dimension) are tokens or requests; everything is contiguous unless a row stride is spoken of.

Legend: T rows (tokens), D hidden, I intermediate, N query heads, K KV heads, H head size, V vocabulary, P pages,
S tokens a page.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels import registry
from quire.kernels.experts import ExpertScratch, ExpertWeights, Routing
from quire.kernels.step_buffers import StepBuffers


@dataclasses.dataclass
class LinearWeight:
    """A weight [N, K] as the chosen `linear` wants it.

    Attributes:
        dtype: the weight's logical type.
        data: the original [N, K] tensor, or None once a kernel has packed it into its own layout and dropped it.
        packed: the kernel's own layout, or None.
        bias: float32 [N], or None.
    """

    out_features: int
    in_features: int
    dtype: torch.dtype
    data: torch.Tensor | None
    packed: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `rotary_dim` values of a head.

    Attributes:
        cos_sin: float32 [max_positions, rotary_dim]: cosines, then sines.
        interleaved: pairs are (0, 1), (2, 3) … (GPT-J style) rather than (i, i + rotary_dim / 2).
    """

    cos_sin: torch.Tensor
    rotary_dim: int
    interleaved: bool = False


COMPOSED = ("norm_linear", "norm_linear_gated", "linear_add", "norm_moe", "allowed_gumbel_argmax")
"""Operations that are several others in one pass: a platform needs no kernels of its own for them."""
PLAIN = (
    *(
        "add_chosen_inputs",
        "choose_blocks",
        "choose_tokens",
        "chosen_attention",
        "compress",
        "index_and_cache",
        "keep_rows",
    ),
    *("read_streams", "rotate_last", "route_plainly", "scale_choices", "window_attention", "write_streams"),
)
"""Operations of rare architectures that only plain PyTorch computes, on every platform."""
ASYNCHRONOUS = (
    "unpack_step",
    "keep_tokens",
    "filtered_gumbel_argmax",
    "hide_below",
    "penalize",
    "count_tokens",
    "edit_logits",
    "keep_allowed",
    "token_logprobs",
)
"""Operations that only devices need which work beside the host."""

_chosen: dict[str, Callable[..., Any]] = {}
_choices: dict[str, registry.Choice] = {}


def select(platform: str, *, deterministic: bool = False) -> None:
    """Choose an implementation for every operation; called once by the platform, before a model is built.

    Args:
        deterministic: only implementations whose rows do not depend on the batch.
    """
    import quire.kernels.reference  # registers the references  # noqa: F401

    for op in registry.operations():
        choice = registry.choose(op, platform, deterministic=deterministic)
        _choices[op] = choice
        _chosen[op] = choice.chosen.function


def choices() -> dict[str, registry.Choice]:
    """What was chosen, by operation."""
    return dict(_choices)


def explain() -> dict[str, Any]:
    """What was chosen, by operation, as plain values; and why the others were passed over."""
    return {
        op: {
            "chosen": choice.chosen.platform,
            "function": f"{choice.chosen.function.__module__}.{choice.chosen.function.__qualname__}",
            "priority": choice.chosen.priority,
            "owner": choice.chosen.owner,
            "passed_over": [{"platform": other.platform, "why": why} for other, why in choice.passed_over],
        }
        for op, choice in sorted(_choices.items())
    }


def chosen(op: str) -> Callable[..., Any]:
    """The implementation that was chosen, for operations whose signatures stand elsewhere (`kernels/fp8.py`)."""
    return _chosen[op]


def is_native(op: str) -> bool:
    """Whether an implementation of the platform's own was chosen, rather than the plain PyTorch reference."""
    choice = _choices.get(op)
    return choice is not None and choice.chosen.platform != "any"


def pack_linear(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> LinearWeight:
    """Prepare a weight for `linear` (and, for tied embeddings, for `embedding`). May drop the original layout."""
    return _chosen["pack_linear"](weight_NK, bias_N)


def linear(x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
    """out = x @ weight.T (+ bias); accumulates in float32."""
    _chosen["linear"](x_TK, weight, out_TN)


def norm_linear(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    weight: LinearWeight,
    out_TN: torch.Tensor,
    scratch_TD: torch.Tensor,
) -> None:
    """out = rms_norm(x) @ weight.T (+ bias); x stays as it is. norm_D is the norm's float32 weight; the scratch, of x's
    type, may be overwritten."""
    _chosen["norm_linear"](x_TD, norm_D, eps, weight, out_TN, scratch_TD)


def norm_linear_gated(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    weight: LinearWeight,
    kind: str,
    out_TI: torch.Tensor,
    scratch_TD: torch.Tensor,
    scratch_T2I: torch.Tensor,
) -> None:
    """y = rms_norm(x) @ weight.T (+ bias), then out = act(y[:, :I]) * y[:, I:]: the weight's rows are gate, then up; `kind`
    as in `gated_activation`. x stays as it is; both scratches may be overwritten."""
    _chosen["norm_linear_gated"](x_TD, norm_D, eps, weight, kind, out_TI, scratch_TD, scratch_T2I)


def linear_add(x_TK: torch.Tensor, weight: LinearWeight, residual_TN: torch.Tensor) -> None:
    """residual += x @ weight.T (+ bias)."""
    _chosen["linear_add"](x_TK, weight, residual_TN)


def embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor, scale: float = 1.0) -> None:
    """out[t] = weight[ids[t]] * scale; ids are int32."""
    _chosen["embedding"](ids_T, weight, out_TD, scale)


def add_embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor) -> None:
    """out[t] += weight[ids[t]] (learned positions); ids are int32."""
    _chosen["add_embedding"](ids_T, weight, out_TD)


def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
) -> None:
    """With a residual: residual += x first (in place), and the sum is normed. weight is float32. `out` may be `x`."""
    _chosen["rms_norm"](x_TD, weight_D, eps, out_TD, residual_TD)


def layer_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
) -> None:
    """As `rms_norm`, with mean and bias."""
    _chosen["layer_norm"](x_TD, weight_D, bias_D, eps, out_TD, residual_TD)


def add(x_TD: torch.Tensor, out_TD: torch.Tensor, scale: float = 1.0) -> None:
    """out += x * scale."""
    _chosen["add"](x_TD, out_TD, scale)


def gated_activation(x_T2I: torch.Tensor, kind: str, out_TI: torch.Tensor) -> None:
    """out = act(x[:, :I]) * x[:, I:]; kind is a name in `reference.elementwise.ACTIVATIONS`."""
    _chosen["gated_activation"](x_T2I, kind, out_TI)


def activation(x_TI: torch.Tensor, kind: str) -> None:
    """x = act(x), in place; kinds as above."""
    _chosen["activation"](x_TI, kind)


def rope_and_cache(
    qkv_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope: Rope | None,
    q_norm_H: torch.Tensor | None = None,
    k_norm_H: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """What comes between the qkv projection and attention, for each token: RMS-norm of every query and key head (if
    weights are given), rotary embedding at its position (if any), keys and values written to its slot of the cache.
    Queries change in place; C = (N + 2K) * H. The cache is [2, P, K, S, H] in its own dtype; in float8 it holds keys and values
    divided by their scales, which kernels without float8 are not given. Slots below 0 are skipped."""
    scales = (k_scale, v_scale) if kv_cache.dtype == torch.float8_e4m3fn else ()
    _chosen["rope_and_cache"](
        qkv_TC, kv_cache, metadata, num_heads, num_kv_heads, head_dim, rope, q_norm_H, k_norm_H, eps, *scales
    )


def paged_attention(
    qkv_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out_TNH: torch.Tensor,
) -> None:
    """Attention of the queries in the first N * H columns of `qkv` [T, ..] over pages, prefill and decode in one call. The
    cache is [2, P, K, S, H], whose planes and pages may have any stride: of 0 between planes, keys are values."""
    _chosen["paged_attention"](qkv_TC, kv_cache, metadata, params, out_TNH)


def moe_route(
    logits_TE: torch.Tensor,
    routing: Routing,
    num_tokens: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    bias_E: torch.Tensor | None = None,
) -> None:
    """Each token's experts, best first, as int32, and their float32 weights. Of T rows the first num_tokens[0] (int64, on
    the device) are the step's: the rest may be left as they were."""
    _chosen["moe_route"](logits_TE, routing, num_tokens, ids_TK, weights_TK, bias_E)


def pack_experts(experts: ExpertWeights) -> ExpertWeights:
    """Prepare experts for `moe_experts`. May drop the original layout: what remains tells shapes and types."""
    return _chosen["pack_experts"](experts)


def moe_experts(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: ExpertWeights,
    kind: str,
    num_tokens: torch.Tensor,
    out_TD: torch.Tensor,
    scratch: ExpertScratch,
) -> None:
    """out[t] = sum over k of weights[t, k] * down(act(gate(x[t])) * up(x[t])) of expert ids[t, k]; `kind` as in
    `activation`, and more as `ExpertWeights` says. Of T rows the first num_tokens[0] are the step's. `out` is not `x`."""
    _chosen["moe_experts"](x_TD, ids_TK, weights_TK, experts, kind, num_tokens, out_TD, scratch)


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
) -> None:
    """y = rms_norm(x), routed by y @ router.T, then x += the mixture of y's experts. scratch_TD may be overwritten."""
    _chosen["norm_moe"](x_TD, norm_D, eps, router, routing, experts, kind, num_tokens, scratch_TD, scratch, bias_E)


def sigmoid_gate(x_TI: torch.Tensor, gate_TG: torch.Tensor) -> None:
    """x *= sigmoid(gate), in place: one gate a row, or one a value. The gate's rows may lie apart."""
    _chosen["sigmoid_gate"](x_TI, gate_TG)


def gather_rows(x_TD: torch.Tensor, index_S: torch.Tensor, out_SD: torch.Tensor) -> None:
    """out[s] = x[index[s]]; index is int32."""
    _chosen["gather_rows"](x_TD, index_S, out_SD)


def scale_and_cap(x_TV: torch.Tensor, scale: float, soft_cap: float) -> None:
    """x = x * scale, then soft_cap * tanh(x / soft_cap) if soft_cap > 0; in place (logits)."""
    _chosen["scale_and_cap"](x_TV, scale, soft_cap)


def argmax(logits_SV: torch.Tensor, out_S: torch.Tensor) -> None:
    """Index of each row's largest value (the first of equals) as int32."""
    _chosen["argmax"](logits_SV, out_S)


def gumbel_argmax(
    logits_SV: torch.Tensor,
    inverse_temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    """Draw from softmax(logits * inverse_temperature): the largest of scaled logits plus Gumbel noise, as int32.

    The noise is a function of (seed, position, vocabulary index) alone, equal to the bit on every device; its definition
    is the docstring of `kernels/reference/sampling.py`. inverse_temperature is float32 > 0; infinity means greedy.
    seed and position are int64. Logits of minus infinity are never drawn. logits stay as they are."""
    _chosen["gumbel_argmax"](logits_SV, inverse_temperature_S, seed_S, position_S, out_S)


def allowed_gumbel_argmax(
    logits_SV: torch.Tensor,
    slots_S: torch.Tensor,
    allowed_XW: torch.Tensor,
    inverse_temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    """`keep_allowed`, then `gumbel_argmax`."""
    columns = inverse_temperature_S, seed_S, position_S, out_S
    _chosen["allowed_gumbel_argmax"](logits_SV, slots_S, allowed_XW, *columns)


def unpack_step(buffers: StepBuffers, max_tokens: int, max_requests: int) -> None:
    """Expand `buffers.packet` (see `kernels/step_buffers.py`) into the other buffers; entries behind the step's own counts,
    up to the two bounds, become harmless. Page tables are updated; ids of tokens that only the device knows are filled in."""
    _chosen["unpack_step"](buffers, max_tokens, max_requests)


def keep_tokens(token_ids_S: torch.Tensor, rows_S: torch.Tensor, last_token_R: torch.Tensor) -> None:
    """last_token[rows[s]] = token_ids[s]: the next step's unpacking reads them there."""
    _chosen["keep_tokens"](token_ids_S, rows_S, last_token_R)


def filtered_gumbel_argmax(
    logits_SV: torch.Tensor,
    inverse_temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    threshold_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    """As `gumbel_argmax`, over what min-p, top-k (int32, 0 is off) and top-p (1 is off) leave; float32 logits stay as they
    are. The smallest logit that could be drawn is left in float32 threshold_S: minus infinity where a row drops nothing.
    What the filters mean, and their order, stands in `sample/filters.py`."""
    _chosen["filtered_gumbel_argmax"](
        logits_SV, inverse_temperature_S, top_k_S, top_p_S, min_p_S, seed_S, position_S, threshold_S, out_S
    )


def hide_below(logits_SV: torch.Tensor, threshold_S: torch.Tensor) -> None:
    """Logits under their row's threshold become minus infinity, in place."""
    _chosen["hide_below"](logits_SV, threshold_S)


def penalize(
    logits_SV: torch.Tensor,
    slots_S: torch.Tensor,
    repetition_S: torch.Tensor,
    frequency_S: torch.Tensor,
    presence_S: torch.Tensor,
    seen_ids_XC: torch.Tensor,
    seen_counts_XC: torch.Tensor,
    seen_sizes_X: torch.Tensor,
    longest: int,
) -> None:
    """Penalise the tokens that a row has seen, in place, as `sample/penalties.py` says. A row's slot (int32, -1 for none)
    names its distinct tokens and how often each was generated in the seen table (int32); no slot of these rows holds more
    than `longest` tokens."""
    _chosen["penalize"](
        logits_SV, slots_S, repetition_S, frequency_S, presence_S, seen_ids_XC, seen_counts_XC, seen_sizes_X, longest
    )


def count_tokens(
    token_ids_S: torch.Tensor,
    slots_S: torch.Tensor,
    seen_ids_XC: torch.Tensor,
    seen_counts_XC: torch.Tensor,
    seen_sizes_X: torch.Tensor,
) -> None:
    """Count each row's new token in its slot (-1 for none) of the seen table, which has room for it."""
    _chosen["count_tokens"](token_ids_S, slots_S, seen_ids_XC, seen_counts_XC, seen_sizes_X)


def edit_logits(
    logits_SV: torch.Tensor,
    slots_S: torch.Tensor,
    positions_S: torch.Tensor,
    edit_ids_XE: torch.Tensor,
    edit_values_XE: torch.Tensor,
    edit_until_XE: torch.Tensor,
) -> None:
    """The edits of each row's slot (int32, -1 for none), in place: to the logit of every id (-1: no edit) its float32 value
    is added; while the row's position is below `until` it is hidden instead. The ids of a slot are distinct."""
    _chosen["edit_logits"](logits_SV, slots_S, positions_S, edit_ids_XE, edit_values_XE, edit_until_XE)


def keep_allowed(logits_SV: torch.Tensor, slots_S: torch.Tensor, allowed_XW: torch.Tensor) -> None:
    """Hide what the row's slot (int32, -1 for none) does not allow: token t is bit t % 32 of int32 word t // 32."""
    _chosen["keep_allowed"](logits_SV, slots_S, allowed_XW)


def token_logprobs(
    logits_SV: torch.Tensor,
    index_N: torch.Tensor,
    token_ids_N: torch.Tensor,
    normalize: bool,
    values_NK: torch.Tensor,
    ids_NK: torch.Tensor,
    ranks_N: torch.Tensor,
) -> None:
    """For each n, of the float32 logits of row index[n]: first token_ids[n], then the K - 1 most likely tokens (the lower id
    first among equals; at most 64, and no more than there are). Values are log probabilities, or the logits themselves
    where `normalize` is False; ranks are the tokens' own, from 1. Everything else is int32."""
    _chosen["token_logprobs"](logits_SV, index_N, token_ids_N, normalize, values_NK, ids_NK, ranks_N)
