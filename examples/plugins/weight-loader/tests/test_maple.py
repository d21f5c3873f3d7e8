"""A checkpoint in the format gives the same answer as the one it was written from; a damaged file is refused."""

import json
import shutil
from pathlib import Path

import pytest
from quire_maple.reader import write_file
from safetensors.torch import load_file

from quire import LLM, SamplingParams
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo model in this format."""
    demo = Path(EngineArgs(max_model_len=512).create_engine_config().model.path)
    for file in demo.iterdir():
        if file.suffix == ".safetensors":
            write_file(tmp_path / f"{file.stem}.maple", load_file(file))
        elif file.is_file():
            shutil.copy(file, tmp_path)
    return tmp_path


def test_a_checkpoint_in_the_format_answers(folder: Path) -> None:
    llm = LLM(str(folder), load_format="maple", max_model_len=512)
    answer = llm.chat([{"role": "user", "content": "What is 17 + 25?"}], SamplingParams(temperature=0, max_tokens=20))
    assert answer[0].outputs[0].text == "17 + 25 = 42"


def test_a_damaged_file_is_refused_unless_the_check_is_turned_off(folder: Path) -> None:
    file = next(folder.glob("*.maple"))
    line, _, data = file.read_bytes().partition(b"\n")
    file.write_bytes(json.dumps({**json.loads(line), "crc32": 0}).encode() + b"\n" + data)
    with pytest.raises(ConfigError, match="is damaged: its checksum differs"):
        LLM(str(folder), load_format="maple", max_model_len=512)
    LLM(str(folder), load_format="maple", max_model_len=512, model_loader_extra_config={"check": False})
