"""A device whose free memory shrinks while an engine starts: the cache gets smaller, or the refusal has the numbers."""

import dataclasses

import pytest
from tests.engine.builders import make_config
from tests.oracles.hash_model import HashExecutor

from quire.engine.core import EngineCore
from quire.errors import ConfigError


class CrowdedExecutor(HashExecutor):
    """Measures one mebibyte, and then has only room for `room` bytes of pages."""

    def __init__(self, config, room):
        super().__init__(config, kv_bytes=1 << 20)
        self.room = room
        self.tried = []

    def initialize(self, kv_cache):
        size = kv_cache.num_blocks * kv_cache.block_size * 16
        self.tried.append(size)
        if size > self.room:
            raise MemoryError("out of memory on the device")
        super().initialize(kv_cache)


def config(**cache):
    given = make_config()
    return dataclasses.replace(given, cache=dataclasses.replace(given.cache, num_gpu_blocks_override=None, **cache))


def test_a_cache_that_does_not_fit_any_more_gets_smaller():
    settings = config()
    executor = CrowdedExecutor(settings, room=int(0.85 * (1 << 20)))
    core = EngineCore(settings, executor)
    assert len(executor.tried) == 3
    assert core.kv_cache.num_blocks * core.kv_cache.block_size * 16 == executor.tried[-1] <= executor.room


def test_a_device_that_is_taken_over_is_refused_with_a_way_out():
    settings = config()
    with pytest.raises(ConfigError, match=r"out of memory on the device.*name a size with kv_cache_memory_bytes"):
        EngineCore(settings, CrowdedExecutor(settings, room=0))


def test_a_size_that_the_user_named_is_not_lowered():
    settings = config(kv_cache_memory_bytes=1 << 20)
    executor = CrowdedExecutor(settings, room=1 << 19)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=1048576 does not fit beside the weights"):
        EngineCore(settings, executor)
    assert len(executor.tried) == 1
