"""What makes embeddings of an encoder's rows: a few stages, computed one after another; and one row of a few.

Knows shapes and weights. Knows nothing of images.
Legend: X rows, C columns; Y groups of rows, Q queries; E embeddings, G rows of an embedding, N heads, H head size.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from quire.kernels.norm import ACTIVATIONS
from quire.layers.activation import kernel_activation
from quire.layers.assembly import NormWeight
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.tower import TowerPart, activated
from quire.models.sight import Gated, Group, Normed, Pooled, Probe, Queries, Stage, Standard

STANDARD = ("standard_bias", "standard_scale")


class Projector(TowerPart):
    """Stages and their weights.

    Args:
        columns: of what it reads.
    """

    def __init__(self, stages: Sequence[Stage], columns: int) -> None:
        super().__init__()
        self._stages, self._columns = stages, columns

    def modules(self, builder: ModuleBuilder) -> Iterator[Module]:
        """Its matrices and norms, in order."""
        columns = self._columns
        for stage in self._stages:
            if isinstance(stage, Group):
                columns *= 1 if stage.is_mean else stage.count
            elif isinstance(stage, Gated):
                columns //= 2
            elif isinstance(stage, Queries):
                yield from _query_modules(stage, builder, columns)
                columns = stage.hidden
            elif isinstance(stage, Probe):
                yield from _probe_modules(stage, builder, columns)
            elif isinstance(stage, Normed):
                if stage.norm.weight:
                    yield builder.norm(stage.name, stage.norm, columns)
            elif isinstance(stage, Standard):
                if stage.learned:
                    yield from (builder.vector(name, RowBlock(columns, 1)) for name in STANDARD)
            else:
                parts = (RowBlock(stage.outputs // stage.parts, 1),) * stage.parts
                yield builder.linear(stage.name, parts, columns, bias=stage.bias)
                columns = stage.outputs

    def __call__(self, rows_XC: torch.Tensor) -> torch.Tensor:
        """The embeddings of rows, in a tensor of their own."""
        x = rows_XC
        for stage in self._stages:
            if isinstance(stage, Group):
                x = _grouped(stage, x)
            elif isinstance(stage, Gated):
                x = _gated(stage, x)
            elif isinstance(stage, Queries):
                x = _run_queries(stage, self, x)
            elif isinstance(stage, Probe):
                x = self._probe(stage, x)
            elif isinstance(stage, Normed):
                if not stage.norm.weight:
                    self.norms[stage.name] = NormWeight(x.new_ones(x.shape[1], dtype=torch.float32))
                x = activated(stage.act, self.normed(stage.norm, stage.name, x))
            elif isinstance(stage, Standard):
                x = self._standardize(stage, x)
            else:
                x = self.multiply(stage.name, x, stage.act)
        return x

    def _probe(self, stage: Probe, x_XC: torch.Tensor) -> torch.Tensor:
        """One row for each image."""
        columns = x_XC.shape[1]
        probe, bias = (self.tensors[name].to(x_XC.dtype) for name in ("probe", "probe_in_bias"))
        products = self.multiply("probe_in", torch.cat((x_XC, probe[None]))) + bias
        shape = (-1, stage.count, stage.heads, columns // stage.heads)
        k, v = (part.reshape(shape).transpose(1, 2).float() for part in products[:-1, columns:].split(columns, dim=1))
        q = products[-1, :columns].reshape(1, stage.heads, 1, -1).float().expand(len(k), -1, -1, -1)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v).flatten(1).to(x_XC.dtype)
        out = self.multiply("probe_out", attended)
        up = self.multiply("probe_up", self.normed(stage.norm, "probe_norm", out), stage.act)
        return out + self.multiply("probe_down", up)

    def _standardize(self, stage: Standard, x_XC: torch.Tensor) -> torch.Tensor:
        rows = x_XC.float() * stage.factor
        if stage.learned:
            bias, scale = (self.tensors[name] for name in STANDARD)
            rows = (rows - bias) * scale
        return rows.to(x_XC.dtype)


def _probe_modules(stage: Probe, builder: ModuleBuilder, columns: int) -> Iterator[Module]:
    whole = RowBlock(columns, 1)
    yield builder.vector("probe", whole)
    yield builder.linear("probe_in", (RowBlock(3 * columns, 1),), columns)
    yield builder.vector("probe_in_bias", RowBlock(3 * columns, 1))
    yield builder.linear("probe_out", (whole,), columns, bias=True)
    yield builder.norm("probe_norm", stage.norm, columns)
    yield builder.linear("probe_up", (RowBlock(stage.intermediate, 1),), columns, bias=True)
    yield builder.linear("probe_down", (whole,), stage.intermediate, bias=True)


def _grouped(group: Group, x_XC: torch.Tensor) -> torch.Tensor:
    parts_YGC = x_XC.reshape(-1, group.count, x_XC.shape[1])
    if group.is_mean:
        return parts_YGC.mean(1)
    return (parts_YGC.transpose(1, 2) if group.by_column else parts_YGC).flatten(1)


def _gated(stage: Gated, x_XC: torch.Tensor) -> torch.Tensor:
    first, second = x_XC.float().chunk(2, dim=1)
    up, gate = (second, first) if stage.gate_first else (first, second)
    return (ACTIVATIONS[kernel_activation(stage.act)](gate) * up).to(x_XC.dtype)


def _query_modules(stage: Queries, builder: ModuleBuilder, columns: int) -> Iterator[Module]:
    """Weights; `columns`: of the rows that they read."""
    whole = RowBlock(stage.hidden, 1)
    yield builder.table("queries", (RowBlock(stage.queries, 1),), stage.hidden)
    yield builder.norm("queries_norm", stage.norm, stage.hidden)
    for layer in range(stage.layers):
        for kind, read in stage.attentions(layer, columns):
            at = f"queries{layer}_{kind}"
            yield builder.linear(at + "_q", (whole,), stage.hidden, bias=True)
            yield builder.linear(at + "_kv", (whole, whole), read, bias=True)
            yield builder.linear(at + "_out", (whole,), stage.hidden, bias=True)
            yield builder.norm(at + "_norm", stage.norm, stage.hidden)
        yield builder.linear(f"queries{layer}_up", (RowBlock(stage.intermediate, 1),), stage.hidden, bias=True)
        yield builder.linear(f"queries{layer}_down", (whole,), stage.intermediate, bias=True)
        yield builder.norm(f"queries{layer}_norm", stage.norm, stage.hidden)


def _run_queries(stage: Queries, part: TowerPart, x_XC: torch.Tensor) -> torch.Tensor:
    """Learned queries [Y * Q, hidden] that read groups of rows, layer after layer, and take their place (Q-Former,
    https://arxiv.org/abs/2301.12597); `part` has the weights."""
    groups = len(x_XC) // stage.count
    queries = part.tensors["queries"].to(x_XC.dtype).repeat(groups, 1)
    state = part.normed(stage.norm, "queries_norm", queries)
    for layer in range(stage.layers):
        for kind, _ in stage.attentions(layer, 0):
            seen = state if kind == "self" else x_XC
            state = _attend(stage, part, f"queries{layer}_{kind}", state, seen, groups)
        up = part.multiply(f"queries{layer}_up", state, stage.act)
        down = part.multiply(f"queries{layer}_down", up)
        state = part.normed(stage.norm, f"queries{layer}_norm", down + state)
    return state


def _attend(
    stage: Queries, part: TowerPart, at: str, state: torch.Tensor, seen: torch.Tensor, groups: int
) -> torch.Tensor:
    k, v = part.multiply(at + "_kv", seen).chunk(2, dim=1)

    def by_head(rows: torch.Tensor) -> torch.Tensor:
        return rows.float().view(groups, -1, stage.heads, stage.hidden // stage.heads).transpose(1, 2)

    q = part.multiply(at + "_q", state)
    attended = functional.scaled_dot_product_attention(by_head(q), by_head(k), by_head(v))
    attended = attended.transpose(1, 2).flatten(2).flatten(0, 1).to(state.dtype)
    return part.normed(stage.norm, at + "_norm", part.multiply(at + "_out", attended) + state)


class Pooling(TowerPart):
    """A few rows become one: their mean attends them.

    Args:
        columns: of what it reads.
    """

    def __init__(self, pooled: Pooled, columns: int) -> None:
        super().__init__()
        self._pooled, self._columns = pooled, columns

    def modules(self, builder: ModuleBuilder) -> Iterator[Module]:
        """Three matrices."""
        pooled, columns = self._pooled, self._columns
        asked, kept = (RowBlock(heads * pooled.head_dim, 1) for heads in (pooled.heads, pooled.kv_heads))
        yield builder.linear("pool_q", (asked,), columns, bias=pooled.bias)
        yield builder.linear("pool_kv", (kept, kept), columns, bias=pooled.bias)
        yield builder.linear("pool_out", (RowBlock(pooled.outputs, 1),), asked.rows, bias=pooled.bias)

    def __call__(self, given_EGC: torch.Tensor, is_there_EG: torch.Tensor) -> torch.Tensor:
        """The rows [E, outputs] of groups; rows that are not there are zeros."""
        mean_EC = given_EGC.sum(1) / is_there_EG.sum(1, keepdim=True).clamp(min=1).to(given_EGC.dtype)
        shape = (*is_there_EG.shape, 2, self._pooled.kv_heads, self._pooled.head_dim)
        k_ENGH, v_ENGH = self.multiply("pool_kv", given_EGC.flatten(0, 1)).view(shape).permute(2, 0, 3, 1, 4)
        q_ENH = self.multiply("pool_q", mean_EC).view(len(mean_EC), self._pooled.heads, 1, -1)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q_ENH, k_ENGH, v_ENGH, is_there_EG[:, None, None], enable_gqa=True
        )
        return self.multiply("pool_out", attended.flatten(1))
