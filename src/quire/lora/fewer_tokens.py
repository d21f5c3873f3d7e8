"""Adapters whose base had fewer tokens than the model here: its matrices were cut to its tokenizer's length before training.

Such a model has no logits for the tokens that were cut; here they are there, and count as impossible for the adapter's rows.
Knows rows of updates; knows nothing of slots.

Legend: R rank, D hidden, N outputs of the head on this rank.
"""

import dataclasses

import torch

from quire.kernels.adapters import AdapterPart
from quire.lora.peft_folder import Update
from quire.lora.several import Segment

OF_TOKENS = ("embedding", "lm_head")
"""The modules that have a row for each token."""
ALL = 1 << 62
"""As many tokens as the model has."""


def num_tokens(segment: Segment, update: Update) -> int:
    """The rows of tokens that an update was made for; `ALL` where it does not say."""
    if segment.module.name not in OF_TOKENS or update.token_rows is not None:
        return ALL
    if update.whole is not None:
        return update.whole.shape[0]
    if update.down is None or update.up is None:
        return ALL
    return update.down.shape[1] if segment.module.kind == "embedding" else update.up.shape[0]


def fill_up(segment: Segment, update: Update) -> Update:
    """The same update with rows of zeros for the tokens that its base did not have."""
    missing = segment.rows - num_tokens(segment, update)
    if missing <= 0:
        return update

    def longer(rows: torch.Tensor | None, value: float = 0.0) -> torch.Tensor | None:
        return None if rows is None else torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])

    if segment.module.kind == "embedding":
        down = None if update.down is None else torch.cat([update.down, update.down.new_zeros(update.rank, missing)], 1)
        return dataclasses.replace(update, whole=longer(update.whole), down=down)
    lengths = {"whole": update.whole, "up": update.up, "bias": update.bias, "gain": update.gain}
    filled = {name: longer(rows) for name, rows in lengths.items()}
    return dataclasses.replace(update, **filled, magnitude=longer(update.magnitude, 1.0))


def forbid(part: AdapterPart | None, head: Segment, count: int, shape: tuple[int, int]) -> AdapterPart:
    """A head's part that has no logits for tokens from `count` on.

    Args:
        shape: (outputs, inputs) of this rank's head.
    """
    outputs, inputs = shape
    part = part or AdapterPart(torch.zeros(0, inputs), torch.zeros(0, outputs), 0)
    gain_N, shift_N = part.gain, part.shift
    if gain_N is None or shift_N is None:
        gain_N, shift_N = torch.ones(outputs), torch.zeros(outputs)
    for block in head.blocks:
        tokens = torch.arange(head.rows)[block.rows]
        shift_N[block.at : block.at + len(tokens)][tokens >= count] = -torch.inf
    return dataclasses.replace(part, gain=gain_N, shift=shift_N)
