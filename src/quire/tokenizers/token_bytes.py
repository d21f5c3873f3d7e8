"""The bytes of each token, read from the decoder of a tokenizer.json.

With this table the text of a sequence is the UTF-8 decoding of its tokens' bytes, one after the other. So text can be
streamed exactly, token by token, with no window to decode again. Two families are known: byte-level BPE (GPT-2, Llama 3,
Qwen) and SentencePiece with byte fallback (Llama 2, Mistral, Gemma). Others (WordPiece, CTC) have no such table.

Knows token ids and bytes. Knows nothing of requests.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

ValueT = TypeVar("ValueT")
MAX_UTF8_BYTES = 4


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()
_CHARACTERS = {byte: character for character, byte in _ALPHABET.items()}


class _Table(dict[int, ValueT]):
    """A token's bytes or text, by its id; filled on first use: a large vocabulary costs nothing at start-up."""

    def __init__(self, compute: Callable[[int], ValueT]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> ValueT:
        value = self[token_id] = self._compute(token_id)
        return value


class TokenBytes:
    """The bytes of every token of one vocabulary.

    Args:
        piece: the bytes of an ordinary or added token's string.
        id_to_token: the token's string, None for an id without one (a padded vocabulary), which has no bytes.
        added: id → content of added tokens.
        special: ids that `skip_special_tokens` leaves out.
        strip_first: what the decoder drops at the start of a text: `""`, `"space"` (one space) or `"spaces"` (every
            leading-space mark of the first token).
    """

    def __init__(
        self,
        piece: Callable[[str, bool], bytes],
        id_to_token: Callable[[int], str | None],
        added: Mapping[int, str],
        special: frozenset[int],
        strip_first: str,
    ) -> None:
        self._piece = piece
        self._id_to_token = id_to_token
        self._added = added
        self._special = special
        self.strip_first = strip_first
        self._all = _Table(self._compute)
        self._visible = _Table(lambda token_id: b"" if token_id in special else self._compute(token_id))
        self._texts = {True: _Table(partial(_text_of, self._visible)), False: _Table(partial(_text_of, self._all))}

    def _compute(self, token_id: int) -> bytes:
        if (content := self._added.get(token_id)) is not None:
            return self._piece(content, True)
        token = self._id_to_token(token_id)
        return b"" if token is None else self._piece(token, False)

    def of(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """One token's bytes in the middle of a text."""
        return self.table(skip_special_tokens)[token_id]

    def table(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """The whole table; special tokens are empty in the one that skips them."""
        return self._visible if skip_special_tokens else self._all

    def texts(self, skip_special_tokens: bool) -> Mapping[int, str | None]:
        """The table's texts; None of tokens that are not whole characters."""
        return self._texts[skip_special_tokens]

    def first(self, data: bytes) -> bytes:
        """The bytes of a text's first token."""
        if self.strip_first == "space":
            return data.removeprefix(b" ")
        if self.strip_first == "spaces":
            return data.lstrip(b" ")
        return data

    def join(self, token_ids: Iterable[int], skip_special_tokens: bool, at_start: bool) -> bytes:
        """The bytes of a sequence; `at_start` when nothing visible comes before it."""
        pieces = map(self.table(skip_special_tokens).__getitem__, token_ids)
        if not (at_start and self.strip_first):
            return b"".join(pieces)
        for head in pieces:
            if head:
                return self.first(head) + b"".join(pieces)
        return b""


def last_bytes(bytes_of: Mapping[int, bytes], token_ids: Sequence[int]) -> bytes:
    """A sequence's last visible bytes, as many as a character can have; empty when nothing in it is visible."""
    tail = b""
    for token_id in reversed(token_ids):
        tail = bytes_of[token_id] + tail
        if len(tail) >= MAX_UTF8_BYTES or (tail and tail[-1] < 0x80):
            break
    return tail


def _text_of(bytes_of: Mapping[int, bytes], token_id: int) -> str | None:
    try:
        return bytes_of[token_id].decode()
    except UnicodeDecodeError:
        return None


def _byte_level_piece(alphabet: Mapping[str, int]) -> Callable[[str, bool], bytes]:
    def piece(token: str, is_added: bool) -> bytes:
        if is_added:
            return token.encode("utf-8", "replace")
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:
            return token.encode("utf-8", "replace")

    return piece


def _sentencepiece_piece(replacements: list[tuple[str, str]], byte_fallback: bool) -> Callable[[str, bool], bytes]:
    def piece(token: str, is_added: bool) -> bytes:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode("utf-8", "replace")

    return piece


def bytes_as_string(token: bytes) -> str:
    """A token's string in a byte-level vocabulary."""
    return "".join(_CHARACTERS[byte] for byte in token)


def string_bytes_table(
    id_to_token: Callable[[int], str | None], added: Mapping[str, int], hidden: frozenset[int]
) -> TokenBytes:
    """The table of a byte-level vocabulary; an added token's bytes are its own string."""
    contents = {token_id: token for token, token_id in added.items()}
    return TokenBytes(_byte_level_piece(_ALPHABET), id_to_token, contents, hidden, "")


def _flatten(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for part in decoder.get("decoders", []) for step in _flatten(part)]


def _sentencepiece_family(steps: list[Mapping[str, Any]]) -> tuple[Callable[[str, bool], bytes], str] | None:
    """The piece function and the strip rule of a chain of Replace, ByteFallback, Fuse, Strip, Metaspace; None if other."""
    replacements: list[tuple[str, str]] = []
    byte_fallback, strip_first = False, ""
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                replacements.append((pattern, content))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                strip_first = "space" if start else strip_first
            case {"type": "Metaspace", "replacement": str(mark)}:
                replacements.append((mark, " "))
                strip_first = "" if step.get("prepend_scheme", "always") == "never" else "spaces"
            case _:
                return None
    return (_sentencepiece_piece(replacements, byte_fallback), strip_first) if replacements else None


def sentencepiece_table(
    id_to_token: Callable[[int], str | None], special: Mapping[str, int], strip_first: str
) -> TokenBytes:
    """The table of a SentencePiece vocabulary; a special token's bytes are its own string."""
    contents = {token_id: token for token, token_id in special.items()}
    piece = _sentencepiece_piece([("▁", " ")], True)
    return TokenBytes(piece, id_to_token, contents, frozenset(contents), strip_first)


def build_token_bytes(
    decoder: Mapping[str, Any] | None,
    id_to_token: Callable[[int], str | None],
    added: Mapping[int, str],
    special: frozenset[int],
) -> TokenBytes | None:
    """The table for a tokenizer.json's `decoder` object, or None where tokens are not plain runs of bytes."""
    if decoder is None:
        return None
    steps = [step for step in _flatten(decoder) if step.get("type") != "Fuse"]
    if len(steps) == 1 and steps[0].get("type") == "ByteLevel":
        return TokenBytes(_byte_level_piece(_ALPHABET), id_to_token, added, special, "")
    family = _sentencepiece_family(steps)
    if family is None:
        return None
    piece, strip_first = family
    return TokenBytes(piece, id_to_token, added, special, strip_first)
