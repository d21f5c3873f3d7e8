"""Float8 (e4m3) matrices: made at load from a plain checkpoint, or read from one that was stored so.

Knows scales and how checkpoints describe them; products belong to the operations of `kernels/fp8.py`. A plain checkpoint's
matrices get one scale an output channel, and activations one a token. Matrices that a checkpoint left in a plain type stay so.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

import torch

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.kernels import fp8
from quire.kernels.fp8 import FP8, Fp8Scratch, Fp8Weight
from quire.kernels.ops import LinearWeight
from quire.layers.linear import LinearMethod, UnquantizedLinear
from quire.platforms.interface import Capabilities

Granularity = Literal["tensor", "channel"]


@dataclasses.dataclass(frozen=True)
class StoredFp8:
    """What config.json says of a checkpoint's float8 matrices.

    Attributes:
        weights: one scale a tensor or one an output channel.
        static: activations are divided by a scale that the checkpoint holds, rather than by each token's own.
        ignored: matrices that are not in float8: names, their last parts, or `re:` and a regular expression.
    """

    weights: Granularity
    static: bool
    ignored: tuple[str, ...] = ()

    def ignores(self, source: str) -> bool:
        """Whether a matrix (its name without the model's prefix) is in a plain type."""
        return any(_matches(pattern, source) for pattern in self.ignored)


def _matches(pattern: str, source: str) -> bool:
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in (source, f"model.{source}"))
    return pattern == source or pattern.endswith(f".{source}") or source.endswith(f".{pattern}")


class Fp8Linear(LinearMethod):
    """Matrices in float8.

    Args:
        stored: how the checkpoint holds them; None: it is a plain one, and they are rounded when they are loaded.
    """

    name = "fp8"

    def __init__(self, stored: StoredFp8 | None = None) -> None:
        self.stored = stored
        self._plain = UnquantizedLinear()
        self._scratch: Fp8Scratch | None = None

    @property
    def suffixes(self) -> tuple[str, ...]:  # type: ignore[override]
        if self.stored is None:
            return ("weight",)
        return ("weight", "weight_scale", "input_scale") if self.stored.static else ("weight", "weight_scale")

    @classmethod
    def from_config(cls, stored: HFConfig | None) -> "Fp8Linear":
        return cls(None if stored is None else parse_fp8(stored))

    def unavailable(self, capabilities: Capabilities) -> str | None:
        return None if capabilities.fp8.value else capabilities.fp8.why

    def of_module(self, sources: Sequence[str]) -> LinearMethod:
        if self.stored is None:
            return self
        ignored = [source for source in sources if self.stored.ignores(source)]
        if ignored and len(ignored) < len(sources):
            raise ConfigError(
                f"the checkpoint stores {', '.join(ignored)} in a plain type, but not all of {', '.join(sources)}, which "
                f"are multiplied as one matrix",
                setting="quantization",
            )
        return self._plain if ignored else self

    def stored_dtype(self, suffix: str, dtype: torch.dtype) -> torch.dtype:
        if suffix != "weight":
            return torch.float32
        return dtype if self.stored is None else FP8

    def scale_shape(self, suffix: str, rows: int) -> tuple[int, ...]:
        by_channel = suffix == "weight_scale" and self.stored is not None and self.stored.weights == "channel"
        return (rows, 1) if by_channel else ()

    def reserve(self, max_tokens: int, max_inputs: int, device: torch.device) -> None:
        self._scratch = Fp8Scratch(max_tokens, max_inputs, device)

    @property
    def scratch_bytes(self) -> int:
        return 0 if self._scratch is None else self._scratch.num_bytes

    @property
    def _room(self) -> Fp8Scratch:
        if self._scratch is None:
            raise RuntimeError("reserve() comes before the first product")
        return self._scratch

    def create(self, tensors: dict[str, torch.Tensor], bias_N: torch.Tensor | None, dtype: torch.dtype) -> LinearWeight:
        weight = tensors["weight"]
        outputs, inputs = weight.shape
        bias = None if bias_N is None else bias_N.float()
        if self.stored is None:
            data = torch.empty(outputs, inputs, dtype=FP8, device=weight.device)
            scale = torch.empty(outputs, dtype=torch.float32, device=weight.device)
            fp8.fp8_quantize(weight.contiguous(), data, scale)
            return Fp8Weight(outputs, inputs, dtype, data, bias=bias, scale=scale)
        # Parts of one matrix share their input: what the largest of their scales holds, all of them hold.
        input_scale = tensors["input_scale"].max().reshape(1) if self.stored.static else None
        scale = tensors["weight_scale"]
        return Fp8Weight(outputs, inputs, dtype, weight, bias=bias, scale=scale, input_scale=input_scale)

    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        if isinstance(weight, Fp8Weight):
            fp8.fp8_linear(x_TK, weight, out_TN, self._room)
        else:
            self._plain.apply(x_TK, weight, out_TN)

    def apply_normed(
        self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: LinearWeight, out_TN: torch.Tensor,
        scratch_TD: torch.Tensor,
    ) -> None:  # fmt: skip
        if isinstance(weight, Fp8Weight):
            fp8.fp8_norm_linear(x_TD, norm_D, eps, weight, out_TN, self._room)
        else:
            self._plain.apply_normed(x_TD, norm_D, eps, weight, out_TN, scratch_TD)

    def apply_normed_gated(
        self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: LinearWeight, kind: str,
        out_TI: torch.Tensor, scratch_TD: torch.Tensor, scratch_T2I: torch.Tensor,
    ) -> None:  # fmt: skip
        if isinstance(weight, Fp8Weight):
            fp8.fp8_norm_linear_gated(x_TD, norm_D, eps, weight, kind, out_TI, scratch_T2I, self._room)
        else:
            self._plain.apply_normed_gated(x_TD, norm_D, eps, weight, kind, out_TI, scratch_TD, scratch_T2I)

    def apply_add(
        self, x_TK: torch.Tensor, weight: LinearWeight, residual_TN: torch.Tensor, scratch_TN: torch.Tensor
    ) -> None:
        if isinstance(weight, Fp8Weight):
            fp8.fp8_linear_add(x_TK, weight, residual_TN, scratch_TN, self._room)
        else:
            self._plain.apply_add(x_TK, weight, residual_TN, scratch_TN)

    def apply_gated_mlp(
        self, residual_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, gate_up: LinearWeight, kind: str,
        down: LinearWeight, narrow_TI: torch.Tensor, scratch_TD: torch.Tensor, scratch_T2I: torch.Tensor,
        delta_TD: torch.Tensor,
    ) -> None:  # fmt: skip
        if isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight):
            fp8.fp8_gated_mlp(
                residual_TD, norm_D, eps, gate_up, kind, down, scratch_T2I, narrow_TI, delta_TD, self._room
            )
        else:
            super().apply_gated_mlp(
                residual_TD, norm_D, eps, gate_up, kind, down, narrow_TI, scratch_TD, scratch_T2I, delta_TD
            )

    def weight_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        return out_features * (in_features + torch.float32.itemsize)


class CompressedFp8(Fp8Linear):
    """As the compressed-tensors library stores them: the same numbers, described in other words."""

    name = "compressed-tensors"

    @classmethod
    def from_config(cls, stored: HFConfig | None) -> "Fp8Linear":
        if stored is None:
            raise ConfigError(
                "quantization='compressed-tensors' needs a checkpoint that was stored so; use 'fp8' for a plain one",
                setting="quantization",
            )
        return cls(parse_compressed(stored))


def parse_fp8(section: HFConfig) -> StoredFp8:
    """A `quantization_config` with quant_method `fp8`: one scale a tensor.

    Raises:
        ConfigError: blocks with their own scales, or an unknown activation scheme.
    """
    blocks = section.get("weight_block_size")
    if blocks is not None:
        raise ConfigError(
            f"the checkpoint has float8 weights with a scale a block of {blocks}, which is not supported; supported are one "
            f"a tensor and one a channel. Use the plain checkpoint with quantization='fp8'",
            setting="quantization",
        )
    scheme = section.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise _refused("activation_scheme", scheme, "dynamic or static")
    ignored = section.get("ignored_layers") or section.get("modules_to_not_convert") or []
    return StoredFp8("tensor", scheme == "static", tuple(map(str, ignored)))


def parse_compressed(section: HFConfig) -> StoredFp8:
    """A `quantization_config` of the compressed-tensors library.

    Raises:
        ConfigError: anything but one group of float8 weights (a scale a tensor or channel) and float8 activations (a scale
            given, or a token's own).
    """
    stored_as = section.get("format")
    if stored_as not in ("float-quantized", "naive-quantized"):
        raise _refused("format", stored_as, "float-quantized")
    groups = section.get("config_groups")
    groups = groups.to_dict() if isinstance(groups, HFConfig) else {}
    if len(groups) != 1:
        raise _refused("config_groups", sorted(groups), "one group")
    (group,) = (HFConfig(values) for values in groups.values())
    weights, inputs = group.get("weights"), group.get("input_activations")
    for part, values in (("weights", weights), ("input_activations", inputs)):
        kind = (values.get("type"), values.get("num_bits")) if isinstance(values, HFConfig) else None
        if kind != ("float", 8):
            raise _refused(part, kind, "type float with num_bits 8")
    granularity = weights.get("strategy")
    if granularity not in ("tensor", "channel"):
        raise _refused("weights.strategy", granularity, "tensor or channel")
    static = not inputs.get("dynamic", False)
    if static and inputs.get("strategy") != "tensor":
        raise _refused("input_activations.strategy", inputs.get("strategy"), "tensor where scales are given")
    return StoredFp8(granularity, static, tuple(map(str, section.get("ignore") or [])))


def _refused(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(
        f"config.json's quantization_config has {name}={value!r}, which is not supported; supported: {allowed}",
        setting="quantization",
    )
