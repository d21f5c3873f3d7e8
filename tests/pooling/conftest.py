"""Tiny pooling checkpoints, made once a session, and prompts of many lengths."""

import random

import pytest
from tests.oracles.tiny_models import make_tiny_model

SETTINGS = {
    "max_model_len": 128,
    "num_gpu_blocks_override": 200,
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A function that makes a checkpoint of an architecture, once for each set of overrides."""
    made = {}

    def make(architecture, **overrides):
        key = (architecture, repr(sorted(overrides.items())))
        if key not in made:
            made[key] = make_tiny_model(architecture, tmp_path_factory.mktemp(architecture), **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def prompts():
    """Lengths from one token to several pages; some share their first pages."""
    draw = random.Random(11)
    shared = [draw.randrange(4, 300) for _ in range(40)]
    alone = [[draw.randrange(4, 300) for _ in range(length)] for length in (1, 5, 16, 17, 33, 60, 2)]
    return alone + [[*shared[:length], draw.randrange(4, 300)] for length in (20, 32, 40)]


def as_dicts(prompts):
    return [{"prompt_token_ids": ids} for ids in prompts]
