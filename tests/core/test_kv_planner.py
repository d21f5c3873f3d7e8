import dataclasses
import re

import msgspec
import pytest

from quire.config import CacheConfig, SchedulerConfig
from quire.config.kv_spec import (
    STATE_BLOCK_SIZE,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    KVKind,
    describe_memory,
    group_layers,
    suitable_block_size,
)
from quire.core.kv_groups import group_rules
from quire.core.kv_planner import blocks_for_one_request, largest_model_len, plan_kv_cache
from quire.errors import ConfigError

FULL = KVCacheSpec(kind=KVKind.FULL, block_size=16, bytes_per_token=64)
SLIDING = KVCacheSpec(kind=KVKind.SLIDING_WINDOW, block_size=16, bytes_per_token=64, window=100)
SCHEDULER = SchedulerConfig(max_num_batched_tokens=256, max_model_len=1024)


@pytest.mark.parametrize(
    ("specs", "sizes"),
    [
        ([FULL] * 32, [32]),
        (([SLIDING] * 5 + [FULL]) * 5, [5, 5, 5, 5, 5, 5]),
        (([SLIDING] * 5 + [FULL]) * 4 + [SLIDING] * 2, [4, 4, 4, 4, 3, 3, 4]),
        ([FULL, SLIDING] * 12, [12, 12]),
    ],
)
def test_groups_are_balanced_and_cover_every_layer_once(specs: list[KVCacheSpec], sizes: list[int]) -> None:
    groups = group_layers(specs)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(specs)))
    assert all(specs[layer] == group.spec for group in groups for layer in group.layers)
    assert sorted(len(group.layers) for group in groups) == sorted(sizes)


def test_pages_fill_the_memory_of_one_set_of_tensors() -> None:
    config = plan_kv_cache([SLIDING, FULL] * 4, 1 << 20, CacheConfig(), SCHEDULER)
    assert config.num_tensors == 4 and config.page_bytes == 4 * 16 * 64
    assert config.num_blocks == (1 << 20) // config.page_bytes and config.num_host_blocks == 0


def test_unequal_layers_share_tensors_of_the_larger_size() -> None:
    small = KVCacheSpec(kind=KVKind.MLA, block_size=16, bytes_per_token=32)
    config = plan_kv_cache([FULL, small], 1 << 20, CacheConfig(), SCHEDULER)
    assert [config.tensor_page_bytes(tensor) for tensor in range(config.num_tensors)] == [1024]


def test_layers_that_keep_all_tokens_share_one_table_each_with_pages_of_its_own_size() -> None:
    small = KVCacheSpec(kind=KVKind.FULL, block_size=16, bytes_per_token=32)
    config = plan_kv_cache([FULL, FULL, small], 1 << 20, CacheConfig(), SCHEDULER)
    assert [group.layers for group in config.groups] == [(0, 1, 2)]
    assert [config.groups[0].spec_of(index) for index in range(3)] == [FULL, FULL, small]
    assert [config.tensor_page_bytes(tensor) for tensor in range(config.num_tensors)] == [1024, 1024, 512]
    (part,) = config.of_layers(range(1, 3)).groups
    assert part.layers == (0, 1) and [part.spec_of(index) for index in range(2)] == [FULL, small]


@pytest.mark.parametrize(("ranks", "most"), [(2, 0.55), (3, 0.39)])
def test_layers_whose_tokens_ranks_share_lie_side_by_side_in_pages_of_layers_with_windows(
    ranks: int, most: float
) -> None:
    sizes = [msgspec.structs.replace(spec, block_size=16 * ranks) for spec in (SLIDING, FULL)]
    part = msgspec.structs.replace(sizes[1], ranks=ranks)
    whole, shared = (group_layers(([sizes[0]] * 5 + [each]) * 6) for each in (sizes[1], part))
    (own,) = [group for group in shared if group.spec == part]
    assert own.per_tensor == ranks and [own.start_of(index) for index in range(4)] == [
        index % ranks * part.page_bytes for index in range(4)
    ]
    bytes_of_one = [
        blocks_for_one_request(groups, 100_000, 256) * KVCacheConfig(0, groups).page_bytes for groups in (whole, shared)
    ]
    assert bytes_of_one[1] < most * bytes_of_one[0]
    (kept,) = [group for group in KVCacheConfig(0, shared).of_layers(range(18)).groups if group.spec == part]
    assert (kept.layers, kept.per_tensor, kept.num_tensors) == ((5, 11, 17), ranks, -(-3 // ranks))


def test_explicit_sizes_win_over_what_is_available() -> None:
    assert plan_kv_cache([FULL], 0, CacheConfig(kv_cache_memory_bytes=1 << 20), SCHEDULER).num_blocks == 1024
    assert plan_kv_cache([FULL], 0, CacheConfig(num_gpu_blocks_override=99), SCHEDULER).num_blocks == 99


def test_swap_space_becomes_host_pages() -> None:
    assert plan_kv_cache([FULL], 1 << 20, CacheConfig(swap_space=0.5), SCHEDULER).num_host_blocks == (1 << 29) // 1024


def test_too_little_memory_tells_what_would_fit() -> None:
    with pytest.raises(ConfigError) as refusal:
        plan_kv_cache([FULL], 32 * 1024, CacheConfig(), SCHEDULER)
    message = str(refusal.value)
    assert "max_model_len is 1024" in message and "needs 65 KV-cache pages" in message and "room for 32" in message
    assert "lower max_model_len to 497 or less" in message and f"kv_cache_memory_bytes={65 * 1024}" in message
    plan_kv_cache([FULL], 32 * 1024, CacheConfig(), SCHEDULER, max_model_len=497)
    with pytest.raises(ConfigError):
        plan_kv_cache([FULL], 32 * 1024, CacheConfig(), SCHEDULER, max_model_len=498)


def test_too_small_an_override_names_itself() -> None:
    with pytest.raises(ConfigError, match="raise num_gpu_blocks_override to at least 65"):
        plan_kv_cache([FULL], 0, CacheConfig(num_gpu_blocks_override=3), SCHEDULER)


def test_no_memory_at_all_offers_no_length() -> None:
    with pytest.raises(ConfigError) as refusal:
        plan_kv_cache([FULL], -5, CacheConfig(), SCHEDULER)
    assert "lower max_model_len" not in str(refusal.value)


def test_a_window_bounds_what_a_long_request_needs() -> None:
    groups = group_layers([SLIDING])
    assert blocks_for_one_request(groups, 100_000, 256) < 30
    assert largest_model_len(groups, 30, 256, 1 << 20) == 1 << 20


@pytest.mark.parametrize("specs", [[], [FULL, KVCacheSpec(kind=KVKind.FULL, block_size=8, bytes_per_token=64)]])
def test_layers_that_cannot_share_a_pool_are_refused(specs: list[KVCacheSpec]) -> None:
    with pytest.raises(ConfigError, match="layer"):
        plan_kv_cache(specs, 1 << 20, CacheConfig(), SCHEDULER)


@pytest.mark.parametrize(
    "kind", [KVKind.FULL, KVKind.MLA, KVKind.SLIDING_WINDOW, KVKind.CHUNKED_LOCAL, KVKind.RECURRENT]
)
def test_what_is_visible_is_kept_and_fits_the_peak(kind: KVKind) -> None:
    window = 10 if kind in (KVKind.SLIDING_WINDOW, KVKind.CHUNKED_LOCAL) else 0
    rules = group_rules(KVCacheGroup(KVCacheSpec(kind=kind, block_size=4, bytes_per_token=1, window=window), (0,)))
    for computed in range(60):
        visible = rules.first_visible_block(computed)
        kept = rules.first_kept_block(computed)
        first_seen = {
            KVKind.SLIDING_WINDOW: max(0, computed - 9),
            KVKind.CHUNKED_LOCAL: computed // 10 * 10,
            KVKind.RECURRENT: max(0, computed - 1),
        }.get(kind, 0)
        assert kept <= visible == first_seen // 4
        for step in range(1, 20):
            pages = -(-(computed + step) // 4) - kept
            assert pages <= rules.peak_blocks(computed + step, 19)


@pytest.mark.parametrize(
    ("kind", "window"),
    [(KVKind.FULL, 0), *((KVKind.SLIDING_WINDOW, size) for size in (1, 4, 9)), (KVKind.RECURRENT, 0)],
)
def test_the_longest_hit_is_the_longest_prefix_whose_visible_pages_are_all_cached(kind: KVKind, window: int) -> None:
    rules = group_rules(KVCacheGroup(KVCacheSpec(kind=kind, block_size=4, bytes_per_token=1, window=window), (0,)))
    for cached in range(1 << 7):
        is_cached = [bool(cached >> page & 1) for page in range(7)]
        fits = [length for length in range(8) if all(is_cached[rules.first_visible_block(4 * length) : length])]
        assert rules.longest_hit(is_cached.__getitem__, 7) == max(fits)


STATE = KVCacheSpec(kind=KVKind.RECURRENT, block_size=16, bytes_per_token=1000, dtype="float32")


def test_pages_of_unequal_layers_have_the_largest_ones_bytes_in_whole_lines() -> None:
    config = plan_kv_cache([FULL, STATE, STATE, FULL], 1 << 20, CacheConfig(), SCHEDULER)
    assert [group.layers for group in config.groups] == [(0, 3), (1, 2)]
    assert [config.tensor_page_bytes(tensor) for tensor in range(2)] == [1024, 1024]
    assert config.num_blocks == (1 << 20) // 2048
    alone = plan_kv_cache([STATE], 1 << 20, CacheConfig(), SCHEDULER)
    assert alone.page_bytes == 1024


def test_layers_with_larger_pages_decide_how_groups_are_cut() -> None:
    large = msgspec.structs.replace(STATE, bytes_per_token=64 * 1024)
    groups = group_layers([FULL] * 12 + [large] * 4)
    assert [len(group.layers) for group in groups] == [12, 4], (
        "no group's small pages are padded where they need not be"
    )


def test_a_refusal_counts_the_pages_of_every_group() -> None:
    with pytest.raises(ConfigError) as refusal:
        plan_kv_cache([FULL, STATE], 40 * 1024, CacheConfig(), SCHEDULER)
    # 1023 tokens: 64 pages of keys; the states of a step, the one before and one ahead.
    assert f"needs {1 + 64 + 18} KV-cache pages of 1024 bytes" in str(refusal.value)
    assert f"kv_cache_memory_bytes={83 * 1024}" in str(refusal.value)
    fits = int(re.findall(r"max_model_len to (\d+)", str(refusal.value))[0])
    plan_kv_cache([FULL, STATE], 40 * 1024, CacheConfig(), SCHEDULER, max_model_len=fits)


@pytest.mark.parametrize(("state", "tokens"), [(1, 16), (64 * 16, 16), (64 * 16 + 1, 32), (64 * 100, 112)])
def test_pages_are_as_long_as_a_state_takes_bytes(state: int, tokens: int) -> None:
    specs = [FULL, msgspec.structs.replace(STATE, bytes_per_token=state)]
    assert suitable_block_size(specs) == tokens
    assert suitable_block_size(specs[1:]) == STATE_BLOCK_SIZE
    assert suitable_block_size(specs[:1]) is None


def test_memory_is_told_by_token_and_by_request() -> None:
    assert describe_memory([FULL] * 3) == {"block_size": 16, "kv_bytes_per_token": 3 * 64}
    hybrid = describe_memory([FULL, STATE, STATE, STATE])
    assert (hybrid["kv_bytes_per_token"], hybrid["kv_bytes_per_request"]) == (64, 3 * 2 * 1024)
    assert (
        hybrid["block_size_reason"]
        == "a state takes 1000 bytes, and 16 tokens of attention (64 bytes each) at least as much"
    )
    windows = describe_memory([SLIDING, FULL])
    assert (windows["kv_bytes_per_token"], windows["kv_bytes_per_request"]) == (64, (7 + 2) * 1024)
    short = describe_memory([FULL, msgspec.structs.replace(STATE, bytes_per_token=1600)])
    assert short["kv_bytes_per_token"] == 1600 // 16 and "padded to 1600 bytes" in str(short["block_size_reason"])


def test_a_step_planned_ahead_holds_pages_too() -> None:
    config = SchedulerConfig(max_num_batched_tokens=7)
    assert config.max_open_tokens == 7
    assert dataclasses.replace(config, async_scheduling=True).max_open_tokens == 14


CROSS = KVCacheSpec(kind=KVKind.CROSS, block_size=16, bytes_per_token=64, window=1500)


def test_cross_attention_has_pages_for_as_many_requests_as_the_others() -> None:
    config = plan_kv_cache([FULL, CROSS] * 2, 1 << 22, CacheConfig(), SCHEDULER)
    assert [group.layers for group in config.groups] == [(0, 2)] and config.cross is not None
    assert config.cross.layers == (1, 3)
    needed = blocks_for_one_request(config.groups, 1024, SCHEDULER.max_open_tokens) - 1
    requests = (config.num_cross_blocks - 1) // 94
    assert config.num_cross_blocks == 1 + 94 * requests and requests == 12
    assert requests <= config.num_blocks // needed
    used = config.num_blocks * config.page_bytes + config.num_cross_blocks * config.cross.page_bytes
    assert (1 << 22) - config.page_bytes < used <= 1 << 22


def test_cross_attention_needs_pages_for_one_request_and_has_none_for_more_than_may_run() -> None:
    few = dataclasses.replace(SCHEDULER, max_num_seqs=2)
    assert plan_kv_cache([FULL, CROSS], 1 << 24, CacheConfig(), few).num_cross_blocks == 1 + 2 * 94
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=") as refusal:
        plan_kv_cache([FULL, CROSS], 100_000, CacheConfig(), SCHEDULER)
    named = re.search(r"kv_cache_memory_bytes=(\d+)", str(refusal.value))
    assert named is not None
    size = int(named[1])
    assert plan_kv_cache([FULL, CROSS], size, CacheConfig(), SCHEDULER).num_cross_blocks == 95
