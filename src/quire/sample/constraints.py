"""Which tokens a row may not draw, and which it should draw more: allowed ids, bad words, min_tokens, logit bias; the
end of its reasoning, once its budget is spent; a trace that it repeats; and the row's grammar, if it has one, which
`grammar_masks` asks.

Knows token ids and positions. Knows nothing of probabilities.

Legend: S rows of the batch, V vocabulary, N edited logits of all rows.
"""

from typing import Any

import numpy as np
import torch

from quire.sample.thinking import ThinkingLimit
from quire.sampling_params import SamplingParams

NOTHING_LEFT = "allowed_token_ids, bad_words, min_tokens and the grammar together forbid every token"


class RowConstraints:
    """One row's constraints.

    Args:
        params: the request's parameters.
        num_prompt_tokens: where its output begins.
        output_token_ids: its output so far; the caller keeps this very list up to date.
        vocab_size: ids from here on are ignored.
        grammar: where the row stands in its grammar, as the source of grammars made it.

    Attributes:
        grammar_ends: of a row with a grammar, in place of `early`: ids that end it, not drawn before `min_position` as long
            as the grammar leaves others.
        may_jump: whether the tokens that its grammar forces are what it draws, with nothing else to say against them.
        thinking: how long it may think, where that is limited.
    """

    def __init__(
        self,
        params: SamplingParams,
        num_prompt_tokens: int,
        output_token_ids: list[int],
        vocab_size: int,
        grammar: Any = None,
    ) -> None:
        bias = {token: value for token, value in (params.logit_bias or {}).items() if 0 <= int(token) < vocab_size}
        self.bias_ids = np.fromiter((int(token) for token in bias), dtype=np.int64, count=len(bias))
        self.bias_values = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        self.allowed = _sorted_ids(params.allowed_token_ids or [], vocab_size)
        self.min_position = num_prompt_tokens + params.min_tokens
        early = [*params.eos_token_ids, *(params.stop_token_ids or ())] if params.min_tokens else []
        early_ids, none = _sorted_ids(early, vocab_size), _sorted_ids([], vocab_size)
        self.early, self.grammar_ends = (early_ids, none) if grammar is None else (none, early_ids)
        self.grammar = grammar
        self._bad_words = [words for words in params.bad_words_token_ids if words]
        self.single = _sorted_ids([words[0] for words in self._bad_words if len(words) == 1], vocab_size)
        self._sequences = [words for words in self._bad_words if len(words) > 1]
        self._narrows_grammar = bool(len(self.allowed) or self._bad_words or len(self.grammar_ends))
        self.may_jump = grammar is not None and not len(self.allowed) and not self._bad_words
        self.output = output_token_ids
        self._trace, self._start = params.trace_decode_token_ids or [], num_prompt_tokens
        self.thinking: ThinkingLimit | None = None
        if params.thinking is not None and params.thinking_token_budget is not None:
            budget = params.thinking_token_budget
            self.thinking = ThinkingLimit(params.thinking, budget, num_prompt_tokens, output_token_ids)

    @staticmethod
    def are_needed(params: SamplingParams) -> bool:
        """Whether a request has any."""
        return bool(
            params.logit_bias
            or params.allowed_token_ids
            or params.bad_words_token_ids
            or params.structured_outputs is not None
            or params.trace_decode_token_ids
            or (params.thinking is not None and params.thinking_token_budget is not None)
            or (params.min_tokens and (params.eos_token_ids or params.stop_token_ids))
        )

    @property
    def narrows_grammar(self) -> bool:
        """Whether anything but its grammar forbids tokens to the row."""
        return self._narrows_grammar or (self.thinking is not None and not self.thinking.is_over)

    @property
    def needs_output(self) -> bool:
        """Whether the output list is read at every position."""
        return bool(self._sequences) or self.grammar is not None

    def end_at(self, position: int) -> bool:
        """Whether nothing is left to do from this position on."""
        others = len(self.bias_ids) or len(self.allowed) or self._bad_words or self.grammar is not None or self._trace
        may_end = position >= self.min_position and not others
        return may_end and (self.thinking is None or self.thinking.is_over)

    def forced(self, position: int) -> int | None:
        """The only token that the row may draw at this position, whatever else is said of it; None where it has a choice."""
        if (index := position - self._start) < len(self._trace):
            return self._trace[index]
        return None if self.thinking is None else self.thinking.forced(position)

    def banned(self, position: int) -> list[np.ndarray]:
        """Ids that may not be drawn at this position, in parts."""
        parts = [self.single] if len(self.single) else []
        if position < self.min_position and len(self.early):
            parts.append(self.early)
        ends = [
            words[-1]
            for words in self._sequences
            if len(words) - 1 <= len(self.output) and self.output[1 - len(words) :] == words[:-1]
        ]
        if ends:
            parts.append(np.array(ends, dtype=np.int64))
        return parts


def _sorted_ids(ids: list[int], vocab_size: int) -> np.ndarray:
    return np.array(sorted({token for token in ids if 0 <= token < vocab_size}), dtype=np.int64)


def force_token(logits_V: torch.Tensor, token_id: int) -> None:
    """Leave a row this token alone, with whatever was forbidden before."""
    logits_V.fill_(float("-inf"))
    logits_V[token_id] = 0.0
