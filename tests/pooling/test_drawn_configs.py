"""Encoders and their heads against Transformers in float32 on configs that nobody chose (see `tests/models/drawn_configs.py`)."""

import numpy as np
import pytest
import torch
from tests.models.drawn_configs import SHORTEST, draw_config
from tests.oracles.tiny_poolers import hidden_states, load_pooling_oracle, logits

from quire import LLM, PoolingParams

from .conftest import as_dicts
from .test_encoders import ENCODERS, WHOLE

DRAWS = 6
DECODERS = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "GPT2", "Phi3", "Mixtral")


@pytest.fixture
def longer(prompts):
    return [prompt for prompt in prompts if len(prompt) >= SHORTEST]


def overrides_of(architecture: str, family: str, seed: int) -> dict:
    """A family's drawn config, in the words that its tiny models need."""
    drawn = draw_config(architecture, seed)
    fixed = {
        name: value for name, value in ENCODERS[family].items() if name in ("pad_token_id", "max_position_embeddings")
    }
    if family == "DistilBert":  # other words for the same
        drawn |= {"dim": drawn["hidden_size"], "n_heads": drawn["num_attention_heads"], "hidden_dim": 72, "n_layers": 2}
    return drawn | fixed


def states_agree(llm: LLM, oracle, longer) -> None:
    params = PoolingParams(task="token_embed", use_activation=False)
    for prompt, output in zip(longer, llm.encode(as_dicts(longer), params, use_tqdm=False), strict=True):
        np.testing.assert_allclose(output.outputs.data, hidden_states(oracle, prompt).numpy(), atol=3e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(DRAWS))
@pytest.mark.parametrize("family", ENCODERS)
def test_drawn_encoders_give_transformers_hidden_states(family, seed, tiny, longer):
    architecture = f"{family}Model"
    path = tiny(architecture, **overrides_of(architecture, family, seed))
    with LLM(str(path), **WHOLE) as llm:
        states_agree(llm, load_pooling_oracle(path, architecture), longer)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(DRAWS // 2))
@pytest.mark.parametrize("head", ["Sequence", "Token"])
@pytest.mark.parametrize("family", ENCODERS)
def test_drawn_classifiers_give_transformers_probabilities(family, head, seed, tiny, longer):
    architecture = f"{family}For{head}Classification"
    labels = (2, 1, 7)[seed] if head == "Sequence" else 5
    path = tiny(architecture, num_labels=labels, **overrides_of(architecture, family, seed + DRAWS))
    oracle = load_pooling_oracle(path, architecture)
    with LLM(str(path), **WHOLE) as llm:
        if head == "Token":
            for prompt, output in zip(longer, llm.encode(as_dicts(longer), use_tqdm=False), strict=True):
                expected = logits(oracle, prompt).softmax(-1).numpy()
                np.testing.assert_allclose(output.outputs.data, expected, atol=3e-4)
            return
        outputs = llm.classify(as_dicts(longer), use_tqdm=False)
    expected = torch.stack([logits(oracle, prompt) for prompt in longer])
    wanted = expected.sigmoid() if labels == 1 else expected.softmax(-1)
    np.testing.assert_allclose([output.outputs.probs for output in outputs], wanted.numpy(), atol=3e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(DRAWS // 2))
@pytest.mark.parametrize("family", DECODERS)
def test_drawn_decoders_that_classify_give_transformers_probabilities(family, seed, tiny, longer):
    architecture = f"{family}ForSequenceClassification"
    path = tiny(architecture, num_labels=3, pad_token_id=2, **draw_config(architecture, seed))
    oracle = load_pooling_oracle(path, architecture)
    oracle.set_experts_implementation("eager")  # its grouped product wants sizes that are multiples of four
    with LLM(str(path), **WHOLE) as llm:
        outputs = llm.classify(as_dicts(longer), use_tqdm=False)
    expected = torch.stack([logits(oracle, prompt) for prompt in longer]).softmax(-1)
    np.testing.assert_allclose([output.outputs.probs for output in outputs], expected.numpy(), atol=3e-4)
