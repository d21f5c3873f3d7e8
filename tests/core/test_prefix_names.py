"""Names that are kept for spans of pages are the names that hashing each page would have given."""

import random

import pytest
from tests.oracles.hash_model import HashExecutor
from tests.oracles.scheduler_harness import SchedulerHarness

from quire.config import CacheConfig, SchedulerConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec, KVKind, group_layers
from quire.core import prefix_hash
from quire.core.common_prefix import count_equal_pages
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.prefix_hash import SPAN, PrefixHasher
from quire.core.request_state import Request
from quire.core.scheduler import Scheduler
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams

SIZE = 4
KEY = b"k" * 16


def make_kv_config() -> KVCacheConfig:
    spec = KVCacheSpec(kind=KVKind.FULL, block_size=SIZE, bytes_per_token=1)
    return KVCacheConfig(10_000, group_layers([spec]))


def make_manager() -> KVCacheManager:
    return KVCacheManager(make_kv_config(), PrefixHasher(KEY, SIZE))


def make_request(tokens: list[int], salt: str | None = None) -> Request:
    source = EngineRequest("r", tokens, SamplingParams(max_tokens=64), cache_salt=salt)
    return Request(source, 0, 4096)


def fresh_names(request: Request) -> list[bytes]:
    """Page by page, with a hasher that has seen nothing."""
    names: list[bytes] = []
    salt = request.source.cache_salt
    root = PrefixHasher(KEY, SIZE).root("" if salt is None else "salt:" + salt)
    for end in range(SIZE, len(request.token_ids) + 1, SIZE):
        PrefixHasher(KEY, SIZE).extend(names, root, request.token_ids[:end])
    return names


@pytest.mark.parametrize("seed", range(8))
def test_every_name_is_the_hasher_s_own(seed, monkeypatch):
    monkeypatch.setattr(prefix_hash, "SPAN", 16)  # several of them in a short prompt
    draw = random.Random(seed)
    manager = make_manager()
    beginnings = [[draw.randrange(1 << 20) for _ in range(200)] for _ in range(3)]
    for _ in range(60):
        tokens = draw.choice(beginnings)[: draw.randrange(201)] + [
            draw.randrange(3) for _ in range(draw.randrange(1, 30))
        ]
        request = make_request(tokens, draw.choice([None, None, "one", "two"]))
        manager.find_prefix(request)
        manager.attach(request, manager.find_prefix(request))
        assert manager.grow(request, len(tokens)) is not None
        manager.publish(request, draw.randrange(len(tokens) + 1))
        request.token_ids.extend([draw.randrange(3) for _ in range(draw.randrange(20))])
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


def test_a_request_s_tokens_grow_in_a_list_of_their_own():
    kv_config = make_kv_config()
    scheduler = Scheduler(SchedulerConfig(max_model_len=256), CacheConfig(block_size=SIZE), kv_config)
    executor = HashExecutor(block_size=SIZE)
    executor.initialize(kv_config)
    prompt = list(range(10))
    scheduler.add_request(EngineRequest("r", prompt, SamplingParams(max_tokens=20)))
    handed_over = None
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        handed_over = step.new_requests[0].token_ids if step.new_requests else handed_over
        executor.execute(step)
        scheduler.update(step, executor.collect())
    assert handed_over is not None and prompt == handed_over.tolist() == list(range(10))


PAGES = 4_000


def running_beside(prompt: list[int]) -> SchedulerHarness:
    """Four requests that run, two steps in flight, and room for the whole prompt in one step."""
    length = len(prompt) + 100
    harness = SchedulerHarness(
        num_blocks=2 * PAGES, block_size=SIZE, max_model_len=length, max_num_batched_tokens=length, depth=2
    )
    harness.add("before", prompt, max_tokens=1)
    harness.run()
    for number in range(4):
        harness.add(f"other {number}", [number + 7] * 5, max_tokens=60)
    for _ in range(3):
        harness.step()
    return harness


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_long_prompt_is_in_the_next_step_of_the_others_which_starts_before_its_pages_are_hashed(is_cached):
    draw = random.Random(0)
    prompt = [draw.randrange(1000) for _ in range(PAGES * SIZE)]
    harness = running_beside(prompt)
    hasher, hashed, at_start = harness.scheduler.kv._hasher, list[bytes](), list[int]()
    assert hasher is not None
    hash_one, execute = hasher._hash, harness.executor.execute
    hasher._hash = lambda data: hashed.append(data) or hash_one(data)
    harness.executor.execute = lambda step: at_start.append(len(hashed)) or execute(step)
    harness.add("long", [*prompt[:-SIZE], 1, 2, 3, 4] if is_cached else prompt[::-1], max_tokens=4)
    harness.plan()
    (step,) = harness.steps[-1:]
    assert len(step.rows) == 5 and step.needs_sample.all(), "its first token comes with the others' next one"
    assert step.total_num_tokens == 4 + (SIZE if is_cached else PAGES * SIZE)
    few = PAGES // SPAN + 2 * SPAN if is_cached else 1  # one hash for a span of pages that were hashed before
    assert at_start == [at_start[0]] and at_start[0] <= few
    harness.collect()
    harness.collect()
    harness.run()
    assert len(hashed) >= (PAGES // SPAN if is_cached else PAGES)
