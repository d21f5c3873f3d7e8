"""An engine tells the logger about every request that ended; a logger that fails harms none."""

import pytest
import quire_pine

from quire import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def test_every_request_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[quire_pine.Logger] = []
    monkeypatch.setattr(quire_pine.Logger, "record_step", lambda self, stats: made.append(self))
    LLM(max_model_len=512).generate(["a", "b"], PARAMS)
    assert made[0].ended == {"length": 2}


def test_a_failing_logger_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def fail(self: object, stats: object) -> None:
        calls.append(1)
        raise RuntimeError("broken")

    monkeypatch.setattr(quire_pine.Logger, "record_step", fail)
    outputs = LLM(max_model_len=512).generate(["a"], PARAMS)
    assert outputs[0].finished and len(calls) == 1
    assert "'pine' failed in record_step" in "".join(capsys.readouterr())
