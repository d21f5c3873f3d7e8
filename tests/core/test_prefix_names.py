"""Names that a prompt takes over from the one before it are the names that hashing it would have given."""

import random

import pytest

from quire.config.kv_spec import KVCacheConfig, KVCacheSpec, KVKind, group_layers
from quire.core.kv_cache_manager import KVCacheManager, count_equal_pages
from quire.core.prefix_hash import PrefixHasher
from quire.core.request_state import Request
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams

SIZE = 4
KEY = b"k" * 16


def make_manager() -> KVCacheManager:
    spec = KVCacheSpec(kind=KVKind.FULL, block_size=SIZE, bytes_per_token=1)
    return KVCacheManager(KVCacheConfig(10_000, group_layers([spec])), PrefixHasher(KEY, SIZE))


def make_request(tokens: list[int], salt: str | None = None, **extras) -> Request:
    source = EngineRequest("r", tokens, SamplingParams(max_tokens=64), cache_salt=salt, extras=extras)
    return Request(source, 0, 4096)


def fresh_names(request: Request) -> list[bytes]:
    """By the hasher alone, in one go."""
    hasher, names = PrefixHasher(KEY, SIZE), []
    salt = request.source.cache_salt
    root = hasher.root("" if salt is None else "salt:" + salt, str(request.source.extras.get("lora", "")))
    media = request.source.extras.get("media", ())
    hasher.extend(
        names,
        root,
        request.token_ids,
        lambda start, end: [name for at, size, name in media if at < end and at + size > start],
    )
    return names


@pytest.mark.parametrize("seed", range(8))
def test_every_name_is_the_hasher_s_own(seed):
    draw = random.Random(seed)
    manager = make_manager()
    beginnings = [[draw.randrange(1 << 20) for _ in range(60)] for _ in range(3)]
    for _ in range(60):
        tokens = draw.choice(beginnings)[: draw.randrange(61)] + [
            draw.randrange(3) for _ in range(draw.randrange(1, 30))
        ]
        extras = {"media": [(draw.randrange(20), 5, "picture")]} if draw.random() < 0.2 else {}
        if draw.random() < 0.2:
            extras["lora"] = "adapter"
        request = make_request(tokens, draw.choice([None, None, "one", "two"]), **extras)
        manager.find_prefix(request)
        manager.attach(request, manager.find_prefix(request))
        assert manager.grow(request, len(tokens)) is not None
        manager.publish(request, draw.randrange(len(tokens) + 1))
        request.token_ids += [draw.randrange(3) for _ in range(draw.randrange(20))]
        assert manager.grow(request, len(request.token_ids)) is not None
        manager.publish(request, len(request.token_ids))
        assert request.hashes == fresh_names(request)


def test_a_prompt_is_found_by_one_that_begins_alike_and_not_under_another_salt():
    manager = make_manager()
    tokens = list(range(100, 140))
    first = make_request(tokens, "one")
    manager.attach(first, manager.find_prefix(first))
    manager.grow(first, len(tokens))
    manager.publish(first, len(tokens))
    assert manager.find_prefix(make_request([*tokens[:30], 1, 2, 3], "one")).num_tokens == 28
    assert manager.find_prefix(make_request(tokens, "two")).num_tokens == 0


@pytest.mark.parametrize("first_difference", [0, 3, 4, 17, 39, 40])
def test_pages_are_counted_up_to_the_first_difference(first_difference):
    one = list(range(40))
    other = [*one[:first_difference], -1, *one[first_difference + 1 :]]
    assert count_equal_pages(one, other, SIZE, 0, 10) == min(first_difference // SIZE, 10)
