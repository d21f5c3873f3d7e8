"""What operations take besides tensors: weights, their constants, rotary tables, routing and room to work in.

Knows shapes and types; computes nothing, and imports nothing else of this package.
Legend: N outputs, K inputs, G groups of K / G adjacent columns; of experts: T tokens, E experts, K experts a token (top_k),
D hidden, I an expert's intermediate size on this rank; of recurrent layers: N heads, S numbers of a state, C channels.
"""

import dataclasses
from typing import Literal, TypeAlias

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


@dataclasses.dataclass
class LinearWeight:
    """A weight [N, K] as the chosen `linear` wants it.

    Attributes:
        dtype: the weight's logical type.
        data: the original [N, K] tensor, or None once a kernel has packed it into its own layout and dropped it.
        packed: the kernel's own layout, or None.
        bias: float32 [N], or None.
        name: of the model's module that it is, by which adapters find it.
    """

    out_features: int
    in_features: int
    dtype: torch.dtype
    data: Tensor | None
    packed: Tensor | None = None
    bias: Tensor | None = None
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `rotary_dim` values of a head.

    Attributes:
        cos_sin: float32 [max_positions, rotary_dim]: cosines, then sines.
        interleaved: pairs are (0, 1), (2, 3) … (GPT-J style) rather than (i, i + rotary_dim / 2).
        is_by_token: row t is of the step's token t, whose `positions` says so; a request's length does not tell the row.
    """

    cos_sin: Tensor
    rotary_dim: int
    interleaved: bool = False
    is_by_token: bool = False


@dataclasses.dataclass
class HeadWeight:
    """A matrix [M, K] a head, as the chosen `head_linear` wants them.

    Attributes:
        data: [N, M, K], or None once a kernel has packed it into its own layout and dropped it.
        packed: the kernel's own layout, or None.
    """

    heads: int
    out_features: int
    in_features: int
    dtype: torch.dtype
    data: Tensor | None
    packed: Tensor | None = None


@dataclasses.dataclass(kw_only=True)
class Fp8Weight(LinearWeight):
    """A float8 weight; `data` is [N, K] in float8, `dtype` the type of the model.

    Attributes:
        scale: float32 [N].
        input_scale: float32 [1] that rows of the input are divided by; None: each by its own largest magnitude.
    """

    scale: Tensor
    input_scale: Tensor | None = None


class Fp8Scratch:
    """Memory that the operations may overwrite: allocated once, for the largest step.

    Args:
        max_tokens: rows of the largest step.
        max_inputs: the widest matrix's K.
    """

    PARTIALS = 1 << 22
    """Numbers for sums over parts of K."""
    COUNTERS = 4096

    def __init__(self, max_tokens: int, max_inputs: int, device: torch.device) -> None:
        self._scales = torch.ones(2, max_tokens, dtype=torch.float32, device=device)
        self._quantized = torch.zeros(max_tokens * max_inputs, dtype=FP8, device=device)
        self.partial = torch.zeros(self.PARTIALS, dtype=torch.float32, device=device)
        self.counters = torch.zeros(self.COUNTERS, dtype=torch.int32, device=device)
        """Zero between operations."""
        self.one = torch.ones((), dtype=torch.float32, device=device)

    @property
    def num_bytes(self) -> int:
        """Device memory of all of it."""
        parts = (self._scales, self._quantized, self.one, self.partial, self.counters)
        return sum(part.numel() * part.element_size() for part in parts)

    def rows(self, count: int, inputs: int, second: bool = False) -> tuple[Tensor, Tensor]:
        """(float8 [T, K], float32 [T]) for a quantized input. The second has scales of its own, and the same float8."""
        return self._quantized[: count * inputs].view(count, inputs), self._scales[int(second), :count]


@dataclasses.dataclass(kw_only=True)
class PackedWeight(LinearWeight):
    """A weight-only format's weight. `data` holds the codes, `dtype` is the type of the model.

    Codes of 4 bits: uint8 [N, K/2], the low half of a byte is the even column; a code's value is itself (0 to 15), or
    `table[code]`. Codes of 8 bits: int8 [N, K], or float8 (e4m3) where a device has kernels for that (GPUs); a code's value is
    itself. A kernel that packs a weight into its own layout may leave None in place of every tensor but the bias.

    Attributes:
        scale: float32 [N, G].
        zero: float32 [N, G], in units of a code's value; None: 0 everywhere.
        table: float32 [16], only with 4 bits.
        perm: int32 [K]: column k of the codes multiplies x[perm[k]]; None: they are in order.
        layout: what the kernel that packed it knows of its own layout.
    """

    scale: Tensor | None
    zero: Tensor | None = None
    table: Tensor | None = None
    perm: Tensor | None = None
    layout: object = None

    def plain(self) -> tuple[Tensor, Tensor]:
        """(codes, scale).

        Raises:
            ValueError: a kernel has packed them and dropped these.
        """
        if self.data is None or self.scale is None:
            raise ValueError(
                "this weight was packed by another kernel: choose `pack_codes` and `packed_linear` together"
            )
        return self.data, self.scale


@dataclasses.dataclass(kw_only=True)
class ExpertCodes(PackedWeight):
    """One of the two matrices of a mixture's experts, of all of them, in the layout of the kernel that packed it. Rows, columns
    and type are one expert's.

    Attributes:
        count: experts.
    """

    count: int

    def shape_only(self) -> Tensor:
        """[count, rows, columns] without values."""
        return torch.empty(self.count, self.out_features, self.in_features, dtype=self.dtype, device="meta")


@dataclasses.dataclass(kw_only=True)
class Int8Weight(LinearWeight):
    """A weight whose products take inputs in int8 too. `data` is int8 [N, K] until a kernel packs it, `dtype` the model's.

    Attributes:
        scale: float32 [N]; a weight's value is its code times it.
        input_scale: float32 [1] that rows of the input are divided by; None: each by its largest magnitude / 127.
        layout: what the kernel that packed it knows of its own layout.
    """

    scale: Tensor
    input_scale: Tensor | None = None
    layout: object = None


@dataclasses.dataclass(frozen=True)
class Routing:
    """From a token's logits over experts to its experts and their weights.

    Scores are softmax, sigmoid or the root of softplus of the logits, in float32. The `top_k` largest are chosen (of equals the
    first, also of groups); with a bias (DeepSeek-V3's `e_score_correction_bias`) the largest of score + bias, but weights stay
    the scores.
    Softmax with `renormalize` is also the softmax over the chosen logits alone.

    `sparsemixer` (https://arxiv.org/abs/2409.12136, as evaluated) chooses by the logits; a choice's weight is its softmax
    over the experts that no earlier choice took and whose logit l is close to the choice's own c:
    c - l <= 2 * jitter * max(|l|, c).

    Attributes:
        renormalize: a token's weights are divided by their sum.
        groups, top_groups: experts come in equal groups, and only those of the best groups can be chosen. A group is worth
            its largest score, or with a bias the sum of its two largest (score + bias).
        scale: multiplies the weights, last.
        jitter: of `sparsemixer`.
        cap: logits become cap * tanh(logits / cap) before they are routed; 0 means they do not.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid", "sparsemixer", "sqrtsoftplus"] = "softmax"
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    jitter: float = 0.0
    cap: float = 0.0


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """GptOss' way from gate and up to the activation: with g = min(gate, limit), g * sigmoid(alpha * g) * (offset + up between
    -limit and limit); the offset is 1 or 0. `gate_limit`: of the gate, where it is not the limit; kernels do not know it."""

    alpha: float
    limit: float
    offset: int = 1
    gate_limit: float | None = None


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """A layer's experts on one rank. Here E are the rank's own.

    Attributes:
        gate_up_E2ID: rows are the gate's, then up's; [E, I, D] where experts have no gate.
        down_EDI: the way back.
        gate_up_bias_E2I, down_bias_ED: float32, or None.
        clamp: in place of the activation that an operation is told.
        scales_input: a token's weight multiplies what its expert reads rather than what it gives.
        first: the router's number of the first expert here; a token's experts on other ranks add nothing.
        gate_up_codes, down_codes: a matrix in the place of the one above, which has a shape and no values then (`meta`).
    """

    gate_up_E2ID: Tensor
    down_EDI: Tensor
    gate_up_bias_E2I: Tensor | None = None
    down_bias_ED: Tensor | None = None
    clamp: ClampedSwiglu | None = None
    scales_input: bool = False
    first: int = 0
    gate_up_codes: ExpertCodes | None = None
    down_codes: ExpertCodes | None = None

    @property
    def count(self) -> int:
        """E."""
        return self.down_EDI.shape[0]

    @property
    def is_gated(self) -> bool:
        """Whether an expert is down(act(gate(x)) * up(x)) rather than down(act(up(x)))."""
        return self.gate_up_E2ID.shape[1] != self.intermediate

    @property
    def intermediate(self) -> int:
        """I."""
        return self.down_EDI.shape[2]


class ExpertScratch:
    """Buffers that every mixture of a model uses, one after another: allocated once, for the largest step.

    Attributes:
        capacity: tokens it is made for.
        logits_TE: float32.
        ids_TK: int32; a token's experts.
        weights_TK: float32; what their outputs are multiplied with.
        activated_PI: model type; P = T * K pairs of a token and one of its experts, or T where kernels keep pairs elsewhere.
        out_PD: model type; what each pair's expert gives.
        lists_ET: int32; each expert's pairs in any order.
        counts_E: int32; how many those are. Zero between operations: who reads it last clears it.
    """

    def __init__(
        self,
        *,
        capacity: int,
        num_experts: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype,
        device: torch.device,
        has_pairs: bool = True,
    ) -> None:
        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.capacity = capacity
        self.logits_TE = buffer(capacity, num_experts, dtype=torch.float32)
        self.ids_TK = buffer(capacity, top_k, dtype=torch.int32)
        self.weights_TK = buffer(capacity, top_k, dtype=torch.float32)
        pairs = capacity * top_k if has_pairs else capacity
        self.activated_PI = buffer(pairs, intermediate, dtype=dtype)
        self.out_PD = buffer(pairs, hidden, dtype=dtype)
        self.lists_ET = buffer(num_experts, capacity if has_pairs else 0, dtype=torch.int32)
        self.counts_E = buffer(num_experts, dtype=torch.int32)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(value.numel() * value.element_size() for value in vars(self).values() if torch.is_tensor(value))


@dataclasses.dataclass(frozen=True)
class SsdWeights:
    """A head's constants: float32 [N] each. `a` is negative; `dt_min` and `dt_max` bound the time step."""

    a_N: Tensor
    d_N: Tensor
    dt_bias_N: Tensor
    dt_min: float = 0.0
    dt_max: float = float("inf")


@dataclasses.dataclass(frozen=True)
class DeltaWeights:
    """A head's constants, float32: `a` [N], which is negative, and `dt_bias` [N], or [N, S] where the numbers of a state have
    decays of their own. `beta_scale` multiplies the strength of a write. `floor` (negative) bounds the logarithm of a decay:
    it is floor * sigmoid(-a * (input + dt_bias)); 0: it has no bound and is a * softplus(input + dt_bias)."""

    a_N: Tensor
    dt_bias_N: Tensor
    beta_scale: float = 1.0
    floor: float = 0.0


@dataclasses.dataclass(frozen=True)
class LruWeights:
    """A channel's constants, float32 [C] each: `a` is negative, the biases belong to the gates."""

    a_C: Tensor
    input_bias_C: Tensor
    forget_bias_C: Tensor


@dataclasses.dataclass
class Compressor:
    """How R rows become one vector of `size` values.

    Attributes:
        column: of a row where its values begin, L * size of them; as many weights follow.
        bias: [R, L * size] float32, added to weights by the place in the window.
        norm: float32 [size], of an RMS norm of the result.
        first: where the result begins in a compressed token.
    """

    column: int
    size: int
    rate: int
    overlaps: bool
    bias: Tensor
    norm: Tensor
    eps: float
    rope: Rope
    first: int


StreamWeights: TypeAlias = tuple[Tensor, Tensor | None]
"""What an output is multiplied with for each stream [T, N], and the matrix that mixes streams [T, N from, N to], or None."""
