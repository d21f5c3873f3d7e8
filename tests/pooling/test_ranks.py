"""Pooling models over two processes, which sum through gloo or are stages: the numbers of one."""

import numpy as np
import pytest

from quire import LLM

from .conftest import SETTINGS, as_dicts

MODELS = {
    "decoder": ("Qwen3ForCausalLM", {"runner": "pooling", "pooler_config": {"seq_pooling_type": "MEAN"}}),
    "encoder": ("BertForTokenClassification", {"max_num_batched_tokens": 160}),
}
LAYOUTS = {
    "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "stages of a device": {
        "pipeline_parallel_size": 2,
        "worker_cls": "tests.executor.rank_workers.AsyncWorker",
    },
}


def numbers(path, prompts, **settings):
    with LLM(str(path), kv_cache_memory_bytes=4 << 20, **(SETTINGS | settings)) as llm:
        return [output.outputs.data for output in llm.encode(as_dicts(prompts), use_tqdm=False)]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, id=f"{layout}-{model}", marks=pytest.mark.exhaustive if is_further else ())
        for model, layout, is_further in (
            ("decoder", "ranks", False),
            ("decoder", "stages", True),
            ("decoder", "stages of a device", False),
            ("encoder", "ranks", False),
            ("encoder", "stages", False),
            ("encoder", "stages of a device", True),
        )
    ],
)
def test_two_processes_give_what_one_gives(model, layout, tiny, prompts):
    architecture, settings = MODELS[model]
    path, layout = tiny(architecture), LAYOUTS[layout]
    alone, together = (numbers(path, prompts, **settings, **each) for each in ({}, layout))
    for one, two in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)
