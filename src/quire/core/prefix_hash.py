"""The names of prefixes: a keyed hash chain with one link a page.

A page's name is a hash of its parent's name and its own token ids; the first page's parent is named after the request's
cache salt. The key is a secret of the process unless the caller gives one, so that a user cannot write a prompt that
collides with another's. Knows nothing of pages or requests.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence

from quire.errors import ConfigError
from quire.request import TOKEN_BYTES, EngineRequest, token_array

BlockHash = bytes

DIGEST_SIZE = 16
"""Bytes a name. 128 bits under a secret key: no collision within any cache that fits in memory."""

SPAN = 64
"""Pages that are looked up by one hash: their names are kept under it, so that a prompt that was seen before costs a
sixty-fourth of the hashes."""
_MOST_SPANS = 1 << 12
"""Spans whose names are kept: 4 million tokens in pages of 16, about 16 MB."""


def _blake2b(key: bytes) -> Callable[[bytes], bytes]:
    keyed = hashlib.blake2b(digest_size=DIGEST_SIZE, key=key)  # Copying it saves a third of hashing a page.

    def digest(message: bytes) -> bytes:
        state = keyed.copy()
        state.update(message)
        return state.digest()

    return digest


def _sha256(key: bytes) -> Callable[[bytes], bytes]:
    return lambda message: hmac.digest(key, message, "sha256")


_ALGORITHMS: dict[str, Callable[[bytes], Callable[[bytes], bytes]]] = {"blake2b": _blake2b, "sha256": _sha256}


class PrefixHasher:
    """Names pages.

    Args:
        key: the secret; at most 64 bytes.
        block_size: tokens a page.
        algorithm: `blake2b` or `sha256`.

    Raises:
        ConfigError: an unknown algorithm, or a key that is too long.
    """

    def __init__(self, key: bytes, block_size: int, algorithm: str = "blake2b") -> None:
        if algorithm not in _ALGORITHMS:
            raise ConfigError(
                f"prefix_caching_hash_algo is {algorithm!r}; allowed are {', '.join(sorted(_ALGORITHMS))}",
                setting="prefix_caching_hash_algo",
            )
        if len(key) > hashlib.blake2b.MAX_KEY_SIZE:
            raise ConfigError(f"the prefix hash key has {len(key)} bytes; at most {hashlib.blake2b.MAX_KEY_SIZE} work")
        self.block_size = block_size
        self._names_of_span: dict[BlockHash, list[BlockHash]] = {}
        self._hash = _ALGORITHMS[algorithm](key)
        self._plain_root = self.root("")

    def root(self, salt: str) -> BlockHash:
        """The parent of a request's first page: equal only for equal salts."""
        return self._hash(b"root" + salt.encode("utf-8", "surrogatepass"))

    def root_of(self, source: EngineRequest) -> BlockHash:
        """The parent of a request's first page, as its `cache_salt` and its adapter say."""
        root = self._plain_root if source.cache_salt is None else self.root("salt:" + source.cache_salt)
        return (
            root if source.adapter is None else self._hash(root + source.adapter.key.encode("utf-8", "surrogatepass"))
        )

    def extend(
        self,
        hashes: list[BlockHash],
        root: BlockHash,
        token_ids: Sequence[int],
        num_pages: int | None = None,
        marks: Mapping[int, bytes] | None = None,
    ) -> None:
        """Append to `hashes` the names that it does not have yet: of `num_pages` pages in all, or of every full page of
        `token_ids`. `marks` has, by page, what is in it besides its tokens."""
        size, first = self.block_size, len(hashes)
        last = len(token_ids) // size if num_pages is None else min(num_pages, len(token_ids) // size)
        if first >= last:
            return
        stride = size * TOKEN_BYTES
        data = token_array(token_ids[first * size : last * size]).tobytes()
        page = first
        while page < last:
            end = min(page - page % SPAN + SPAN, last)
            if marks and not marks.keys().isdisjoint(range(page, end)):  # page by page
                text = data[(page - first) * stride : (page + 1 - first) * stride]
                hashes.append(self._hash((hashes[-1] if hashes else root) + text + marks.get(page, b"")))
                page += 1
                continue
            text = data[(page - first) * stride : (end - first) * stride]
            hashes += self._span(hashes[-1] if hashes else root, text, end - page)
            page = end

    def _span(self, parent: BlockHash, data: bytes, num_pages: int) -> list[BlockHash]:
        """The names of up to `SPAN` pages after `parent`; those of a whole span are kept."""
        known, key = self._names_of_span, b""
        if num_pages == SPAN:
            key = self._hash(b"span" + parent + data)
            if key in known:
                return known[key]
        names: list[BlockHash] = []
        stride = self.block_size * TOKEN_BYTES
        for start in range(0, len(data), stride):
            parent = self._hash(parent + data[start : start + stride])
            names.append(parent)
        if key:
            if len(known) >= _MOST_SPANS:
                del known[next(iter(known))]
            known[key] = names
        return names
