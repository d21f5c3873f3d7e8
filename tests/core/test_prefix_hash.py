import pytest

from quire.core.prefix_hash import PrefixHasher
from quire.errors import ConfigError

TOKENS = list(range(10))


def names(hasher: PrefixHasher, tokens: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    hasher.extend(hashes, hasher.root(salt), tokens)
    return hashes


@pytest.mark.parametrize("algorithm", ["blake2b", "sha256"])
def test_one_name_for_each_full_page(algorithm: str) -> None:
    assert len(names(PrefixHasher(b"k", 4, algorithm), TOKENS)) == 2


@pytest.mark.parametrize("algorithm", ["blake2b", "sha256"])
def test_naming_in_parts_equals_naming_at_once(algorithm: str) -> None:
    hasher = PrefixHasher(b"k", 4, algorithm)
    parts: list[bytes] = []
    for end in range(11):
        hasher.extend(parts, hasher.root(""), TOKENS[:end])
    assert parts == names(hasher, TOKENS)


def test_a_name_depends_on_the_whole_prefix_the_key_and_the_salt() -> None:
    hasher = PrefixHasher(b"k", 4)
    same = names(hasher, TOKENS)
    assert names(hasher, TOKENS) == same
    others = [
        names(hasher, [99, *TOKENS[1:]]),
        names(PrefixHasher(b"other", 4), TOKENS),
        names(PrefixHasher(b"k", 4, "sha256"), TOKENS),
        names(hasher, TOKENS, "salt"),
        names(hasher, TOKENS, "other salt"),
    ]
    seconds = [hashes[1] for hashes in [same, *others]]
    assert len(set(seconds)) == len(seconds)


def test_token_ids_use_the_whole_range_of_32_bits() -> None:
    hasher = PrefixHasher(b"k", 1)
    assert names(hasher, [1 << 24]) != names(hasher, [0])


def test_an_unknown_algorithm_names_the_setting_and_the_choices() -> None:
    with pytest.raises(ConfigError, match="prefix_caching_hash_algo is 'md5'; allowed are blake2b, sha256"):
        PrefixHasher(b"k", 4, "md5")
