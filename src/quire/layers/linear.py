"""The door through which a linear layer's weight comes and is used: one method a number format.

A method knows which tensors a checkpoint holds for a matrix, how they become a `LinearWeight`, and which kernel multiplies it.
The layer that owns the weight knows none of it.
"""

import abc
from collections.abc import Sequence

import torch

from quire.config.hf_config import HFConfig
from quire.kernels import ops
from quire.kernels.ops import LinearWeight
from quire.platforms.interface import Capabilities


class LinearMethod(abc.ABC):
    """One format of linear weights."""

    name: str

    suffixes: tuple[str, ...]
    """What a checkpoint holds for a matrix besides its bias, e.g. ("weight", "weight_scale")."""

    @classmethod
    def from_config(cls, stored: HFConfig | None) -> "LinearMethod":
        """The method for a checkpoint that describes itself so (`quantization_config`), or for a plain one (None)."""
        return cls()

    def unavailable(self, capabilities: Capabilities) -> str | None:
        """Why a device cannot compute with this format; None if it can."""
        return None

    def of_module(self, sources: Sequence[str]) -> "LinearMethod":
        """The method that creates one matrix, by its checkpoint names without the model's prefix: a checkpoint may have left
        some in a plain type. This one's `apply` and its like take any of their weights."""
        return self

    def stored_dtype(self, suffix: str, dtype: torch.dtype) -> torch.dtype:
        """The type in which `create` wants a tensor of the checkpoint."""
        return dtype

    def scale_shape(self, suffix: str, rows: int) -> tuple[int, ...]:
        """Shape in the checkpoint of what stands beside a matrix of some rows; () is one number. `create` gets float32
        [rows] of it."""
        raise ValueError(f"{self.name} has no {suffix!r}")

    def reserve(self, max_tokens: int, max_inputs: int, device: torch.device) -> None:
        """Allocate what products need besides their operands; called once, before the first."""

    @property
    def scratch_bytes(self) -> int:
        """Device memory that `reserve` took."""
        return 0

    @abc.abstractmethod
    def create(self, tensors: dict[str, torch.Tensor], bias_N: torch.Tensor | None, dtype: torch.dtype) -> LinearWeight:
        """Prepare a weight from this rank's tensors by suffix. The tensors may be dropped or kept."""

    @abc.abstractmethod
    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        """out = x @ weight.T + bias."""

    # What a layer does around its matrices; a format overrides these where it can do it in fewer passes.

    def apply_normed(
        self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: LinearWeight, out_TN: torch.Tensor,
        scratch_TD: torch.Tensor,
    ) -> None:  # fmt: skip
        """out = rms_norm(x) @ weight.T + bias. `scratch` has x's shape and may be overwritten."""
        ops.rms_norm(x_TD, norm_D, eps, scratch_TD)
        self.apply(scratch_TD, weight, out_TN)

    def apply_normed_gated(
        self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: LinearWeight, kind: str,
        out_TI: torch.Tensor, scratch_TD: torch.Tensor, scratch_T2I: torch.Tensor,
    ) -> None:  # fmt: skip
        """out = act(gate) * up of rms_norm(x) @ weight.T + bias. Both scratches may be overwritten."""
        self.apply_normed(x_TD, norm_D, eps, weight, scratch_T2I, scratch_TD)
        ops.gated_activation(scratch_T2I, kind, out_TI)

    def apply_add(
        self, x_TK: torch.Tensor, weight: LinearWeight, residual_TN: torch.Tensor, scratch_TN: torch.Tensor
    ) -> None:
        """residual += x @ weight.T + bias. `scratch` has the residual's shape and may be overwritten."""
        self.apply(x_TK, weight, scratch_TN)
        ops.add(scratch_TN, residual_TN)

    def apply_gated_mlp(
        self, residual_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, gate_up: LinearWeight, kind: str,
        down: LinearWeight, narrow_TI: torch.Tensor, scratch_TD: torch.Tensor, scratch_T2I: torch.Tensor,
        delta_TD: torch.Tensor,
    ) -> None:  # fmt: skip
        """residual += down(act(gate) * up), with gate and up of rms_norm(residual). All but the residual may be overwritten."""
        self.apply_normed_gated(residual_TD, norm_D, eps, gate_up, kind, narrow_TI, scratch_TD, scratch_T2I)
        self.apply_add(narrow_TI, down, residual_TD, delta_TD)

    @abc.abstractmethod
    def weight_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        """Device memory of one weight."""


class UnquantizedLinear(LinearMethod):
    """Matrices in the model's own type."""

    name = "unquantized"
    suffixes = ("weight",)

    def create(self, tensors: dict[str, torch.Tensor], bias_N: torch.Tensor | None, dtype: torch.dtype) -> LinearWeight:
        return ops.pack_linear(tensors["weight"].to(dtype), bias_N)

    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        ops.linear(x_TK, weight, out_TN)

    def apply_normed(
        self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: LinearWeight, out_TN: torch.Tensor,
        scratch_TD: torch.Tensor,
    ) -> None:  # fmt: skip
        ops.norm_linear(x_TD, norm_D, eps, weight, out_TN, scratch_TD)

    def apply_normed_gated(
        self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: LinearWeight, kind: str,
        out_TI: torch.Tensor, scratch_TD: torch.Tensor, scratch_T2I: torch.Tensor,
    ) -> None:  # fmt: skip
        ops.norm_linear_gated(x_TD, norm_D, eps, weight, kind, out_TI, scratch_TD, scratch_T2I)

    def apply_add(
        self, x_TK: torch.Tensor, weight: LinearWeight, residual_TN: torch.Tensor, scratch_TN: torch.Tensor
    ) -> None:
        ops.linear_add(x_TK, weight, residual_TN)

    def weight_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        return out_features * in_features * dtype.itemsize
