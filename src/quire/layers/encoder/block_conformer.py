"""Granite-Speech's encoder of sound: a Conformer whose rows see one another within blocks, by their distance (Shaw et al. 2018),
and whose guesses of letters join the rows in the middle.

Legend: T rows, D hidden, N heads, H head size, R rows of a block, Y blocks, C channels.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch.nn import functional

from quire.layers.encoder.front_layers import FrontLayers
from quire.layers.linear import LinearMethod
from quire.layers.modules import Module, ModuleBuilder, RowBlock, SourceLayout
from quire.layers.tower import activated
from quire.models.residual import LayerNorm
from quire.models.sound import BlockConformer

NORM = LayerNorm(1e-5)
"""Also the epsilon of the norm behind the convolution, whose mean and variance are the checkpoint's."""
SHARE = 0.5


class BlockConformerFront(FrontLayers):
    """The layers."""

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
