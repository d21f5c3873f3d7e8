"""The platform is found where its device is, and an engine runs on it."""

import subprocess
import sys

import pytest
from quire_oak import find

RUN = """
from quire import LLM, SamplingParams
llm = LLM(max_model_len=512)
config = llm.llm_engine.config
answer = llm.chat([{"role": "user", "content": "What is 17 + 25?"}], SamplingParams(temperature=0, max_tokens=20))
print("oak", config.device.device, config.scheduler.max_num_batched_tokens, answer[0].outputs[0].text)
"""


def test_the_platform_answers_only_where_a_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OAK_DEVICES", raising=False)
    assert find() is None
    monkeypatch.setenv("OAK_DEVICES", "2")
    assert find() == "quire_oak.platform:OakPlatform"


def test_an_engine_runs_on_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OAK_DEVICES", "1")
    ran = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=250, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "oak oak 1024 17 + 25 = 42" in ran.stdout
