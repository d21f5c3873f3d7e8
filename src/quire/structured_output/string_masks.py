"""Masks inside of JSON strings, without a look at the grammar.

Inside of a string value that a schema bounds by nothing but `maxLength`, a token may come next if it may come in such a
string at all, and if it does not make the string too long. The first is the same from the string's first character to its
last; so one mask that the grammar engine made serves the whole string, less the tokens that have become too long. Walking a
vocabulary for a bounded string takes the engine two milliseconds; this takes one copy.

Legend: V vocabulary, W words of 32 tokens.
"""

import functools
import hashlib
import re
import weakref

import numpy as np
import numpy.typing as npt

from quire.structured_output.backend import IntArray
from quire.structured_output.vocabulary import Vocabulary

UNBOUNDED = 1 << 30
LEAVES = 255
_MOST_KEPT = 512
"""Masks; 10 MB for a vocabulary of 150,000."""
_MOST_BASES = 32
_PLAIN_ASCII = re.compile(rb'[^"\\\x00-\x1f\x7f-\xff]+')
_PLAIN = re.compile(rb'[^"\\\x00-\x1f\x7f]+')
_SPACES = re.compile(rb"[ \t\n\r]+")
_BETWEEN = b" \t\n\r,:[]{}"
_EXIT = re.compile(rb'[^"\\\x00-\x1f\x7f]*("[ \t\n\r,:\[\]{}]*"?)')
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')


class StringMasks:
    """What strings mean for each token of a vocabulary.

    Attributes:
        is_usable: whether the vocabulary has the tokens by which a string's inside is recognised.
        probe: a token of one plain character.
        longest, longest_token: characters that a token may have in a string, and bytes that it may have at all.
        spaces, exits: tokens that outside of strings, or out of a free string, lead where another one leads.
    """

    def __init__(self, vocabulary: Vocabulary, special_ids: frozenset[int]) -> None:
        tokens = [b"" if index in special_ids else token for index, token in enumerate(vocabulary.tokens)]
        read = [(len(token), True, True) if _PLAIN_ASCII.fullmatch(token) else _read(token) for token in tokens]
        chars, stays, is_plain = (list(column) for column in zip(*read, strict=True))
        self._chars: list[int] = chars
        self._chars_V = np.array(chars, dtype=np.int32)
        self._stays_V = np.array(stays, dtype=np.bool_)
        self.longest = max(chars)
        self.longest_token = max(map(len, tokens))
        # One line a length: tokens of at most so many characters, and the plain ones among them.
        lengths = range(self.longest + 1)
        self._short = [self._pack(self._chars_V <= length) for length in lengths]
        is_plain_V = np.array(is_plain, dtype=np.bool_)
        self._short_plain = [self._pack((self._chars_V <= length) & is_plain_V) for length in lengths]
        self._plain_W = self._short_plain[-1]
        by_bytes = {token: token_id for token_id, token in reversed(list(enumerate(tokens)))}
        needed = (b"a", b'"', b'":')
        self.is_usable = all(token in by_bytes for token in needed)
        self.probe, self._quote, self._key_end = (by_bytes.get(token, 0) for token in needed)
        self.spaces, self.exits = _find_aliases(tokens)
        self._steps = functools.lru_cache(_MOST_BASES)(self._find_steps)
        self._alive: weakref.WeakValueDictionary[bytes, IntArray] = weakref.WeakValueDictionary()
        self._shortened = functools.lru_cache(_MOST_KEPT)(self._shorten)

    @staticmethod
    def _pack(chosen_V: npt.NDArray[np.bool_]) -> IntArray:
        bits = np.zeros(-(-len(chosen_V) // 32) * 32, dtype=np.bool_)
        bits[: len(chosen_V)] = chosen_V
        return np.packbits(bits, bitorder="little").view(np.int32)

    @property
    def num_kept(self) -> int:
        """Different masks that are kept."""
        return len(self._alive)

    def keep(self, mask_W: IntArray) -> IntArray:
        """A copy of a mask, the same array for equal masks. It must not be changed."""
        digest = hashlib.blake2b(mask_W.tobytes(), digest_size=16).digest()
        found = self._alive.get(digest)
        if found is None:
            found = self._alive[digest] = mask_W.copy()
        return found

    def may_be_inside(self, mask_W: IntArray, *, is_key: bool) -> bool:
        """A first look: whether a string (a key) might end or go on here."""
        if not has_token(mask_W, self._quote) or not has_token(mask_W, self.probe):
            return False
        return is_key or not has_token(mask_W, self._key_end)

    def is_inside(self, mask_W: IntArray, left: int) -> bool:
        """Whether a mask that passed the first look is that of the inside of a free string with room for `left` characters. (Of
        some given texts only some characters are left.)"""
        return left > 0 and np.array_equal(mask_W & self._plain_W, self._short_plain[min(left, self.longest)])

    def begin(self, mask_W: IntArray) -> tuple[bytes, bytes]:
        """What of such a mask holds for the whole string; and by token the characters that it adds to it, LEAVES if it may not,
        or does more than that."""
        base = (mask_W | self._plain_W).tobytes()
        return base, self._steps(base)

    def _find_steps(self, base: bytes) -> bytes:
        is_allowed_V = np.unpackbits(np.frombuffer(base, np.uint8), count=len(self._chars), bitorder="little") > 0
        is_step_V = self._stays_V & is_allowed_V & (self._chars_V < LEAVES)
        return np.where(is_step_V, self._chars_V, LEAVES).astype(np.uint8).tobytes()

    def num_chars(self, token_id: int) -> int:
        """Characters of a token up to the string's end."""
        return self._chars[token_id]

    def mask(self, base: bytes, left: int) -> IntArray:
        """The mask with room for `left` characters."""
        return self._shortened(base, min(left, self.longest))

    def _shorten(self, base: bytes, left: int) -> IntArray:
        return np.frombuffer(base, dtype=np.int32) & self._short[left]


def _find_aliases(tokens: list[bytes]) -> tuple[dict[int, int], dict[int, int]]:
    """Of tokens that are the same but for the kind of space in them, and perhaps for the rest of a string before them, the
    first one: outside of strings, and out of one."""
    first: dict[bytes, int] = {}
    spaces: dict[int, int] = {}
    exits: dict[int, int] = {}
    for token_id, token in enumerate(tokens):
        if not token.strip(_BETWEEN):
            spaces[token_id] = first.setdefault(_SPACES.sub(b" ", token), token_id)
        elif b'"' in token and (match := _EXIT.fullmatch(token)):
            exits[token_id] = first.setdefault(_SPACES.sub(b" ", match.group(1)), token_id)
    return spaces, exits


def has_token(mask_W: IntArray, token_id: int) -> bool:
    """Whether a mask leaves a token."""
    return bool(int(mask_W[token_id >> 5]) >> (token_id & 31) & 1)


def split_text(text: bytes) -> tuple[int, bytes]:
    """The whole characters of a string's content, and what there is of the next one."""
    chars = at = 0
    while at < len(text):
        if run := _PLAIN.match(text, at):
            whole = _whole(run.group())
            chars += sum(byte & 0xC0 != 0x80 for byte in whole)
            at += len(whole)
            if at < run.end():
                break
        elif escape := _ESCAPE.match(text, at):
            chars += 1
            at = escape.end()
        else:
            break
    return chars, text[at:]


def _read(token: bytes) -> tuple[int, bool, bool]:
    """Of a token inside of a string: its characters up to the string's end (one that is only begun counts), whether it ends
    within the string, between characters, and whether it is nothing but plain characters."""
    chars, at = 0, 0
    while at < len(token):
        if run := _PLAIN.match(token, at):
            text = run.group()
            chars += sum(byte & 0xC0 != 0x80 for byte in text)
            if len(_whole(text)) < len(text):
                return chars, False, False
            at = run.end()
        elif escape := _ESCAPE.match(token, at):
            chars += 1
            at = escape.end()
        else:  # the string's end, an escape that is only begun, or what no string has
            return chars + (token[at] == 0x5C), False, False
    return chars, True, _PLAIN.fullmatch(token) is not None


def _whole(text: bytes) -> bytes:
    """Text up to a character that is only begun."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text
