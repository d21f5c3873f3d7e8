"""Pooling models over two processes, which sum through gloo or are stages: the numbers of one."""

import numpy as np
import pytest

from quire import LLM

from .conftest import SETTINGS, as_dicts


def numbers(path, prompts, **settings):
    with LLM(str(path), kv_cache_memory_bytes=4 << 20, **(SETTINGS | settings)) as llm:
        return [output.outputs.data for output in llm.encode(as_dicts(prompts), use_tqdm=False)]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Qwen3ForCausalLM", {"runner": "pooling", "pooler_config": {"seq_pooling_type": "MEAN"}}),
        ("BertForTokenClassification", {"max_num_batched_tokens": 160}),
    ],
)
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "worker_cls": "tests.executor.rank_workers.AsyncWorker"},
    ],
    ids=["ranks", "stages", "stages of a device"],
)
def test_two_processes_give_what_one_gives(architecture, settings, layout, tiny, prompts):
    path = tiny(architecture)
    alone, together = (numbers(path, prompts, **settings, **each) for each in ({}, layout))
    for one, two in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)
