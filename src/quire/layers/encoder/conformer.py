"""An encoder of sound whose layers have attention to the rows before and a convolution, between halves of a feed-forward.

It reads one sound at a time, and keeps nothing.
Legend: F frames, B bins, T rows (F / 4), D hidden, N heads, H head size, W rows that attention sees, C channels.
"""

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch.nn import functional

from quire.layers.assembly import Weight
from quire.layers.decoder_layer import BOUNDS, bounds_of
from quire.layers.encoder.front_layers import FrontLayers
from quire.layers.linear import LinearMethod
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.tower import activated
from quire.models.residual import LayerNorm, RMSNorm
from quire.models.rope import Sinusoids
from quire.models.sound import Conformer

WIDTH = 3
"""Frames, and bins, that a convolution in front looks at."""
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
    """The convolutions and the layers."""

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
