"""A tokenizer's vocabulary as a grammar sees it: the bytes that each token adds to the text."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from quire.errors import RequestError


class _TokenBytes(Protocol):
    def table(self, skip_special_tokens: bool) -> Mapping[int, bytes]: ...


class _Tokenizer(Protocol):
    """As much of a tokenizer as a vocabulary needs."""

    @property
    def token_bytes(self) -> _TokenBytes | None: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def max_token_id(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Every token's bytes, empty for ids without a token; `special_ids` never stand for text; `encode` gives a text's
    tokens."""

    tokens: list[bytes]
    special_ids: list[int]
    encode: Callable[[str], list[int]]


def read_vocabulary(tokenizer: _Tokenizer, vocab_size: int) -> Vocabulary:
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
