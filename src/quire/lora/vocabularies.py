"""Adapters whose base had other tokens than the model here: its matrices were cut to its tokenizer's length, or grew by new ones.

The model has as many rows as any adapter may need; those that the checkpoint does not have are zeros. Which tokens a row may get
is decided where its logits are known, by the number that `tokens_of` gives. Knows rows of updates; knows nothing of slots.

Legend: R rank, D hidden, A added tokens.
"""

import dataclasses

import torch

from quire.lora.peft_folder import PeftAdapter, Update
from quire.lora.several import Segment

OF_TOKENS = ("embedding", "lm_head")
"""The modules that have a row for each token."""
UNKNOWN = -1
"""An update does not say how many tokens its base had."""


def num_tokens(segment: Segment, update: Update) -> int:
    """The rows of tokens that an update was made for; `UNKNOWN` where it does not say."""
    if segment.module.name not in OF_TOKENS or update.token_rows is not None:
        return UNKNOWN
    if update.whole is not None:
        return update.whole.shape[0]
    if update.down is None or update.up is None:
        return UNKNOWN
    return update.down.shape[1] if segment.module.kind == "embedding" else update.up.shape[0]


def tokens_of(adapter: PeftAdapter, updates: list[tuple[Segment, Update]], own: int, *, is_tied: bool) -> int:
    """How many tokens an adapter gives, over a model that has so many of its own: those for which it has both rows.

    Args:
        updates: with where they belong; `adapter.new_rows` are known by module.
        is_tied: the embedding is the head.
    """
    counts = {module: own + len(rows) for module, rows in adapter.new_rows.items()}
    for segment, update in updates:
        module, count = segment.module.name, num_tokens(segment, update)
        if count != UNKNOWN:
            counts[module] = count
        elif update.tokens:
            counts[module] = max(own, max(update.tokens) + 1, counts.get(module, 0))
    copied = [len(rows) for rows in adapter.copies.values()]
    if "lm_head" not in counts and not is_tied:
        counts["lm_head"] = own
    return min([*counts.values(), *(count for count in copied if count < own)], default=own)


def fill_up(segment: Segment, update: Update) -> Update:
    """The same update with rows of zeros for the tokens that its base did not have."""
    count = num_tokens(segment, update)
    missing = 0 if count == UNKNOWN else segment.rows - count
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


def with_rows(segment: Segment, update: Update, rows_AD: torch.Tensor, own: int) -> Update:
    """An update of all of a matrix' rows, and these behind its own ones, which are zeros in the model.

    Raises:
        ValueError: they cannot be added.
    """
    count, tokens = len(rows_AD), range(own, own + len(rows_AD))
    if own + count > segment.rows:
        raise ValueError(too_many(own + count, segment.rows))
    if update.token_rows is not None:
        others = [token for token in tokens if token not in update.tokens]
        rows = torch.cat([update.token_rows, rows_AD[[token - own for token in others]]])
        return dataclasses.replace(update, token_rows=rows, tokens=(*update.tokens, *others))
    if update.down is None or update.up is None:
        return update  # all rows are there
    if update.magnitude is not None:
        raise ValueError("has a magnitude and added tokens")
    one_AN = torch.zeros(count, segment.rows)
    one_AN[range(count), tokens] = 1.0
    up_NR = update.scale * update.up.float()
    if segment.module.kind == "embedding":
        down, up = torch.cat([update.down, one_AN]), torch.cat([up_NR, rows_AD.float().T], 1)
    else:
        down, up = torch.cat([update.down, rows_AD]), torch.cat([up_NR, one_AN.T], 1)
    return dataclasses.replace(update, down=down, up=up, scale=1.0)


def too_many(count: int, rows: int) -> str:
    """That an adapter has more tokens than there is room for."""
    return f"has {count} tokens in the adapter, and room for {rows} here: set lora_extra_vocab_size higher by {count - rows}"
