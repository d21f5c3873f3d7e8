"""Predicts how long a step takes from its shape, and learns from every step that was measured.

milliseconds = base + a * tokens + b * sequences + c * attended, where `attended` counts (token, context token) pairs.
The four coefficients are never negative. They are fitted online: normal equations that forget slowly, solved under the
bound by coordinate descent; a step that took far longer than predicted (a page fault, a neighbour on the machine)
weighs in as an outlier does in Huber's estimator. Knows no clock and no scheduler.
"""

import operator

import numpy as np

MIN_OBSERVATIONS = 16
"""Steps before a prediction is offered: fewer do not tell four coefficients apart."""

_NUM_FEATURES = 4
_PROMPT_TOKENS = 8
"""More for each sequence than those that only answer have."""
_FORGETTING = 0.998
_HUBER = 3.0
_SWEEPS = 60
_SETTLED = 1e-6


class CostModel:
    """Learns a step's milliseconds.

    Attributes:
        num_observations: measured steps so far. num_prompts: those that had a good part of a prompt.
    """

    def __init__(self) -> None:
        self._normal: list[list[float]] = [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)]
        self._moment: list[float] = [0.0] * _NUM_FEATURES
        self._coefficients: list[float] = [0.0] * _NUM_FEATURES
        self._is_stale = False
        self._spread = 0.0
        self._mean_output = 0.0
        self.num_observations = self.num_prompts = 0

    @property
    def is_ready(self) -> bool:
        """Whether enough was seen to predict."""
        return self.num_observations >= MIN_OBSERVATIONS

    @property
    def knows_prompts(self) -> bool:
        """Whether enough was seen to predict what a prompt takes: in steps of one token each, tokens and sequences look alike."""
        return self.num_prompts >= MIN_OBSERVATIONS

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Milliseconds: a step, a token, a sequence, an attended pair."""
        if self._is_stale:
            self._solve()
        base, token, sequence, attended = self._coefficients
        return base, token, sequence, attended

    def observe(self, tokens: int, sequences: int, attended: float, step_ms: float) -> float:
        """Learn from a measured step. Times that are not positive and finite are passed over.

        Returns the milliseconds that it would have predicted; 0 for times that are passed over.
        """
        if not 0.0 < step_ms < 1e9:
            return 0.0
        features = (1.0, float(tokens), float(sequences), attended)  # Four numbers: plain floats beat small arrays.
        predicted = self.predict(tokens, sequences, attended)
        residual = abs(step_ms - predicted)
        weight = 1.0
        if self.is_ready and residual > _HUBER * self._spread > 0.0:
            weight = _HUBER * self._spread / residual
        self._spread = max(0.98 * self._spread + 0.02 * 1.25 * min(residual, step_ms) * weight, 1e-6)
        # Relative errors count alike, whether a step is long or short.
        weight /= max(step_ms, 1e-3)
        self._normal = [
            [old * _FORGETTING + weight * one * other for old, other in zip(row, features, strict=True)]
            for row, one in zip(self._normal, features, strict=True)
        ]
        self._moment = [
            old * _FORGETTING + weight * step_ms * one for old, one in zip(self._moment, features, strict=True)
        ]
        self.num_observations += 1
        self.num_prompts += tokens > _PROMPT_TOKENS * sequences
        # Solving costs more than a small step's planning may: later ones are solved for in batches.
        self._is_stale = self._is_stale or self.num_observations <= 64 or self.num_observations % 32 == 0
        return predicted

    def predict(self, tokens: int, sequences: int, attended: float) -> float:
        """Milliseconds of a step; 0 as long as nothing was observed."""
        base, token, sequence, pair = self.coefficients
        return base + token * tokens + sequence * sequences + pair * attended

    def tokens_within(self, step_ms: float, tokens: int, sequences: int, attended: float, context: int) -> int:
        """Prompt tokens at `context` that fit into `step_ms` beside a batch of the given shape; very many if unknown."""
        if not self.is_ready:
            return 1 << 30
        left = step_ms - self.predict(tokens, sequences + 1, attended)
        _, token, _, pair = self.coefficients
        if left <= 0:
            return 0
        # token * q + pair * q * (context + q / 2) = left, solved for q.
        linear = token + pair * context
        if pair > 0.0:
            return int((-linear + (linear * linear + 2 * pair * left) ** 0.5) / pair)
        return int(left / linear) if linear > 0.0 else 1 << 30

    def observe_output_length(self, num_tokens: int) -> None:
        """Learn from a request that ended how long outputs are."""
        self._mean_output = num_tokens if not self._mean_output else 0.95 * self._mean_output + 0.05 * num_tokens

    def predict_queue_delay(
        self,
        num_waiting: int,
        waiting_tokens: int,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        cache_tokens: int = 1 << 40,
    ) -> float:
        """Seconds until a queue of this size has been admitted: its prompts' prefill, and rows and pages becoming free."""
        if not self.is_ready or num_waiting == 0:
            return 0.0
        mean_prompt = waiting_tokens / num_waiting
        max_num_seqs = max(1, min(max_num_seqs, int(cache_tokens / (mean_prompt + self._mean_output))))
        attended = max_num_batched_tokens * mean_prompt / 2
        prefill_steps = waiting_tokens / max_num_batched_tokens
        prefill_ms = prefill_steps * self.predict(max_num_batched_tokens, max_num_seqs, attended)
        decode_attended = max_num_seqs * (mean_prompt + self._mean_output / 2)
        turns = num_waiting / max_num_seqs
        decode_ms = turns * self._mean_output * self.predict(max_num_seqs, max_num_seqs, decode_attended)
        return (prefill_ms + decode_ms) / 1000.0

    def predict_alone(self, num_tokens: int, context: int, num_outputs: int, max_num_batched_tokens: int) -> float:
        """Seconds that a request takes by itself at least: `num_tokens` of its prompt behind `context`, and its outputs."""
        if not self.is_ready:
            return 0.0
        base, token, sequence, pair = self.coefficients
        num_steps = -(-num_tokens // max_num_batched_tokens)
        prefill = num_steps * (base + sequence) + num_tokens * (token + pair * (context + num_tokens / 2))
        length = context + num_tokens + num_outputs / 2
        return (prefill + num_outputs * (base + sequence + token + pair * length)) / 1000.0

    def _solve(self) -> None:
        """Least squares with non-negative coefficients, by cyclic coordinate descent on scaled normal equations."""
        self._is_stale = False
        scale = [max(self._normal[i][i], 1e-30) ** 0.5 for i in range(_NUM_FEATURES)]
        normal = [
            [self._normal[i][j] / (scale[i] * scale[j]) + 1e-7 * (i == j) for j in range(_NUM_FEATURES)]
            for i in range(_NUM_FEATURES)
        ]
        moment = [value / size for value, size in zip(self._moment, scale, strict=True)]
        solution: list[float] = np.linalg.solve(np.array(normal), np.array(moment)).tolist()
        if min(solution) < 0.0:
            solution = [max(0.0, value * size) for value, size in zip(self._coefficients, scale, strict=True)]
            _descend(normal, moment, solution)
        self._coefficients = [value / size for value, size in zip(solution, scale, strict=True)]


def _descend(normal: list[list[float]], moment: list[float], solution: list[float]) -> None:
    """Improve a non-negative solution in place, one coordinate after the other, until it moves no more."""
    for _ in range(_SWEEPS):
        moved = 0.0
        for i, row in enumerate(normal):
            before = solution[i]
            now = before + (moment[i] - sum(map(operator.mul, row, solution))) / row[i]
            solution[i] = now if now > 0.0 else 0.0
            moved = max(moved, abs(solution[i] - before))
        if moved <= _SETTLED * max(solution):
            return
