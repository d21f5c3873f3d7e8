"""What encoders of sound are made of besides layers, as data.

Knows shapes and constants, as `spec.py` does.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Frames:
    """What an encoder of sound reads in the place of tokens: frames of `bins` numbers, through convolutions over three of them
    (the modules `conv1` and `conv2`), each with an activation behind it; the second one makes one row of two frames."""

    bins: int
    act: str = "gelu"
