"""Masks inside of JSON strings, without a look at the grammar.

Inside of a string value that a schema bounds by nothing but `maxLength`, a token may come next if it may come in such a
string at all, and if it does not make the string too long. The first is the same from the string's first character to its
last; so one mask that the grammar engine made serves the whole string, less the tokens that have become too long. Walking a
vocabulary for a bounded string takes the engine two milliseconds; this takes one copy.

Legend: V vocabulary, W words of 32 tokens.
"""

import collections
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.guards import is_dict, is_sequence
from quire.structured_output.backend import IntArray
from quire.structured_output.vocabulary import Vocabulary

UNBOUNDED = 1 << 30
_MOST_KEPT = 512
"""Masks; 10 MB for a vocabulary of 150,000."""
_PLAIN = re.compile(rb'[^"\\\x00-\x1f\x7f]+')
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')


class StringMasks:
    """What strings mean for each token of a vocabulary.

    Attributes:
        is_usable: whether the vocabulary has the tokens by which a string's inside is recognised, and one for each byte.
        rest: the vocabulary less its tokens of several plain characters, which need no engine: the same ids, empty ones.
        byte_ids: the token of each byte.
        probe, quote, key_end: tokens of a plain character, of a string's end, and of a key's end.
    """

    def __init__(self, vocabulary: Vocabulary, special_ids: frozenset[int]) -> None:
        tokens = vocabulary.tokens
        chars_V = np.zeros(len(tokens), dtype=np.int32)
        stays_V = np.zeros(len(tokens), dtype=np.bool_)
        is_plain_V = np.zeros(len(tokens), dtype=np.bool_)
        for token_id, token in enumerate(tokens):
            if token and token_id not in special_ids:
                chars_V[token_id], stays_V[token_id], is_plain_V[token_id] = _read(token)
        self._chars, self._stays = chars_V.tolist(), stays_V.tolist()
        self._longest = int(chars_V.max(initial=0))
        self._words = -(-len(tokens) // 32)
        # One line a length: tokens of at most so many characters, and the plain ones among them.
        lengths = range(self._longest + 1)
        self._short = [self._pack(chars_V <= length) for length in lengths]
        self._short_plain = [self._pack((chars_V <= length) & is_plain_V) for length in lengths]
        self._plain_W = self._short_plain[-1]
        self._one_W = self._short_plain[min(1, self._longest)]
        by_bytes = {
            token: token_id for token_id, token in reversed(list(enumerate(tokens))) if token_id not in special_ids
        }
        needed = [b'"', b'":', b"a", *(bytes([byte]) for byte in range(256))]
        self.is_usable = all(token in by_bytes for token in needed)
        self.quote, self.key_end, self.probe, *self.byte_ids = (by_bytes.get(token, 0) for token in needed)
        kept = [
            token if len(token) == 1 or not is_plain or chars == 1 else b""
            for token, is_plain, chars in zip(tokens, is_plain_V.tolist(), self._chars, strict=True)
        ]
        self.rest = Vocabulary(kept, vocabulary.special_ids, vocabulary.encode)
        self._bases: dict[bytes, bytes] = {}
        self._kept: collections.OrderedDict[tuple[bytes, int], IntArray] = collections.OrderedDict()

    def _pack(self, chosen_V: npt.NDArray[np.bool_]) -> IntArray:
        bits = np.zeros(self._words * 32, dtype=np.bool_)
        bits[: len(chosen_V)] = chosen_V
        return np.packbits(bits, bitorder="little").view(np.int32)

    def may_be_inside(self, mask_W: IntArray) -> bool:
        """A first look: whether a string value might end or go on here."""
        return _bit(mask_W, self.quote) and _bit(mask_W, self.probe) and not _bit(mask_W, self.key_end)

    def is_inside(self, mask_W: IntArray, left: int) -> bool:
        """Whether a mask that passed the first look is that of the inside of a string value with room for `left` characters. (A
        key's end may be followed by a colon; of some given texts only some characters are left.)"""
        return left > 0 and np.array_equal(mask_W & self._plain_W, self._short_plain[min(left, self._longest)])

    def is_inside_rest(self, mask_W: IntArray) -> bool:
        """As `is_inside`, of a mask for `rest` and room for at least one character."""
        return np.array_equal(mask_W & self._one_W, self._one_W)

    def begin(self, mask_W: IntArray) -> bytes:
        """What of such a mask holds for the whole string."""
        base = (mask_W | self._plain_W).tobytes()
        if len(self._bases) > _MOST_KEPT:
            self._bases.clear()
        return self._bases.setdefault(base, base)

    def left_after(self, token_id: int, left: int) -> int | None:
        """Characters left after a token, None if the string's inside was left with it."""
        return left - self._chars[token_id] if self._stays[token_id] else None

    def can_tell(self, left: int) -> bool:
        """Whether room for at least `left` characters is all that there is to know."""
        return left >= self._longest

    def key(self, base: bytes, left: int) -> tuple[bytes, int]:
        """What stands for `mask(base, left)`."""
        return base, min(left, self._longest)

    def mask(self, base: bytes, left: int) -> IntArray:
        """The mask with room for `left` characters."""
        key = self.key(base, left)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = np.frombuffer(base, dtype=np.int32) & self._short[key[1]]
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return found


def _bit(mask_W: IntArray, token_id: int) -> bool:
    return bool(int(mask_W[token_id >> 5]) >> (token_id & 31) & 1)


def _read(token: bytes) -> tuple[int, bool, bool]:
    """Of a token inside of a string: its characters up to the string's end (one that is only begun counts), whether it ends
    within the string, between characters, and whether it is nothing but plain characters."""
    chars, at = 0, 0
    while at < len(token):
        if run := _PLAIN.match(token, at):
            text = run.group()
            chars += sum(byte & 0xC0 != 0x80 for byte in text)
            if not _is_whole(text):
                return chars, False, False
            at = run.end()
        elif escape := _ESCAPE.match(token, at):
            chars += 1
            at = escape.end()
        else:  # the string's end, an escape that is only begun, or what no string has
            return chars + (token[at] == 0x5C), False, False
    return chars, True, _PLAIN.fullmatch(token) is not None


def _is_whole(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


# fmt: off
_HARMLESS = frozenset((
    "type", "title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly",
    "writeOnly", "enum", "const", "required", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "minProperties", "maxProperties", "minLength", "maxLength", "$ref",
))
# fmt: on
_NARROW_FORMATS = frozenset(("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"))
"""Formats whose texts are never taken for any text: they have no space, no Umlaut."""


def longest_bound(schema: Any) -> int | None:
    """The largest `maxLength` in a schema, 0 without any; None where a string's inside may depend on more than its length, or
    its end on more than its place (`pattern`, alternatives that begin alike)."""
    return _longest_bound(schema, schema)


def _longest_bound(schema: Any, root: Any) -> int | None:
    if isinstance(schema, bool):
        return 0
    if not is_dict(schema):
        return None
    parts: list[Any] = []
    for name, value in schema.items():
        if name in ("properties", "$defs", "definitions") and is_dict(value):
            parts += value.values()
        elif name in ("items", "additionalProperties"):
            parts.append(value)
        elif name == "prefixItems" and is_sequence(value):
            parts += value
        elif name in ("anyOf", "oneOf", "allOf") and is_sequence(value):
            if len(value) > 1 and (name == "allOf" or "type" in schema or not _begin_apart(value, root)):
                return None
            parts += value
        elif name not in _HARMLESS and not (name == "format" and value in _NARROW_FORMATS):
            return None
    most = schema.get("maxLength", 0)
    bounds = [most if isinstance(most, int) else None, *(_longest_bound(part, root) for part in parts)]
    return None if None in bounds else max(bound for bound in bounds if bound is not None)


def _begin_apart(parts: Any, root: Any) -> bool:
    """Whether the first character of an answer says which of the alternatives it follows."""
    kinds: list[Any] = []
    for part in parts:
        place: Any = part.get("$ref") if is_dict(part) else None
        target: Any = part
        if isinstance(place, str):
            target = root
            for step in place.removeprefix("#/").split("/"):
                target = target.get(step) if is_dict(target) else None
        kind: Any = target.get("type") if is_dict(target) else None
        if not isinstance(kind, str):
            return False
        kinds.append("number" if kind == "integer" else kind)
    return len(set(kinds)) == len(kinds)
