"""A model folder with a tokenizer, made once."""

from pathlib import Path

import pytest
from tests.engine.builders import write_model_folder

from quire.tokenizers.interface import Tokenizer
from quire.tokenizers.loader import get_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json, tokenizer.json, tokenizer_config.json."""
    return write_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    """The folder's tokenizer."""
    return get_tokenizer(str(model_folder))
