"""Encoders of sound whose layers have attention and a convolution, between halves of a feed-forward.

They read one sound at a time, and keep nothing.
Legend: F frames, B bins, T rows, D hidden, N heads, H head size, W rows that attention sees, C channels; R rows of a block, Y
blocks.
"""

import abc
import math
from collections.abc import Iterator
from typing import cast

import torch
from torch.nn import functional

from quire.kernels.types import LinearWeight
from quire.layers.assembly import Weight
from quire.layers.decoder_layer import BOUNDS, bounds_of
from quire.layers.encoder.fronts import WIDTH, Front
from quire.layers.linear import LinearMethod
from quire.layers.modules import Module, ModuleBuilder, RowBlock, SourceLayout
from quire.layers.tower import activated
from quire.models.residual import LayerNorm, Norm, RMSNorm
from quire.models.rope import Sinusoids
from quire.models.sound import BlockConformer, Conformer


class FrontLayers(Front):
    """Conformers: attention and a convolution between two feed-forwards of which a share joins. A norm that the checkpoint does
    not have changes nothing.

    Args:
        method: multiplies its matrices.
        norm: of all its norms.
    """

    def __init__(self, method: LinearMethod, norm: Norm, act: str) -> None:
        super().__init__(method)
        self.norm, self.act = norm, act

    def set_weight(self, name: str, weight: Weight) -> None:
        if isinstance(weight, LinearWeight):
            weight.name = name
        super().set_weight(name, weight)

    @abc.abstractmethod
    def attend(self, at: str, x_TD: torch.Tensor) -> torch.Tensor:
        """A layer's attention; `at` is before the names of its modules."""

    @abc.abstractmethod
    def convolve(self, at: str, x_TD: torch.Tensor) -> torch.Tensor:
        """A layer's convolution."""

    def run_layer(self, at: str, x_TD: torch.Tensor, share: float) -> torch.Tensor:
        """The rows behind a layer."""
        x_TD = self._feed_forward(at + "ff1", x_TD, share)
        x_TD = x_TD + self._normed(at + "after_mixer", self.attend(at, self._normed(at + "before_mixer", x_TD)))
        x_TD = x_TD + self.convolve(at, self._normed(at + "before_conv", x_TD))
        return self._normed(at + "after_layer", self._feed_forward(at + "ff2", x_TD, share))

    def _feed_forward(self, at: str, x_TD: torch.Tensor, share: float) -> torch.Tensor:
        up = self.multiply(at + "_up", self._normed(at + "_before", x_TD), self.act)
        return x_TD + share * self._normed(at + "_after", self.multiply(at + "_down", up))

    def _normed(self, name: str, x_TD: torch.Tensor) -> torch.Tensor:
        return self.normed(self.norm, name, x_TD) if name in self.norms else x_TD


KEY_SCALE = math.log1p(math.e) / math.log(2)
NORMS = (
    "ff1_before",
    "ff1_after",
    "before_mixer",
    "after_mixer",
    "before_conv",
    "conv_norm",
    "ff2_before",
    "ff2_after",
)


class ConformerFront(FrontLayers):
    """Gemma 4's: rows (one of four frames, behind two convolutions) that see themselves and those before them."""

    def __init__(self, spec: Conformer, method: LinearMethod) -> None:
        self._spec = spec
        super().__init__(method, RMSNorm(spec.eps), spec.act)
        self._distances_WD = Sinusoids(spec.window, start=spec.start, shift=1).table(spec.hidden).flip(0)
        self._rows: dict[str, list[int]] = {}

    def modules(self, builder: ModuleBuilder) -> Iterator[Module]:
        """All of its weights, and the bounds of its layers' matrices where the checkpoint has some."""
        spec, columns = self._spec, 1
        for number, channels in enumerate(spec.channels, 1):
            yield builder.table(f"front{number}", (RowBlock(channels, 1),), columns * WIDTH**2)
            yield builder.norm(f"front{number}_norm", LayerNorm(spec.eps, bias=False), channels)
            columns = channels
        yield builder.linear("input", (RowBlock(spec.hidden, 1),), spec.front_columns)
        for layer in range(spec.layers):
            for module in self._of_layer(ModuleBuilder(builder.spec, layer)):
                yield module
                if builder.spec.bounded and module.kind == "linear" and not module.name.endswith("relative"):
                    self._rows[module.name] = [part.rows for part in module.parts]
                    yield bounds_of(module)
        yield builder.linear("output", (RowBlock(spec.outputs, 1),), spec.hidden, bias=True)

    def _of_layer(self, builder: ModuleBuilder) -> Iterator[Module]:
        spec, wide, row = self._spec, 4 * self._spec.hidden, RowBlock(self._spec.hidden, 1)
        for half in ("ff1", "ff2"):
            yield builder.linear(f"{half}_up", (RowBlock(wide, 1),), spec.hidden)
            yield builder.linear(f"{half}_down", (row,), wide)
        yield builder.linear("qkv", (row, row, row), spec.hidden)
        yield builder.linear("relative", (row,), spec.hidden)
        yield builder.vector("head_scale", RowBlock(spec.hidden // spec.heads, 1))
        yield builder.linear("out", (row,), spec.hidden)
        yield builder.linear("conv_in", (RowBlock(2 * spec.hidden, 1),), spec.hidden)
        yield builder.table("conv", (row,), spec.kernel, is_conv=True)
        yield builder.linear("conv_out", (row,), spec.hidden)
        yield from (builder.norm(name, self.norm, spec.hidden) for name in (*NORMS, "after_layer"))

    def set_weight(self, name: str, weight: Weight) -> None:
        """Take one of its modules' weights."""
        if name.endswith(BOUNDS):
            matrix = name.removesuffix(BOUNDS)
            self.method.bound(matrix, cast(torch.Tensor, weight), self._rows[matrix])
        else:
            super().set_weight(name, weight)

    def __call__(self, mel_NBF: torch.Tensor) -> torch.Tensor:
        """The rows [T, outputs] of one sound (N is 1)."""
        x_TD = self.multiply("input", self._convolve_in_front(mel_NBF))
        for layer in range(self._spec.layers):
            x_TD = self.run_layer(f"layers.{layer}.", x_TD, self._spec.share)
        return self.multiply("output", x_TD)

    def _convolve_in_front(self, mel_NBF: torch.Tensor) -> torch.Tensor:
        """Of each pair of frames, and of bins, one row; twice."""
        x_NCFB = mel_NBF.float().transpose(1, 2)[:, None]
        for number in (1, 2):
            kernel = self.tensors[f"front{number}"].view(-1, x_NCFB.shape[1], WIDTH, WIDTH)
            x_NFBC = functional.conv2d(x_NCFB, kernel, stride=2, padding=1).permute(0, 2, 3, 1)
            weight_C = self.norms[f"front{number}_norm"].weight
            x_NFBC = functional.layer_norm(x_NFBC, weight_C.shape, weight_C, eps=self._spec.eps).relu()
            x_NCFB = x_NFBC.permute(0, 3, 1, 2)
        return x_NCFB[0].permute(1, 2, 0).flatten(1).to(mel_NBF.dtype)

    def attend(self, at: str, x_TD: torch.Tensor) -> torch.Tensor:
        """Each row to itself and those before it, by what they are and by how far they are away."""
        spec, count, window = self._spec, len(x_TD), self._spec.window
        q, k, v = (part.unflatten(1, (spec.heads, -1)).float() for part in self.multiply(at + "qkv", x_TD).chunk(3, 1))
        q_TNH = q * functional.softplus(self.tensors[at + "head_scale"]) * (q.shape[2] ** -0.5 / math.log(2))
        k_TNHW, v_TNHW = (
            functional.pad(part, (0, 0, 0, 0, window - 1, 0)).unfold(0, window, 1) for part in (k * KEY_SCALE, v)
        )
        far_WNH = self.multiply(at + "relative", self._distances_WD.to(x_TD)).unflatten(1, (spec.heads, -1)).float()
        scores_TNW = torch.einsum("tnh,tnhw->tnw", q_TNH, k_TNHW) + torch.einsum("tnh,wnh->tnw", q_TNH, far_WNH)
        places_TW = torch.arange(count, device=x_TD.device)[:, None] + torch.arange(1 - window, 1, device=x_TD.device)
        scores_TNW = spec.soft_cap * torch.tanh(scores_TNW / spec.soft_cap)
        weights_TNW = scores_TNW.masked_fill((places_TW < 0)[:, None], -torch.inf).softmax(-1)
        attended = torch.einsum("tnw,tnhw->tnh", weights_TNW, v_TNHW).flatten(1).to(x_TD.dtype)
        return self.multiply(at + "out", attended)

    def convolve(self, at: str, x_TD: torch.Tensor) -> torch.Tensor:
        gated_TD = functional.glu(self.multiply(at + "conv_in", x_TD).float(), dim=1)
        before = functional.pad(gated_TD.T, (self._spec.kernel - 1, 0))
        seen_TD = functional.conv1d(before, self.tensors[at + "conv"][:, None], groups=len(before)).T.to(x_TD.dtype)
        return self.multiply(at + "conv_out", activated(self.act, self._normed(at + "conv_norm", seen_TD)))


NORM = LayerNorm(1e-5)
"""Also the epsilon of the norm behind the convolution, whose mean and variance are the checkpoint's."""
SHARE = 0.5


class BlockConformerFront(FrontLayers):
    """Granite-Speech's: rows that see one another within blocks, by their distance (Shaw et al. 2018), and whose guesses of
    letters join them in the middle."""

    def __init__(self, spec: BlockConformer, method: LinearMethod) -> None:
        super().__init__(method, NORM, "silu")
        self._spec = spec

    def modules(self, builder: ModuleBuilder) -> Iterator[Module]:
        """All of its weights."""
        spec = self._spec
        yield builder.linear("input", (RowBlock(spec.hidden, 1),), spec.columns, bias=True)
        for layer in range(spec.layers):
            yield from self._of_layer(ModuleBuilder(builder.spec, layer))
        yield builder.linear("guess", (RowBlock(spec.letters, 1),), spec.hidden, bias=True)
        yield builder.linear("guessed", (RowBlock(spec.hidden, 1),), spec.letters, bias=True)

    def _of_layer(self, builder: ModuleBuilder) -> Iterator[Module]:
        spec, row, heads = (
            self._spec,
            RowBlock(self._spec.hidden, 1),
            RowBlock(self._spec.heads * self._spec.head_dim, 1),
        )
        for half in ("ff1", "ff2"):
            yield builder.linear(f"{half}_up", (RowBlock(spec.wide, 1),), spec.hidden, bias=True)
            yield builder.linear(f"{half}_down", (row,), spec.wide, bias=True)
        layouts = (SourceLayout((0,)), SourceLayout((1, 2)))
        yield builder.linear("qkv", (heads,) * 3, spec.hidden, layouts=layouts)
        yield builder.table("distances", (RowBlock(2 * spec.farthest + 1, 1),), spec.head_dim)
        yield builder.linear("out", (row,), heads.rows, bias=True)
        yield builder.linear("conv_in", (RowBlock(2 * spec.channels, 1),), spec.hidden, bias=True)
        yield builder.table("conv", (RowBlock(spec.channels, 1),), spec.kernel, is_conv=True)
        yield builder.norm("conv_norm", NORM, spec.channels)
        yield from (builder.vector(name, RowBlock(spec.channels, 1)) for name in ("conv_mean", "conv_variance"))
        yield builder.linear("conv_out", (row,), spec.channels, bias=True)
        for name in ("ff1_before", "before_mixer", "before_conv", "ff2_before", "after_layer"):
            yield builder.norm(name, NORM, spec.hidden)

    def __call__(self, mel_NCT: torch.Tensor) -> torch.Tensor:
        """The rows [T, D] of one sound (N is 1)."""
        x_TD = self.multiply("input", mel_NCT[0].T)
        for layer in range(self._spec.layers):
            x_TD = self.run_layer(f"layers.{layer}.", x_TD, SHARE)
            if layer + 1 == self._spec.layers // 2:
                letters = self.multiply("guess", x_TD).float().softmax(-1).to(x_TD.dtype)
                x_TD = x_TD + self.multiply("guessed", letters)
        return x_TD

    def attend(self, at: str, x_TD: torch.Tensor) -> torch.Tensor:
        """Each row to those of its block."""
        spec, count, size = self._spec, len(x_TD), self._spec.block
        padded = functional.pad(self.multiply(at + "qkv", x_TD).float(), (0, 0, 0, -count % size))
        q, k, v = (
            padded.unflatten(0, (-1, size)).unflatten(2, (3, spec.heads, -1)).permute(2, 0, 3, 1, 4)
        )  # [Y, N, R, H]
        places_R = torch.arange(size, device=x_TD.device)
        far_RRH = self.tensors[at + "distances"][places_R[:, None] - places_R + spec.farthest]
        scale = spec.head_dim**-0.5
        bias = torch.einsum("ynrh,rsh->ynrs", q, far_RRH) * scale
        is_there = (torch.arange(len(padded), device=x_TD.device) < count).view(-1, 1, 1, size)
        bias = bias.masked_fill(~is_there, torch.finfo(torch.float32).min)
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        return self.multiply(at + "out", attended.transpose(1, 2).flatten(2).flatten(0, 1)[:count].to(x_TD.dtype))

    def convolve(self, at: str, x_TD: torch.Tensor) -> torch.Tensor:
        kernel, half = self._spec.kernel, self._spec.kernel // 2
        gated_TC = functional.glu(self.multiply(at + "conv_in", x_TD).float(), dim=1)
        around = functional.pad(gated_TC.T, (half, half - (kernel + 1) % 2))
        seen_TC = functional.conv1d(around, self.tensors[at + "conv"][:, None], groups=len(around)).T
        norm = self.norms[at + "conv_norm"]
        spread = torch.rsqrt(self.tensors[at + "conv_variance"] + NORM.eps) * norm.weight
        normed_TC = (seen_TC - self.tensors[at + "conv_mean"]) * spread + cast(torch.Tensor, norm.bias)
        return self.multiply(at + "conv_out", activated(self.act, normed_TC).to(x_TD.dtype))
