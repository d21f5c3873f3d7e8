"""One tiny checkpoint of each kind for the whole room."""

from pathlib import Path

import pytest
from tests.oracles.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rotary positions, RMS norms, full attention."""
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Learned positions, layer norms."""
    return make_tiny_model("GPT2LMHeadModel", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="session")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sliding window in every layer."""
    return make_tiny_model("MistralForCausalLM", tmp_path_factory.mktemp("mistral"), sliding_window=8)


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two KV groups: full attention and a sliding window."""
    return make_tiny_model("Gemma3ForCausalLM", tmp_path_factory.mktemp("gemma"))
