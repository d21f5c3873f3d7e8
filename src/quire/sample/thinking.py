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
        self._end = thinking.end
        self._start = thinking.start
        self._output = output_token_ids
        self._num_read = 0
        self._is_over = False
        self.deadline = num_prompt_tokens + budget + (thinking.start is not None)

    @property
    def is_over(self) -> bool:
        """Whether the row thinks no more, as far as its output tells."""
        output, end = self._output, self._end
        if self._start is not None and output and not self._num_read:
            self._is_over = output[0] != self._start
        while not self._is_over and self._num_read < len(output):
            self._num_read += 1
            self._is_over = output[max(0, self._num_read - len(end)) : self._num_read] == end
        return self._is_over

    def forced(self, position: int) -> int | None:
        """The only token that may stand there; None where any may. From the deadline on the whole output must be known."""
        if position < self.deadline or self.is_over:
            return None
        end, output = self._end, self._output
        said = next(count for count in range(len(end) - 1, -1, -1) if output[len(output) - count :] == end[:count])
        return end[said]
