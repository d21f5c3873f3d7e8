"""How long a row may think: where its budget is spent, the marker that ends its reasoning is all that it may draw.

Knows token ids and positions. Knows nothing of logits.
"""

from quire.sampling_params import Thinking


class ThinkingLimit:
    """One row's.

    Args:
        thinking: how its reasoning begins and ends.
        budget: tokens that it may think with, markers not counted.
        num_prompt_tokens: where its output begins.
        output_token_ids: its output so far; the caller keeps this very list up to date.

    Attributes:
        deadline: the first position at which anything may be forced; before it, nobody needs to know the output.
    """

    def __init__(self, thinking: Thinking, budget: int, num_prompt_tokens: int, output_token_ids: list[int]) -> None:
        self._ends = [thinking.end, *thinking.over]
        self._close = thinking.close or thinking.end
        self._lead = thinking.lead
        self._opening = thinking.opening
        self._output = output_token_ids
        self._num_read = 0
        self._is_over = False
        self.deadline = num_prompt_tokens + budget + len(self._opening) + len(thinking.lead)

    @property
    def is_over(self) -> bool:
        """Whether the row thinks no more, as far as its output tells."""
        output = self._output
        opening = self._opening
        if self._num_read < len(opening):
            self._is_over = output[: len(opening)] != opening[: len(output)]
        while not self._is_over and self._num_read < len(output):
            self._num_read += 1
            count = self._num_read
            self._is_over = any(output[max(0, count - len(end)) : count] == end for end in self._ends)
        return self._is_over

    def forced(self, position: int) -> int | None:
        """The only token that may stand there; None where any may. From the deadline on the whole output must be known."""
        if position < self.deadline or self.is_over:
            return None
        close, lead = self._close, self._lead
        if self._said(close) == len(close):
            return None  # what comes behind decides whether it is over
        if (said := self._said(lead)) > 1 and said < len(lead):
            return lead[said]
        return close[self._said(close)]

    def _said(self, tokens: list[int]) -> int:
        """How many of these, from the first on, the output ends with."""
        output = self._output
        longest = min(len(tokens), len(output))
        return next(count for count in range(longest, -1, -1) if output[len(output) - count :] == tokens[:count])
