"""One tiny checkpoint with a tokenizer for the whole room."""

from pathlib import Path

import pytest
from tests.oracles.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: it would say anything, so what it says in a form is the grammar's doing."""
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))
