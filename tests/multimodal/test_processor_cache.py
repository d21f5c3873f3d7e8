"""What frontends keep of processed media: each item is processed once, by whichever of them meets it first."""

import concurrent.futures
import dataclasses
import os
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from quire.config import EngineConfig, MultiModalConfig
from quire.errors import RequestError
from quire.media import MediaTensor
from quire.multimodal import processor_cache
from quire.multimodal.processor_cache import Processed, ProcessorCache, SharedCache, cache_of, sharing

GIB = 1 << 30


def item(number, others=0):
    arrays = {
        "pixels": np.random.default_rng(number).random((3, 5, 7), dtype=np.float32),
        "grid": np.array([1, number, 3]),
        "none": np.zeros((0, 4), np.float16),
        "flag": np.array(True),
    }
    tensors = {name: MediaTensor.from_array(array) for name, array in arrays.items()}
    behind = tuple(item(number * 10 + other) for other in range(1, others + 1))
    return Processed([1, number], [2] * 6, [3], 6, [1, 2, 3], tensors, "image", 0.5, behind)


def never():
    raise AssertionError("it was processed again")


def shared(folder, **settings):
    return cache_of(MultiModalConfig(shared_cache=str(folder), **settings))


@pytest.mark.parametrize("others", [0, 3])
def test_another_frontend_finds_what_one_has_processed(tmp_path, others):
    first, second = shared(tmp_path), shared(tmp_path)
    made = item(1, others)
    assert first.get_or_make("image_embeds:key", lambda: made) is made
    found = second.get_or_make("image_embeds:key", never)
    assert found == made and found.num_bytes == made.num_bytes
    assert found.tensors["pixels"].to_array().tolist() == made.tensors["pixels"].to_array().tolist()
    assert (first.num_queries, first.num_hits, second.num_queries, second.num_hits) == (1, 0, 1, 1)
    second.clear()
    assert first.get_or_make("image_embeds:key", lambda: item(2)) == item(2)


def test_an_item_that_is_larger_than_may_be_shared_is_processed_by_each(tmp_path):
    caches = [shared(tmp_path, mm_shm_cache_max_object_size_mb=0) for _ in range(2)]
    assert [cache.get_or_make("a", lambda: item(1)) for cache in caches] == [item(1), item(1)]
    assert [cache.num_hits for cache in caches] == [0, 0] and not list(tmp_path.rglob("??/*"))


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, (3).to_bytes(8, "little") + b"\x93\x01", b"\x05"])
def test_what_is_no_item_is_processed_again(tmp_path, content):
    """Written by a process of another version, with a right checksum."""
    cache = shared(tmp_path)
    assert isinstance(cache, SharedCache)
    cache._files.write(b"a", [content])
    assert cache.get_or_make("a", lambda: item(1)) == item(1)


@pytest.mark.parametrize("fault", ["full", "gone", "damaged"])
def test_files_that_fail_cost_a_request_nothing_but_its_processing(tmp_path, monkeypatch, fault):
    cache = shared(tmp_path)
    if fault == "full":
        monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    cache.get_or_make("a", lambda: item(1))
    if fault == "gone":
        shutil.rmtree(tmp_path)
    if fault == "damaged":
        (file,) = tmp_path.rglob("??/*")
        file.write_bytes(b"x" + file.read_bytes()[1:])
    assert cache.get_or_make("a", lambda: item(1)) == item(1)
    cache.clear()
    assert cache.num_hits == 0


def test_an_item_that_is_being_processed_is_waited_for(tmp_path):
    for cache in (ProcessorCache(0), ProcessorCache(GIB), shared(tmp_path)):
        begun, may_end = threading.Event(), threading.Event()
        made = item(1)

        def make(begun=begun, may_end=may_end, made=made):
            begun.set()
            may_end.wait()
            return made

        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            first = threads.submit(cache.get_or_make, "a", make)
            begun.wait()
            others = [threads.submit(cache.get_or_make, "a", never) for _ in range(3)]
            while cache.num_queries < 4:
                threading.Event().wait(0.001)
            assert cache.get_or_make("b", lambda: item(2)) == item(2)
            may_end.set()
            assert all(each.result() is made for each in (first, *others))
        assert (cache.num_queries, cache.num_hits) == (5, 3)


def test_who_waited_for_what_failed_gets_the_answer_of_its_own(tmp_path):
    cache = shared(tmp_path)
    begun, may_end = threading.Event(), threading.Event()

    def fail():
        begun.set()
        may_end.wait()
        raise RequestError("first is no image")

    def fail_too():
        raise RequestError("second is no image")

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first = threads.submit(cache.get_or_make, "a", fail)
        begun.wait()
        second = threads.submit(cache.get_or_make, "a", fail_too)
        while cache.num_queries < 2:
            threading.Event().wait(0.001)
        may_end.set()
        with pytest.raises(RequestError, match="first"):
            first.result()
        with pytest.raises(RequestError, match="second"):
            second.result()
    assert cache.get_or_make("a", lambda: item(1)) == item(1)


def config_with(media):
    """Only what `sharing` reads."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        multimodal: MultiModalConfig | None

    config: EngineConfig = Config(media)  # type: ignore[assignment]
    return config


def test_frontends_have_one_bound_and_its_folder_ends_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(processor_cache, "roomiest", lambda most: (tmp_path, most // 2))
    with sharing(config_with(MultiModalConfig(mm_processor_cache_gb=3)), 4) as config:
        media = config.multimodal
        assert media is not None and media.mm_processor_cache_gb == 1.5 and media.shared_cache is not None
        assert Path(media.shared_cache).parent == tmp_path and isinstance(cache_of(media), SharedCache)
        cache = cache_of(media)
        cache.get_or_make("a", lambda: item(1))
        assert os.listdir(media.shared_cache)
    assert list(tmp_path.iterdir()) == []


def test_where_no_folder_can_be_made_each_frontend_has_its_part_of_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(processor_cache, "roomiest", lambda most: (tmp_path / "gone", most))
    with sharing(config_with(MultiModalConfig(mm_processor_cache_gb=3)), 4) as config:
        media = config.multimodal
        assert media is not None and media.mm_processor_cache_gb == 0.75
        assert type(cache_of(media)) is ProcessorCache


@pytest.mark.parametrize("media", [None, MultiModalConfig(mm_processor_cache_gb=0)])
def test_nothing_is_shared_where_nothing_is_kept(media, monkeypatch):
    monkeypatch.setattr(tempfile, "mkdtemp", never)
    with sharing(config_with(media), 4) as config:
        assert config.multimodal is media
