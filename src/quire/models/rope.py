"""Rotary position embedding: what a config says about it, and the cos/sin table that kernels read.

Every scaling scheme becomes one table computed at load, so that kernels know none of them. Legend: L positions, R rotary dim.
Schemes: linear (Chen et al. 2023), dynamic NTK, yarn (Peng et al. 2023), longrope (Ding et al. 2024), llama3, proportional.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError

Scaled: TypeAlias = tuple[torch.Tensor, float]
"""Frequencies, and the factor on cosines and sines."""
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How frequencies differ from the plain ones; field names are those of config.json.

    Attributes:
        kind: one of `SCALINGS`.
        original_max_positions: context length before it was stretched.
        share: of the pairs of `proportional`, which turn; the slower ones do not.
    """

    kind: str
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    attention_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `rotary_dim` values of a head, and of one more if they are odd in number; the other way
    round if `backwards`.

    Attributes:
        axes: where a token has a position on each of several axes, the axis that each pair turns by; else empty.
        exponents: of each pair, its frequency being theta ** -exponent; empty: they go evenly from 0 to 1.
        in_halves: in the checkpoint the first half of the pairs is the first half of a head, and the second the second.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    interleaved: bool = False
    backwards: bool = False
    axes: tuple[int, ...] = ()
    exponents: tuple[float, ...] = ()
    in_halves: bool = False

    @staticmethod
    def from_hf(hf: HFConfig, head_dim: int, layer_type: str | None = None, theta: float = 10000.0) -> Rope:
        """Read `rope_parameters` (one, or one a layer type), or the older `rope_theta` with `rope_scaling`.

        Args:
            theta: the base where the config gives none.
        """
        parameters = _parameters(hf, layer_type)
        share = parameters.get("partial_rotary_factor") or hf.get("partial_rotary_factor", 1.0)
        theta, rotary_dim = float(parameters.get("rope_theta") or theta), int(head_dim * float(share))
        if parameters.get("rope_type") == "proportional":
            rotary_dim = head_dim
        if parameters.get("alpha"):  # dynamic in name: a fixed stretch
            theta *= float(parameters["alpha"]) ** (rotary_dim / (rotary_dim - 2))
        return Rope(
            theta=theta,
            rotary_dim=rotary_dim,
            scaling=_scaling(parameters, hf),
        )

    @staticmethod
    def still(rotary_dim: int) -> Rope:
        """Turns nothing: for models that leave these values as they are."""
        return Rope(1.0, rotary_dim, RopeScaling("linear", factor=math.inf))

    def frequencies(self, max_positions: int) -> tuple[torch.Tensor, float]:
        """Radians a position for each pair, and the factor on cosines and sines."""
        if self.exponents:
            return self.theta ** -torch.tensor(self.exponents, dtype=torch.float32), 1.0
        plain = _plain_frequencies(self.theta, self.rotary_dim)
        if self.scaling is None:
            return plain, 1.0
        return _SCHEMES[self.scaling.kind](self, self.scaling, plain, max_positions)

    def table(self, max_positions: int) -> torch.Tensor:
        """Float32 [L, R]: cosines, then sines, for positions below `max_positions`.

        Schemes that depend on the context's length (dynamic, longrope) take it to be `max_positions`, so that a
        token's keys do not depend on how long its request becomes.
        """
        frequencies, amplitude = self.frequencies(max_positions)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        sines = -angles.sin() if self.backwards else angles.sin()
        return torch.cat((angles.cos() * amplitude, sines * amplitude), dim=-1).contiguous()


def _parameters(hf: HFConfig, layer_type: str | None) -> dict[str, Any]:
    """The scheme's values in one dict, whichever way the config writes them; `rope_theta` and `rope_scaling` beside
    `rope_parameters` are the user's overrides, unless the parameters differ by layer type."""
    values = hf.to_dict()
    parameters = dict(values.get("rope_parameters") or {})
    if layer_type is not None and isinstance(parameters.get(layer_type), dict):
        return dict(parameters[layer_type])
    if values.get("rope_theta") is not None:
        parameters["rope_theta"] = values["rope_theta"]
    if values.get("rope_scaling"):
        kept = {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}
        parameters = kept | dict(values["rope_scaling"])
    return parameters


def _scaling(parameters: dict[str, Any], hf: HFConfig) -> RopeScaling | None:
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)  # positions' axes are another matter
    if kind not in SCALINGS:
        raise ConfigError(
            f"rope_scaling type {kind!r} is not known; known: {', '.join(SCALINGS)}", setting="rope_scaling"
        )
    if kind == "default" or parameters.get("alpha"):
        return None
    if kind in ("linear", "dynamic", "llama3") and not parameters.get("factor"):
        raise ConfigError(
            f"rope_scaling of type {kind!r} has factor={parameters.get('factor')!r}, and needs a number",
            setting="rope_scaling",
        )
    stretched = int(hf.get("max_position_embeddings", 0))
    original = parameters.get("original_max_position_embeddings") or hf.get(
        "original_max_position_embeddings", stretched
    )
    original = stretched if kind == "dynamic" else original  # it begins to stretch beyond the config's length
    plain = {
        name: float(parameters[name])
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        if parameters.get(name) is not None
    }
    attention_factor = parameters.get("attention_factor")
    return RopeScaling(
        kind=kind,
        factor=float(parameters.get("factor") or (stretched / original if original else 1.0)),
        original_max_positions=int(original),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=None if attention_factor is None else float(attention_factor),
        short_factor=tuple(float(f) for f in parameters.get("short_factor") or ()),
        long_factor=tuple(float(f) for f in parameters.get("long_factor") or ()),
        share=float(parameters.get("partial_rotary_factor") or hf.get("partial_rotary_factor", 1.0)),
        **plain,
    )


def _plain_frequencies(theta: float, rotary_dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _proportional(rope: Rope, scaling: RopeScaling, frequencies: torch.Tensor, max_positions: int) -> Scaled:
    """The fast pairs turn, more slowly, and the others do not."""
    turning = int(scaling.share * rope.rotary_dim // 2)
    return frequencies / scaling.factor * (torch.arange(len(frequencies)) < turning), 1.0


def _dynamic(rope: Rope, scaling: RopeScaling, frequencies: torch.Tensor, max_positions: int) -> Scaled:
    """The base grows with the context, so that the slowest pair turns as far as it did in training."""
    length = max(max_positions, scaling.original_max_positions)
    growth = scaling.factor * length / scaling.original_max_positions - (scaling.factor - 1)
    theta = rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return _plain_frequencies(theta, rope.rotary_dim), 1.0


def _llama3(rope: Rope, scaling: RopeScaling, frequencies: torch.Tensor, max_positions: int) -> Scaled:
    """Fast pairs stay, slow pairs are slowed by the factor, and those between are mixed by turns in the old context."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor, 1.0


def _yarn(rope: Rope, scaling: RopeScaling, frequencies: torch.Tensor, max_positions: int) -> Scaled:
    """As llama3, with a linear ramp over pair indices; attention is sharpened as contexts grow."""

    def pair_of(turns: float) -> float:
        wavelength = scaling.original_max_positions / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    slow = ramp.clamp(0.0, 1.0)
    mixed = frequencies * (1 - slow) + frequencies / scaling.factor * slow
    return mixed, _yarn_amplitude(scaling)


def _yarn_amplitude(scaling: RopeScaling) -> float:
    def sharpening(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return sharpening(scaling.mscale) / sharpening(scaling.mscale_all_dim)
    return sharpening(1.0)


def _longrope(rope: Rope, scaling: RopeScaling, frequencies: torch.Tensor, max_positions: int) -> Scaled:
    """One searched divisor a pair: the long list where contexts may pass the original length, else the short one."""
    is_long = max_positions > scaling.original_max_positions
    divisors = scaling.long_factor if is_long else scaling.short_factor
    if len(divisors) != rope.rotary_dim // 2:
        name = "long_factor" if is_long else "short_factor"
        raise ConfigError(
            f"rope_scaling.{name} has {len(divisors)} values; rotary dimension {rope.rotary_dim} needs "
            f"{rope.rotary_dim // 2}",
            setting="rope_scaling",
        )
    stretch = scaling.factor
    amplitude = scaling.attention_factor
    if amplitude is None:
        amplitude = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(scaling.original_max_positions))
    return frequencies / torch.tensor(divisors, dtype=torch.float32), amplitude


_SCHEMES: dict[str, Callable[[Rope, RopeScaling, torch.Tensor, int], Scaled]] = {
    "linear": lambda rope, scaling, frequencies, max_positions: (frequencies / scaling.factor, 1.0),
    "proportional": _proportional,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""By kind: from the plain frequencies to those of the scheme, and the factor on cosines and sines."""


@dataclasses.dataclass(frozen=True)
class Sinusoids:
    """Positions as sines, then cosines, of `count` lengths, which are added to the embeddings; no checkpoint has them.

    Attributes:
        start: what the first position counts as.
        shift: frequencies go from 1 to 1 / 10000, the last one included (1) or not (0).
    """

    count: int
    start: int = 0
    shift: int = 0

    def table(self, width: int) -> torch.Tensor:
        """Float32 [count, width]."""
        half = (width + 1) // 2
        exponents = torch.arange(half, dtype=torch.float64) / (width / 2 - self.shift)
        angles = torch.arange(self.start, self.start + self.count, dtype=torch.float64)[:, None] * 10000.0**-exponents
        return torch.cat((angles.sin(), angles.cos()), dim=1)[:, :width].float()
