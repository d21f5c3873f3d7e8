"""A sampler that computes each row by itself, in plain PyTorch: what the real one must agree with.

Row state and constraints (which tokens are banned, forced, ended) are the real ones; everything that touches logits is written
again in the simplest way.
"""

import dataclasses

import numpy as np
import torch

from quire.kernels import ops
from quire.kernels.registry import reference
from quire.kernels.sampling import compute_thresholds
from quire.request import TokenLogprobs
from quire.sample import sampling_rows as features
from quire.sample.constraints import NOTHING_LEFT
from quire.sample.custom_processors import run_engine_processors, run_row_processors
from quire.sample.logits_processor import LogitsProcessor
from quire.sample.sampling_rows import SamplingRows
from quire.sampling_params import SamplingParams


@dataclasses.dataclass
class SamplerOutput:
    """A step's tokens, in the order of the rows that were given; logprobs and errors by row."""

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs] = dataclasses.field(default_factory=dict)
    errors: dict[int, str] = dataclasses.field(default_factory=dict)


class PlainSampler:
    """As `quire.sample.sampler.Sampler`, without grammars."""

    def __init__(self, max_rows: int, vocab_size: int, mode: str, processors: list[LogitsProcessor] | None) -> None:
        self._table = SamplingRows(max_rows, vocab_size, processors or [])
        self._mode = mode
        self._params: dict[int, SamplingParams] = {}
        self._tokens: dict[int, tuple[list[int], list[int]]] = {}

    def add_row(self, row: int, params: SamplingParams, prompt: list[int], output: list[int], seed: int) -> None:
        self._table.add(row, params, prompt, output, seed)
        self._params[row], self._tokens[row] = params, (list(prompt), list(output))

    def remove_row(self, row: int) -> None:
        self._table.remove(row)

    def sample(self, logits_SV: torch.Tensor, rows_S: np.ndarray, positions_S: np.ndarray) -> SamplerOutput:
        output = SamplerOutput(np.zeros(len(rows_S), dtype=np.int32))
        for index, (row, position) in enumerate(zip(rows_S.tolist(), positions_S.tolist(), strict=True)):
            output.token_ids[index] = token = self._sample_row(logits_SV[index : index + 1], row, position, output)
            self._tokens[row][1].append(token)
            if row in self._table.objects:
                self._table.objects[row].output_token_ids.append(token)
        return output

    def compute_prompt_logprobs(self, logits_NV: torch.Tensor, token_ids_N: np.ndarray, row: int) -> TokenLogprobs:
        count = int(self._table.num_prompt_logprobs_R[row])
        found = TokenLogprobs([], [], [])
        for logits_V, token in zip(logits_NV, token_ids_N.tolist(), strict=True):
            entry = self._logprobs(logits_V, [token], count)
            found.token_ids += entry.token_ids
            found.logprobs += entry.logprobs
            found.ranks += entry.ranks
        return found

    def _sample_row(self, logits_1V: torch.Tensor, row: int, position: int, output: SamplerOutput) -> int:
        params, table = self._params[row], self._table
        raw_V = logits_1V[0].clone()
        if table.features_R[row] & features.FAILED:
            output.errors[row] = table.objects[row].failure
        self._constrain(logits_1V[0], row, position, output.errors)
        rows_1 = np.array([row], dtype=np.int32)
        if row in table.objects:
            run_row_processors(table, logits_1V, rows_1, [0], output.errors)
            run_engine_processors(table, logits_1V, rows_1, [0], output.errors)
        self._penalize(logits_1V[0], row)
        inverse_1 = torch.from_numpy(table.inverse_temperature_R[[row]])
        columns = (torch.from_numpy(values_R[[row]]) for values_R in (table.top_k_R, table.top_p_R, table.min_p_R))
        threshold_1 = compute_thresholds(logits_1V, inverse_1, *columns)
        logits_1V.masked_fill_(logits_1V < threshold_1[:, None], -torch.inf)
        out_1 = torch.zeros(1, dtype=torch.int32)
        reference(ops.gumbel_argmax)(
            logits_1V, inverse_1, torch.from_numpy(table.seed_R[[row]]), torch.tensor([position]), out_1
        )
        token = int(out_1)
        if table.features_R[row] & features.LOGPROBS:
            scale = 1.0 if torch.isinf(inverse_1) else inverse_1
            reported_V = raw_V if self._mode.startswith("raw") else logits_1V[0] * scale
            named = params.logprob_token_ids
            count = 0 if named is not None else int(table.num_logprobs_R[row])
            output.logprobs[row] = self._logprobs(reported_V, [token, *(named or ())], count)
        return token

    def _constrain(self, logits_V: torch.Tensor, row: int, position: int, errors: dict[int, str]) -> None:
        objects = self._table.objects.get(row)
        constraints = objects.constraints if objects else None
        if constraints is None:
            return
        if constraints.end_at(position):
            self._table.end_constraints(row)
            return
        for token, value in zip(constraints.bias_ids.tolist(), constraints.bias_values, strict=True):
            logits_V[token] += value
        if len(constraints.allowed):
            is_allowed_V = torch.zeros(len(logits_V), dtype=torch.bool)
            is_allowed_V[torch.from_numpy(constraints.allowed)] = True
            logits_V.masked_fill_(~is_allowed_V, -torch.inf)
        for ids in constraints.banned(position):
            logits_V[torch.from_numpy(ids)] = -torch.inf
        if torch.isinf(logits_V).all():
            errors[row] = NOTHING_LEFT
        if (token_id := constraints.forced(position)) is not None:
            logits_V.fill_(-torch.inf)
            logits_V[token_id] = 0.0

    def _penalize(self, logits_V: torch.Tensor, row: int) -> None:
        params, (prompt, output) = self._params[row], self._tokens[row]
        for token in {*prompt, *output}:
            if token in output or params.repetition_penalty != 1.0:
                factor = torch.tensor(params.repetition_penalty)
                logits_V[token] = logits_V[token] / factor if logits_V[token] > 0 else logits_V[token] * factor
                count, seen = torch.tensor(float(output.count(token))), float(token in output)
                logits_V[token] -= torch.tensor(params.frequency_penalty) * count + params.presence_penalty * seen

    def _logprobs(self, logits_V: torch.Tensor, token_ids: list[int], count: int) -> TokenLogprobs:
        values_V = torch.log_softmax(logits_V, -1) if self._mode.endswith("logprobs") else logits_V
        ids = [*token_ids, *torch.topk(logits_V, count).indices.tolist()]
        rank = 1 + int((logits_V > logits_V[token_ids[0]]).sum())
        return TokenLogprobs([ids], [values_V[ids].tolist()], [rank])
