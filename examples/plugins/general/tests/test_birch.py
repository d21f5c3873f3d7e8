"""Everything that the package adds is there for whoever reads it."""

import pytest

from quire import LLM, envs
from quire.engine.arg_utils import EngineArgs
from quire.entrypoints.cli import collect_env
from quire.logger import init_logger
from quire.metrics.prometheus import PluginCollector


def test_the_variable_is_known_and_a_typing_error_in_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    EngineArgs(max_model_len=512).create_engine_config()
    monkeypatch.setenv("BIRCH_SITE", "Bergen")
    monkeypatch.setenv("BIRCH_SIET", "Bergen")
    assert envs.BIRCH_SITE == "Bergen"
    assert ("BIRCH_SIET", "BIRCH_SITE") in envs.unknown_variables()
    report = collect_env.collect()
    assert report["environment"]["BIRCH_SITE"] == "Bergen"
    assert report["birch"]["site"] == "Bergen" and "inspector" in report["birch"]["roles"]


def test_lines_of_the_log_have_the_field(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    EngineArgs(max_model_len=512).create_engine_config()
    monkeypatch.setenv("BIRCH_SITE", "Bergen")
    init_logger("quire.birch").info("hello")
    assert "hello birch_site=Bergen" in "".join(capsys.readouterr())


def test_the_metric_is_in_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    EngineArgs(max_model_len=512).create_engine_config()
    monkeypatch.setenv("BIRCH_SITE", "Bergen")
    samples = [sample for family in PluginCollector().collect() for sample in family.samples]
    assert ("birch:load", {"site": "Bergen"}) in [(sample.name, sample.labels) for sample in samples]


def test_settings_that_are_left_open_get_the_overlays_values() -> None:
    config = EngineArgs(max_model_len=512).create_engine_config()
    assert config.scheduler.max_num_seqs == 24
    assert EngineArgs(max_model_len=512, max_num_seqs=8).create_engine_config().scheduler.max_num_seqs == 8


def test_a_process_that_runs_an_engine_alone_is_told_all_its_kinds() -> None:
    from quire_birch import ROLES

    LLM(max_model_len=512)
    assert {"frontend", "core", "worker"} <= set(ROLES) and len(ROLES) == len(set(ROLES))
