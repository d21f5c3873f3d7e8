"""How many guesses of each row to verify in a step: as many as raise the tokens that a millisecond is expected to give.

A guess counts if it is right and all before it are, and it costs a token of the step. Guesses are taken by their chance, the
likeliest first, as long as the rate of the whole step grows. Knows numbers alone.

Legend: N rows that have guesses, K guesses.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LEAST_GAIN = 1.02
"""How much faster a step with guesses has to be expected to be: what is nearly equal is not worth the risk."""


def choose_lengths(
    chance_NK: npt.NDArray[np.float64],
    most: Sequence[int],
    room: int,
    num_tokens: int,
    step_ms: float,
    step_with_ms: npt.NDArray[np.float64],
) -> list[int]:
    """Guesses to verify for each row that has some.

    Args:
        chance_NK: of each such row, how likely each of its guesses is right together with all before it; falls along K.
        most: of each such row, its guesses.
        room: guesses that the step may have in all.
        num_tokens: tokens that the step gives without guesses.
        step_ms: how long it takes without guesses.
        step_with_ms: how long with one guess, with two, and so on.
    """
    nothing = [0] * len(most)
    width, room = int(chance_NK.shape[1]), min(room, len(step_with_ms))
    if room <= 0 or step_ms <= 0.0:
        return nothing
    is_guess_NK = np.arange(width) < np.asarray(most)[:, None]
    flat = (chance_NK * is_guess_NK).reshape(-1)
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
