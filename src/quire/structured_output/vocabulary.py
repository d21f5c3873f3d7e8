"""A tokenizer's vocabulary as a grammar sees it: the bytes that each token adds to the text."""

import dataclasses
from collections.abc import Callable

from quire.errors import RequestError
from quire.tokenizers.interface import Tokenizer


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Every token's bytes, empty for ids without a token; `special_ids` never stand for text; `encode` gives a text's
    tokens."""

    tokens: list[bytes]
    special_ids: list[int]
    encode: Callable[[str], list[int]]


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """The vocabulary of a model with `vocab_size` logits.
    Raises RequestError: the tokenizer's tokens are not plain runs of bytes."""
    if tokenizer.token_bytes is None:
        raise RequestError(
            "structured_outputs need a tokenizer whose tokens stand for bytes (byte-level BPE, or SentencePiece with byte "
            "fallback); this model's does not",
            param="structured_outputs",
        )
    table = tokenizer.token_bytes.table(False)
    known = min(vocab_size, tokenizer.max_token_id + 1)
    tokens = [table[token_id] for token_id in range(known)] + [b""] * (vocab_size - known)
    special = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
    return Vocabulary(tokens, special, lambda text: tokenizer.encode(text, add_special_tokens=False))
