"""The text and the bytes of single tokens at one position of a sequence, as logprobs show them.

A character may be split over several tokens. The tokens that begin it have no text of their own, and the token that ends it
has the whole character. So the texts of a sequence's tokens, joined, are the sequence's text.

Knows token ids and text. Knows nothing of logprobs or requests.
"""

import codecs
from collections.abc import Sequence

from quire.tokenizers.interface import Tokenizer
from quire.tokenizers.token_bytes import TokenBytes, last_bytes

CONTEXT_TOKENS = 4
"""How many tokens before a position may hold the beginning of its character: as many as a character has bytes."""
_REPLACEMENT = "\ufffd"


def texts_at(
    tokenizer: Tokenizer, before: Sequence[int], token_ids: Sequence[int], *, keeps_broken: bool = True
) -> list[str]:
    """The texts of tokens that could follow `before`; the first of them is the one that does.

    Args:
        before: at least the last `CONTEXT_TOKENS` tokens of the sequence, as far as it has them.
        keeps_broken: bytes in `before` which the first token does not complete are shown with it, as U+FFFD.
    """
    if tokenizer.token_bytes is None:
        return [_decoded_text(tokenizer, before, token_id) for token_id in token_ids]
    table, texts = tokenizer.token_bytes, tokenizer.token_bytes.texts(False)
    pending = _unfinished_bytes(table, before)
    result: list[str] = []
    for index, token_id in enumerate(token_ids):
        text = texts[token_id]
        if text is None or pending:
            data = table.of(token_id)
            continues = 0x80 <= data[:1][0] < 0xC0 if data else False
            if continues or (index == 0 and keeps_broken):
                data = pending + data
            text = codecs.utf_8_decode(data, "replace", False)[0]
        result.append(text)
    return result


def bytes_of(tokenizer: Tokenizer | None, token_id: int, text: str) -> bytes:
    """A token's own bytes, also where it is only a part of a character; those of `text` where the tokenizer has no table."""
    table = None if tokenizer is None else tokenizer.token_bytes
    return text.encode("utf-8", "replace") if table is None else table.of(token_id)


def _unfinished_bytes(table: TokenBytes, before: Sequence[int]) -> bytes:
    """The bytes at the end of a sequence that begin a character and do not end it."""
    if not before or table.texts(False)[before[-1]]:
        return b""
    tail = last_bytes(table.table(False), before)
    used = codecs.utf_8_decode(tail, "replace", False)[1]
    return tail[used:]


def _decoded_text(tokenizer: Tokenizer, before: Sequence[int], token_id: int) -> str:
    """The same for a tokenizer without a table of bytes: what a token adds to the decoded text of those before it."""
    text = tokenizer.decode([token_id])
    if not text.endswith(_REPLACEMENT):
        return text
    context = list(before[-CONTEXT_TOKENS:])
    whole = tokenizer.decode([*context, token_id])
    if whole.endswith(_REPLACEMENT):
        return ""
    return whole[len(tokenizer.decode(context).rstrip(_REPLACEMENT)) :]
