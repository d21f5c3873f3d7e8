"""From a step's hidden states to what pooling requests want: vectors of sequences, or numbers of every token.

A prompt may come in several steps: what has been summed up so far is kept by row, and begins anew where a row begins at its
first token (also after a preemption). Runs after a step's forward pass, with PyTorch. Knows nothing of pages or models.

Legend: T tokens of the step, B its requests, R rows, D hidden, C a result's columns.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch

from quire.config import EngineConfig, PoolingConfig
from quire.core.output import IntArray, SchedulerOutput
from quire.errors import ConfigError, EngineError
from quire.layers.decoder import Decoder
from quire.layers.interface import CausalLM
from quire.layers.pooling.head import PoolingHead
from quire.layers.pooling.trunk import pooling_head
from quire.model_loader.pooling_head import load_head
from quire.pooling_params import PoolingParams
from quire.request import Pooled
from quire.worker.batch_state import BatchState

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normalize": lambda x: torch.nn.functional.normalize(x, dim=-1),
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "sigmoid": torch.sigmoid,
}
_DIVISORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda length: length,
    "mean_sqrt": torch.sqrt,
    "weighted_mean": lambda length: length * (length + 1) / 2,
}
"""By kind of pooling, what its sum over a request of a length is divided by."""


@dataclasses.dataclass
class PooledRows:
    """Results on the device: row r of `values` [n, C] is that of row `rows[r]`; a lone row may have as many as it likes."""

    rows: list[int]
    values: torch.Tensor
    is_vector: bool

    def collect(self, host: torch.Tensor, into: dict[int, Pooled]) -> None:
        """Add the results, which are in the host's memory now, by row."""
        array = host.numpy()
        if self.is_vector:
            into.update((row, Pooled.from_array(array[index])) for index, row in enumerate(self.rows))
        else:
            into[self.rows[0]] = Pooled.from_array(array)


class Pooler:
    """The pooling requests' rows.

    Args:
        config: with `model.pooling`.
        hidden: columns of hidden states.
        num_token_types: rows of the model's table of segments; 0 where it has none.

    Attributes:
        head: the model's. own_head: gives that of a row's adapter, if it has its own.
        token_types: int32 [max_T], the segment of each token of the step; None where the model has no table.
    """

    def __init__(
        self, config: EngineConfig, hidden: int, device: torch.device, max_tokens: int, num_token_types: int = 0
    ) -> None:
        pooling = config.model.pooling
        if pooling is None:
            raise EngineError("a model that generates has no pooler")
        self._config: PoolingConfig = pooling
        self._max_rows, self._device, self._hidden = config.scheduler.max_num_seqs, device, hidden
        model = config.model
        is_dummy = config.load.load_format == "dummy"
        self.head = load_head(pooling_head(model, hidden), model.path, device, dummy=is_dummy, seed=model.seed)
        self.own_head: Callable[[int], PoolingHead | None] = lambda row: None
        self._params: dict[int, PoolingParams] = {}
        self._so_far: dict[str, torch.Tensor] = {}
        self._tokens_so_far: dict[int, list[torch.Tensor]] = {}
        self._num_token_types = num_token_types
        self.token_types: torch.Tensor | None = None
        self._has_types = False
        if num_token_types:
            self.token_types = torch.zeros(max_tokens, dtype=torch.int32, device=device)

    def apply_diff(self, plan: SchedulerOutput, starts_B: IntArray) -> None:
        """Forget the rows that have ended, take in those that begin, and write the segments of the step's tokens."""
        for row in plan.finished_rows:
            self._params.pop(row, None)
            self._tokens_so_far.pop(row, None)
        for request in plan.new_requests:
            if request.pooling_params is not None:
                self._params[request.row] = request.pooling_params
        self._set_token_types(plan, starts_B)

    def _set_token_types(self, plan: SchedulerOutput, starts_B: IntArray) -> None:
        """Write the step's segments; those of prompts that name none are 0."""
        if self.token_types is None:
            return
        given = [self._params[row].token_type_ids for row in plan.rows.tolist()]
        if not any(given):
            if self._has_types:
                self.token_types.zero_()
            self._has_types = False
            return
        counts = plan.num_scheduled_tokens.tolist()
        parts = [
            np.zeros(count, np.int32) if types is None else np.array(types[start : start + count], np.int32)
            for types, start, count in zip(given, starts_B.tolist(), counts, strict=True)
        ]
        types_T = np.minimum(np.concatenate(parts), self._num_token_types - 1)
        self.token_types[: len(types_T)].copy_(torch.from_numpy(types_T))
        self._has_types = True

    def pool(
        self,
        plan: SchedulerOutput,
        starts_B: IntArray,
        query_start_B: IntArray,
        hidden_TD: torch.Tensor,
        state: BatchState,
        seen: Mapping[int, torch.Tensor],
    ) -> list[PooledRows]:
        """The results of the rows that are complete with this step.

        Args:
            starts_B: tokens that each request had computed before.
            query_start_B: where each request's tokens begin in the step, [B + 1].
            hidden_TD: after the last norm.
            seen: of rows that are images, their vectors.
        """
        rows_B, ends_B = plan.rows.tolist(), plan.needs_sample.tolist()
        is_token_B = [self._params[row].task in ("token_embed", "token_classify") for row in rows_B]
        results: list[PooledRows] = []
        if not all(is_token_B):
            vectors_BD = self._sequence_vectors(plan, starts_B, query_start_B, hidden_TD)
            done = [index for index, is_token in enumerate(is_token_B) if ends_B[index] and not is_token]
            done = [index for index in done if rows_B[index] not in seen]
            results += self._finish_vectors(vectors_BD, done, rows_B)
        results += [self._finish_image(row, vector_C) for row, vector_C in seen.items()]
        for index, row in enumerate(rows_B):
            if is_token_B[index]:
                chunk_TD = hidden_TD[int(query_start_B[index]) : int(query_start_B[index + 1])]
                if starts_B[index] == 0:
                    self._tokens_so_far[row] = []
                is_divided = self._params[row].late_chunking_params is not None
                values_TC = chunk_TD if is_divided else self._head_of(row)(chunk_TD)
                if ends_B[index]:
                    self._tokens_so_far[row].append(values_TC)
                    results.append(self._finish_tokens(row, state))
                else:  # without a head these are the model's own buffers, which the next step overwrites
                    self._tokens_so_far[row].append(values_TC.clone())
        return results

    # Vectors of sequences.

    def _sequence_vectors(
        self, plan: SchedulerOutput, starts_B: IntArray, query_start_B: IntArray, hidden_TD: torch.Tensor
    ) -> torch.Tensor:
        """What each request's tokens so far come to, for every kind of pooling, side by side."""
        is_whole = bool(plan.needs_sample.all() and not starts_B.any())
        counts_B = torch.from_numpy(plan.num_scheduled_tokens.astype(np.int64)).to(self._device)
        index_B = torch.from_numpy(query_start_B[: len(plan.rows) + 1].astype(np.int64)).to(self._device)
        before_B1 = torch.from_numpy(starts_B.astype(np.int64)).to(self._device).unsqueeze(1)
        rows_B = None if is_whole else torch.from_numpy(plan.rows.astype(np.int64)).to(self._device)
        parts: list[torch.Tensor] = []
        for kind in self._config.kinds:
            if kind == "last":
                parts.append(hidden_TD[index_B[1:] - 1].float())
                continue
            now_BD = _reduce(kind, hidden_TD, index_B, counts_B, before_B1)
            if rows_B is not None:
                now_BD = self._with_before(kind, now_BD, before_B1, rows_B)
            if kind in _DIVISORS:
                now_BD = now_BD / _DIVISORS[kind](before_B1 + counts_B.unsqueeze(1))
            parts.append(now_BD)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _with_before(
        self, kind: str, now_BD: torch.Tensor, before_B1: torch.Tensor, rows_B: torch.Tensor
    ) -> torch.Tensor:
        """The same with what the rows' earlier steps gave; kept for later ones."""
        so_far_RD = self._so_far.get(kind)
        if so_far_RD is None:
            shape = (self._max_rows, self._hidden)
            so_far_RD = self._so_far[kind] = torch.zeros(shape, dtype=torch.float32, device=self._device)
        earlier_BD = so_far_RD[rows_B]
        if kind == "cls":
            merged_BD = earlier_BD
        else:
            merged_BD = torch.maximum(now_BD, earlier_BD) if kind == "max" else now_BD + earlier_BD
        now_BD = torch.where(before_B1 > 0, merged_BD, now_BD)
        so_far_RD[rows_B] = now_BD
        return now_BD

    def _finish_vectors(self, vectors_BD: torch.Tensor, done: list[int], rows_B: list[int]) -> list[PooledRows]:
        """Head, length and activation; requests that want the same go together."""
        groups: dict[tuple[int, bool, PoolingHead], list[int]] = {}
        for index in done:
            row = rows_B[index]
            params = self._params[row]
            key = (params.dimensions or 0, bool(params.use_activation), self._head_of(row))
            groups.setdefault(key, []).append(index)
        results: list[PooledRows] = []
        for (dimensions, activates, head), members in groups.items():
            chosen_BD = vectors_BD if len(members) == len(rows_B) else vectors_BD[members]
            values = self._activated(head(chosen_BD), dimensions, activates)
            results.append(PooledRows([rows_B[index] for index in members], values, is_vector=True))
        return results

    def _finish_image(self, row: int, vector_C: torch.Tensor) -> PooledRows:
        params = self._params[row]
        values = self._activated(vector_C[None].float(), params.dimensions or 0, bool(params.use_activation))
        return PooledRows([row], values, is_vector=True)

    # Numbers of tokens.

    def _finish_tokens(self, row: int, state: BatchState) -> PooledRows:
        params = self._params[row]
        chunks = self._tokens_so_far.pop(row)
        values_TC = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        if params.late_chunking_params is not None:
            values_TC = self._head_of(row)(_chunk_means(values_TC, params.late_chunking_params.chunk_size))
        if params.step_tag_id is not None:
            tokens_T = state.token_ids_RL[row, : len(values_TC)]
            values_TC = values_TC[np.flatnonzero(tokens_T == params.step_tag_id).tolist()]
        if params.returned_token_ids is not None:
            values_TC = values_TC[:, params.returned_token_ids]
        values_TC = self._activated(values_TC, params.dimensions or 0, bool(params.use_activation))
        return PooledRows([row], values_TC, is_vector=False)

    def _head_of(self, row: int) -> PoolingHead:
        return self.own_head(row) or self.head

    def _activated(self, values_XC: torch.Tensor, dimensions: int, activates: bool) -> torch.Tensor:
        if dimensions:
            values_XC = values_XC[:, :dimensions]
        if not activates:
            return values_XC
        kind = self._config.activation
        if kind == "none":  # the model has none, but this request wants one
            kind = "normalize" if self._config.embeds else ("sigmoid" if values_XC.shape[1] == 1 else "softmax")
        return _ACTIVATIONS[kind](values_XC)


def _chunk_means(values_TD: torch.Tensor, size: int) -> torch.Tensor:
    """float32: the mean of each `size` rows; of the last chunk, of those that are left."""
    count = len(values_TD)
    lengths = torch.tensor([min(size, count - at) for at in range(0, count, size)], device=values_TD.device)
    return torch.segment_reduce(values_TD.float(), "mean", lengths=lengths, axis=0)


def make_pooler(config: EngineConfig, model: CausalLM, device: torch.device, max_tokens: int) -> Pooler | None:
    """The pooler of a pooling model; None for one that generates.

    Raises:
        ConfigError: the checkpoint has no head for it.
    """
    if config.model.pooling is None:
        return None
    numbers = model.describe()
    if "hidden" not in numbers:
        raise ConfigError(f"{type(model).__name__} does not tell how wide its hidden states are", setting="runner")
    token_types = model.spec.token_types if isinstance(model, Decoder) else 0
    return Pooler(config, int(numbers["hidden"]), device, max_tokens, token_types)


def _reduce(
    kind: str, hidden_TD: torch.Tensor, index_B: torch.Tensor, counts_B: torch.Tensor, before_B1: torch.Tensor
) -> torch.Tensor:
    """Each request's tokens of this step alone: the first, the largest, or the sum (weighted by position)."""
    if kind == "cls":
        return hidden_TD[index_B[:-1]].float()
    values_TD = hidden_TD.float()
    if kind == "weighted_mean":
        place_T = torch.arange(len(values_TD), device=values_TD.device)
        first_T = torch.repeat_interleave(index_B[:-1] - before_B1[:, 0], counts_B, output_size=len(values_TD))
        values_TD = values_TD * (place_T - first_T + 1).unsqueeze(1)
    return torch.segment_reduce(values_TD, "max" if kind == "max" else "sum", lengths=counts_B, axis=0, unsafe=True)
