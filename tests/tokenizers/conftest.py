"""Tokenizers of every family, made once."""

from pathlib import Path

import pytest
from tests.oracles.tiny_tokenizers import BUILDERS, write_tokenizer

from quire.tokenizers.interface import Tokenizer
from quire.tokenizers.loader import get_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family → folder with tokenizer.json and tokenizer_config.json."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: write_tokenizer(root / name, name) for name in BUILDERS}


@pytest.fixture(scope="session")
def tokenizers_by_family(tokenizer_folders: dict[str, Path]) -> dict[str, Tokenizer]:
    """Family → opened tokenizer."""
    return {name: get_tokenizer(str(folder)) for name, folder in tokenizer_folders.items()}
