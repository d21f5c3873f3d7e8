"""Text from token ids, piece by piece.

The rule: the pieces, joined, are what decoding everything at once gives, and a piece never ends within a character. The
output is read as the prompt's continuation, so a word that begins the output keeps its leading space.

Knows token ids and text. Knows nothing of requests or stop strings.
"""

import abc
import codecs
from collections.abc import Sequence

from quire.tokenizers.interface import Tokenizer
from quire.tokenizers.token_bytes import MAX_UTF8_BYTES, TokenBytes, last_bytes

_CONTEXT_TOKENS = 6
"""Prompt tokens that the window of a tokenizer without a byte table begins with."""

_REPLACEMENT = "\ufffd"


class Detokenizer(abc.ABC):
    """Text of one growing sequence."""

    @abc.abstractmethod
    def feed(self, token_ids: Sequence[int]) -> str:
        """Append tokens; returns the text that is now certain."""

    @abc.abstractmethod
    def finish(self) -> str:
        """The sequence has ended; returns what was held back (part of a character, as U+FFFD)."""


class ByteDetokenizer(Detokenizer):
    """Through the table of bytes: a few hundred nanoseconds a token, and exact by construction."""

    def __init__(self, table: TokenBytes, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._table = table
        self._bytes_of = table.table(skip_special_tokens)
        self._text_of = table.texts(skip_special_tokens)
        self._skip_special_tokens = skip_special_tokens
        self._pending = b""
        tail = last_bytes(self._bytes_of, prompt_token_ids)
        self._at_start = not tail
        self._at_border = True
        if tail and tail[-1] >= 0x80:
            self._decode(tail)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Append tokens."""
        if self._at_border:
            return self._feed_at_border(token_ids)
        if len(token_ids) == 1 and not self._pending and (text := self._text_of[token_ids[0]]) is not None:
            return text
        return self._decode(self._pending + b"".join(map(self._bytes_of.__getitem__, token_ids)))

    def _decode(self, data: bytes, is_last: bool = False) -> str:
        """Text of all but the beginning of a character at the end, which waits."""
        text, used = codecs.utf_8_decode(data, "replace", is_last)
        self._pending = data[used:]
        return text

    def _feed_at_border(self, token_ids: Sequence[int]) -> str:
        """The first visible bytes: they may complete a character that the prompt began. If they do not, that piece of a
        character was the prompt's text, not the output's."""
        data = self._table.join(token_ids, self._skip_special_tokens, at_start=self._at_start)
        if not data:
            if self._at_start:
                self._at_start = not any(self._bytes_of[token_id] for token_id in token_ids)
            return ""
        self._at_border = self._at_start = False
        if not 0x80 <= data[0] < 0xC0:
            self._pending = b""
        return self._decode(self._pending + data)

    def finish(self) -> str:
        """What was held back."""
        return self._decode(self._pending, is_last=True)


class WindowDetokenizer(Detokenizer):
    """For tokenizers without a byte table: decodes a short window again with every token.

    The window begins with tokens whose text is out already, as context. Text at its end that may still turn into another
    character (U+FFFD) waits; at most as many characters wait as one character has bytes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._context = len(self._window)
        self._text = self._decode(self._window)
        self._emitted = len(self._text)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip, self._spaces)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Append tokens."""
        pieces: list[str] = []
        for token_id in token_ids:
            self._window.append(token_id)
            pieces.append(self._advance())
        return "".join(pieces)

    def _advance(self) -> str:
        self._text = self._decode(self._window)
        certain = len(self._text)
        while certain > self._emitted and self._text[certain - 1] == _REPLACEMENT:
            certain -= 1
        waiting = len(self._text) - certain
        if waiting > MAX_UTF8_BYTES:
            certain = len(self._text) - MAX_UTF8_BYTES
        piece = self._text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        if not waiting and piece:
            self._move_window()
        return piece

    def _move_window(self) -> None:
        """Everything is out: the tokens since the last move become the context of those to come."""
        self._window = self._window[self._context :] if self._context < len(self._window) else self._window
        self._context = len(self._window)
        self._text = self._decode(self._window)
        self._emitted = len(self._text)

    def finish(self) -> str:
        """What was held back."""
        piece = self._text[self._emitted :]
        self._emitted = len(self._text)
        return piece


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> Detokenizer:
    """The right detokenizer for this tokenizer; the output continues the prompt."""
    if tokenizer.token_bytes is not None:
        return ByteDetokenizer(tokenizer.token_bytes, prompt_token_ids, skip_special_tokens)
    return WindowDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)


def detokenize(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> str:
    """The text of a whole output at once; equal to the streamed pieces joined."""
    detokenizer = make_detokenizer(tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)
    return detokenizer.feed(token_ids) + detokenizer.finish()
