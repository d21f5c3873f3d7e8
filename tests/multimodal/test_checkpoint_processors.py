"""Processors that a server reads before its first image."""

from pathlib import Path

import pytest
from tests.oracles.tiny_models import make_tiny_model
from tests.oracles.tiny_vision import make_tiny_vision

from quire import EngineArgs
from quire.multimodal import checkpoint_processors


@pytest.fixture(autouse=True)
def unread():
    checkpoint_processors._read.cache_clear()


def test_the_first_image_finds_the_processor_that_was_read_ahead(tmp_path):
    folder = str(make_tiny_vision("LlavaForConditionalGeneration", tmp_path / "model"))
    reading = checkpoint_processors.read_ahead(EngineArgs(model=folder, load_format="dummy").create_engine_config())
    assert reading is not None
    reading.join()
    before = checkpoint_processors._read.cache_info()
    assert before.currsize == 1
    checkpoint_processors.image_processor(folder)
    assert checkpoint_processors._read.cache_info().hits == before.hits + 1


def test_a_broken_processor_is_told_and_stops_no_start(tmp_path, caplog):
    folder = Path(make_tiny_vision("LlavaForConditionalGeneration", tmp_path / "model"))
    config = EngineArgs(model=str(folder), load_format="dummy").create_engine_config()
    for file in folder.glob("*processor*.json"):
        file.write_text("{")
    reading = checkpoint_processors.read_ahead(config)
    assert reading is not None
    reading.join()
    assert "The model's processor could not be read" in caplog.text


def test_a_model_of_text_reads_none(tmp_path):
    make_tiny_model("LlamaForCausalLM", tmp_path / "model")
    config = EngineArgs(model=str(tmp_path / "model"), load_format="dummy").create_engine_config()
    assert checkpoint_processors.read_ahead(config) is None
