"""Pooling models over two processes that sum through gloo: the numbers of one."""

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
def test_two_ranks_give_what_one_gives(architecture, settings, tiny, prompts):
    path = tiny(architecture)
    alone, together = (numbers(path, prompts, tensor_parallel_size=size, **settings) for size in (1, 2))
    for one, two in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)
