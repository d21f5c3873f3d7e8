"""The keys of a server's clients: their names, which are the tenants of the `fair` policy, and their weights.

Keys are kept as SHA-256 hashes, and all of them are compared in constant time.
"""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

import msgspec

from quire.errors import ConfigError, refusing

MAX_WEIGHT = 1000.0


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A key as the operator writes it.

    Attributes:
        name: whom it belongs to; of a key without one, the beginning of its hash.
        weight: its share beside others', under the `fair` policy.
    """

    name: str
    key: str
    weight: float = 1.0

    @classmethod
    def of(cls, key: "str | KeyEntry") -> "KeyEntry":
        """A key that may have no name."""
        return key if isinstance(key, KeyEntry) else cls(f"key-{_hash(key.encode())[:8]}", key)


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def read_key_file(path: str) -> list[KeyEntry]:
    """The keys of a file: a JSON list of objects with `name`, `key` and `weight`, or a line for each key (`NAME KEY [WEIGHT]`).
    Raises ConfigError: it cannot be read, or two keys are equal."""
    with refusing(OSError, UnicodeDecodeError, setting="api_key_file", what=f"api_key_file: {path!r} cannot be read"):
        text = Path(path).read_text("utf-8")
    entries = _from_json(text) if text.lstrip().startswith("[") else _from_lines(text)
    if not entries:
        raise ConfigError.of("api_key_file", f"{path!r} has no key.")
    for number, entry in enumerate(entries, 1):
        if not entry.name.strip() or not entry.key.strip():
            raise ConfigError.of("api_key_file", f"key {number} has no name, or is empty.")
        if not 0.0 < entry.weight <= MAX_WEIGHT:
            message = (
                f"the weight of {entry.name!r} is {entry.weight:g}; it must be above 0 and at most {MAX_WEIGHT:g}."
            )
            raise ConfigError.of("api_key_file", message)
    if len({entry.key for entry in entries}) < len(entries):
        raise ConfigError.of("api_key_file", "two keys are equal.")
    return entries


def _from_json(text: str) -> list[KeyEntry]:
    with refusing(
        msgspec.MsgspecError, setting="api_key_file", what="api_key_file: it must be a list of name, key and weight"
    ):
        return msgspec.json.decode(text, type=list[KeyEntry])


def _from_lines(text: str) -> list[KeyEntry]:
    entries: list[KeyEntry] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            name, key, weight = words if len(words) == 3 else (*words, "1")
            entries.append(KeyEntry(name, key, float(weight)))
        except ValueError:  # another number of words, or no number
            raise ConfigError.of("api_key_file", f"line {number} is not: NAME KEY [WEIGHT]") from None
    return entries


class KeyRing:
    """The keys that open a server."""

    def __init__(self, keys: Iterable[str | KeyEntry]) -> None:
        self._keys = [msgspec.structs.replace(each, key=_hash(each.key.encode())) for each in map(KeyEntry.of, keys)]

    def find(self, key: bytes | None) -> KeyEntry | None:
        """Which key was offered, with its hash in its place; None if it is none of them."""
        if key is None:
            return None
        offered = _hash(key)
        matches = [known for known in self._keys if hmac.compare_digest(offered, known.key)]  # all are compared
        return matches[0] if matches else None
