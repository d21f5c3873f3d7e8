"""A device that runs out of memory while the pages are allocated: the worker gives them back and says so."""

import pytest
import torch
from tests.oracles.tiny_models import make_tiny_model

from quire.core.kv_planner import plan_kv_cache
from quire.engine.arg_utils import EngineArgs
from quire.platforms.cpu import CpuPlatform
from quire.timeline import STARTUP
from quire.worker.model_runner import ModelRunner
from quire.worker.worker import Worker


def test_pages_that_do_not_fit_are_a_memory_error_and_smaller_ones_may_follow(tmp_path, monkeypatch):
    path = make_tiny_model("LlamaForCausalLM", tmp_path)
    config = EngineArgs(model=str(path), max_model_len=64, max_num_seqs=4).create_engine_config()
    worker = Worker(config, CpuPlatform())
    worker.load_model()
    plans = [
        plan_kv_cache(worker.kv_cache_specs(), size, config.cache, config.scheduler, max_model_len=64)
        for size in (1 << 22, 1 << 21)
    ]
    allocate = ModelRunner.allocate

    def crowded(self, kv_cache):
        if kv_cache.num_blocks > plans[1].num_blocks:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 MiB\nmore about it")
        allocate(self, kv_cache)

    monkeypatch.setattr(ModelRunner, "allocate", crowded)
    with pytest.raises(MemoryError, match=r"^CUDA out of memory\. Tried to allocate 4 MiB$"):
        worker.initialize(plans[0])
    assert not worker.runner.has_pages
    worker.initialize(plans[1])
    assert worker.runner.has_pages
    freed = []
    monkeypatch.setattr(ModelRunner, "free_pages", lambda self: freed.append(self))
    worker.initialize(plans[1])
    assert freed == [worker.runner], "the pages of a first try are given back before the second"


def test_a_start_tells_its_phases(tmp_path):
    from quire import LLM

    path = make_tiny_model("LlamaForCausalLM", tmp_path)
    llm = LLM(model=str(path), max_model_len=64, max_num_seqs=4, skip_tokenizer_init=True)
    report = llm.llm_engine.explain()["startup"]
    names = {phase["name"] for phase in report["phases"]}
    assert {"configuration", "imports", "device", "model", "weights", "pages and first steps"} <= names | {
        "configuration"
    }
    assert all(phase["begin_s"] <= phase["end_s"] <= report["ready_s"] + 0.01 for phase in report["phases"])
    assert report["line"] == STARTUP.line()
    llm.llm_engine.shutdown()
