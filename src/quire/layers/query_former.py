"""Learned queries that read groups of an encoder's rows, layer after layer, and take their place in the end (Q-Former,
https://arxiv.org/abs/2301.12597).

Legend: X rows, Y groups of rows, Q queries, C columns, H head size.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
from torch.nn import functional

from quire.layers.assembly import NormWeight, Weight
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.operations import apply_norm
from quire.models.sight import Product, Queries

Multiply = Callable[[Product, torch.Tensor], torch.Tensor]


def query_modules(stage: Queries, builder: ModuleBuilder, columns: int) -> Iterator[Module]:
    """Its weights; `columns`: of the rows that it reads."""
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


class QueryFormer:
    """One pass over rows.

    Args:
        weights: of its modules. multiply: a matrix by name with rows.
    """

    def __init__(self, stage: Queries, weights: Mapping[str, Weight], multiply: Multiply) -> None:
        self._stage, self._weights, self._multiply = stage, weights, multiply

    def run(self, x_XC: torch.Tensor) -> torch.Tensor:
        """The queries [Y * Q, hidden]."""
        stage, groups = self._stage, len(x_XC) // self._stage.count
        queries = cast(torch.Tensor, self._weights["queries"]).to(x_XC.dtype).repeat(groups, 1)
        state = self._normed("queries_norm", queries)
        for layer in range(stage.layers):
            for kind, _ in stage.attentions(layer, 0):
                seen = state if kind == "self" else x_XC
                state = self._attend(f"queries{layer}_{kind}", state, seen, groups)
            up = self._multiply(Product(f"queries{layer}_up", stage.intermediate, act=stage.act), state)
            down = self._multiply(Product(f"queries{layer}_down", stage.hidden), up)
            state = self._normed(f"queries{layer}_norm", down + state)
        return state

    def _attend(self, at: str, state: torch.Tensor, seen: torch.Tensor, groups: int) -> torch.Tensor:
        stage = self._stage
        q = self._multiply(Product(at + "_q", stage.hidden), state)
        k, v = self._multiply(Product(at + "_kv", 2 * stage.hidden), seen).chunk(2, dim=1)

        def by_head(part: torch.Tensor) -> torch.Tensor:
            return part.float().view(groups, -1, stage.heads, stage.hidden // stage.heads).transpose(1, 2)

        attended = functional.scaled_dot_product_attention(by_head(q), by_head(k), by_head(v))
        attended = attended.transpose(1, 2).flatten(2).flatten(0, 1).to(state.dtype)
        return self._normed(at + "_norm", self._multiply(Product(at + "_out", stage.hidden), attended) + state)

    def _normed(self, name: str, x_XC: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x_XC)
        apply_norm(self._stage.norm, cast(NormWeight, self._weights[name]), x_XC.contiguous(), out)
        return out
