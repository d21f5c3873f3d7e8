"""The benchmark of grammars runs every form, and says what an engine refuses."""

from pathlib import Path

import pytest
from bench.grammars import FORMS, run
from tests.oracles.tiny_models import make_tiny_model


def test_every_form_has_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, "wrong", {"regex": "(a"})
    path = make_tiny_model("LlamaForCausalLM", tmp_path)
    result = run(str(path), ["guidance"], [3], 2, 0)
    assert [row["form"] for row in result["rows"]] == list(FORMS)
    *right, wrong = result["rows"]
    assert "unclosed group" in wrong["refused"]
    for row in right:
        assert 0 < row["mask_us"]["median"] <= row["mask_us"]["worst"]
        assert row["all_3_ms"]["median"] > 0
