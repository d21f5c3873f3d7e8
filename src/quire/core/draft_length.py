"""How many guesses of each row to verify in a step: as many as raise the tokens that a millisecond is expected to give.

A guess that is the j-th of its row is right if all before it are: its chance is p^j, and it costs a token of the step. Guesses
are taken by their chance, the likeliest first, as long as the rate of the whole step grows. Knows numbers alone.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LEAST_GAIN = 1.02
"""How much faster a step with guesses has to be expected to be: what is nearly equal is not worth the risk."""


def choose_lengths(
    chances: Sequence[float],
    most: Sequence[int],
    room: int,
    num_tokens: int,
    step_ms: float,
    step_with_ms: npt.NDArray[np.float64],
) -> list[int]:
    """Guesses to verify for each row that has some.

    Args:
        chances: of each such row, how likely its next guess is right.
        most: of each such row, its guesses.
        room: guesses that the step may have in all.
        num_tokens: tokens that the step gives without guesses.
        step_ms: how long it takes without guesses.
        step_with_ms: how long with one guess, with two, and so on.
    """
    nothing = [0] * len(most)
    width, room = max(most, default=0), min(room, len(step_with_ms))
    if width == 0 or room <= 0 or step_ms <= 0.0:
        return nothing
    depth = np.arange(1, width + 1)
    chance_NK = np.asarray(chances, dtype=np.float64)[:, None] ** depth
    chance_NK[depth > np.asarray(most)[:, None]] = 0.0
    flat = chance_NK.reshape(-1)
    order = np.argsort(-flat, kind="stable")[:room]
    order = order[flat[order] > 0.0]
    if not len(order):
        return nothing
    rates = (num_tokens + np.cumsum(flat[order])) / step_with_ms[: len(order)]
    best = int(rates.argmax())
    if rates[best] < LEAST_GAIN * num_tokens / step_ms:
        return nothing
    lengths = np.bincount(order[: best + 1] // width, minlength=len(most))
    return lengths.tolist()
