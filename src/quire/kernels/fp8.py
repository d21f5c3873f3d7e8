"""Operations on matrices whose weights are float8 (e4m3, 3 bits of mantissa, up to 448), and what they take.

A weight's values are its float8 numbers times one float32 scale an output channel. Activations are multiplied either as
they are, or rounded to float8 with one scale a row: the row's largest magnitude becomes 448, or the scale is given.
Products are summed in float32.

Legend: T rows (tokens), N outputs, K inputs, D hidden, I intermediate.
"""

import dataclasses

import torch

from quire.kernels import ops
from quire.kernels.ops import LinearWeight

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_MIN_SCALE = 1e-12
"""Scales are at least this, so that rows of zeros stay zeros."""

OPERATIONS = (
    "fp8_quantize",
    "fp8_linear",
    "fp8_norm_linear",
    "fp8_norm_linear_gated",
    "fp8_linear_add",
    "fp8_gated_mlp",
)


@dataclasses.dataclass(kw_only=True)
class Fp8Weight(LinearWeight):
    """A float8 weight; `data` is [N, K] in float8, `dtype` the type of the model.

    Attributes:
        scale: float32 [N].
        input_scale: float32 [1] that rows of the input are divided by; None: each by its own largest magnitude.
    """

    scale: torch.Tensor
    input_scale: torch.Tensor | None = None


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

    def rows(self, count: int, inputs: int, second: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(float8 [T, K], float32 [T]) for a quantized input. The second has scales of its own, and the same float8."""
        return self._quantized[: count * inputs].view(count, inputs), self._scales[int(second), :count]


def fp8_quantize(
    x_TK: torch.Tensor, out_TK: torch.Tensor, scale_T: torch.Tensor, input_scale: torch.Tensor | None = None
) -> None:
    """out = x / scale in float8, beyond its range the largest; scale = input_scale, or max |x| / 448 of each row."""
    ops.chosen("fp8_quantize")(x_TK, out_TK, scale_T, input_scale)


def fp8_linear(x_TK: torch.Tensor, weight: Fp8Weight, out_TN: torch.Tensor, scratch: Fp8Scratch) -> None:
    """out = x @ weight.T (+ bias)."""
    ops.chosen("fp8_linear")(x_TK, weight, out_TN, scratch)


def fp8_norm_linear(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    weight: Fp8Weight,
    out_TN: torch.Tensor,
    scratch: Fp8Scratch,
) -> None:
    """out = rms_norm(x) @ weight.T (+ bias); x stays as it is."""
    ops.chosen("fp8_norm_linear")(x_TD, norm_D, eps, weight, out_TN, scratch)


def fp8_norm_linear_gated(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    weight: Fp8Weight,
    kind: str,
    out_TI: torch.Tensor,
    wide_T2I: torch.Tensor,
    scratch: Fp8Scratch,
) -> None:
    """y = rms_norm(x) @ weight.T (+ bias), then out = act(y[:, :I]) * y[:, I:]. x stays as it is; `wide` may be
    overwritten. Kinds are those of `ops.gated_activation`."""
    ops.chosen("fp8_norm_linear_gated")(x_TD, norm_D, eps, weight, kind, out_TI, wide_T2I, scratch)


def fp8_linear_add(
    x_TK: torch.Tensor, weight: Fp8Weight, residual_TN: torch.Tensor, delta_TN: torch.Tensor, scratch: Fp8Scratch
) -> None:
    """residual += x @ weight.T (+ bias); `delta` may be overwritten."""
    ops.chosen("fp8_linear_add")(x_TK, weight, residual_TN, delta_TN, scratch)


def fp8_gated_mlp(
    residual_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    gate_up: Fp8Weight,
    kind: str,
    down: Fp8Weight,
    wide_T2I: torch.Tensor,
    narrow_TI: torch.Tensor,
    delta_TD: torch.Tensor,
    scratch: Fp8Scratch,
) -> None:
    """residual += down(act(gate) * up), with gate and up of rms_norm(residual). `wide`, `narrow`, `delta` may be
    overwritten."""
    ops.chosen("fp8_gated_mlp")(
        residual_TD, norm_D, eps, gate_up, kind, down, wide_T2I, narrow_TI, delta_TD, scratch
    )  # fmt: skip
