"""`quire doctor`: each check says what it saw, and what to set where that is not fine."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.entrypoints.cli import doctor
from quire.entrypoints.cli.doctor import as_text, machine_findings
from quire.entrypoints.cli.main import main
from quire.entrypoints.findings import FINE, LOOK, MISSES, STALLS, WRONG, Causes, Finding, server_findings

CALM = {
    "num_requests_running": 3.0,
    "num_requests_waiting": 1.0,
    "request_success_total": 1000.0,
    "kv_cache_usage_perc": 0.3,
}


def states(metrics: dict[str, float]) -> dict[str, str]:
    return {each.check: each.state for each in server_findings(metrics) if each.state != FINE}


def advice(metrics: dict[str, float], check: str) -> str:
    return next(each.to_do for each in server_findings(metrics) if each.check == check)


def test_a_calm_server_has_nothing_to_look_at() -> None:
    assert states({}) == states(CALM) == {}


@pytest.mark.parametrize(
    ("changes", "check", "word"),
    [
        ({"num_requests_waiting": 50.0}, "queue", "--max-num-seqs"),
        ({"num_requests_waiting": 50.0, "kv_cache_usage_perc": 0.97}, "queue", "--kv-cache-dtype"),
        ({"request_queue_time_seconds_sum": 30.0, "request_queue_time_seconds_count": 10.0}, "queue", "--max-num-seqs"),
        ({"admission_rejections_total": 4.0}, "refusals", "--max-num-waiting"),
        ({"num_preemptions_total": 80.0}, "preemptions", "--max-num-seqs"),
        ({"prefix_cache_queries_total": 1e6, "prefix_cache_hits_total": 10.0}, "prefix cache", "no beginning"),
    ],
)
def test_what_is_not_calm_is_named_with_what_changes_it(changes: dict[str, float], check: str, word: str) -> None:
    metrics = CALM | changes
    assert states(metrics) == {check: LOOK} and word in advice(metrics, check)


def test_a_few_preemptions_and_a_short_history_of_prefixes_are_fine() -> None:
    few = {"num_preemptions_total": 20.0, "prefix_cache_queries_total": 1000.0}
    assert states(CALM | few) == {}


def test_a_core_that_died_is_wrong() -> None:
    assert states(CALM | {"engine_restarts_total": 1.0}) == {"engine restarts": WRONG}


def test_causes_of_waiting_and_of_misses_name_what_changes_them() -> None:
    found = server_findings(CALM, Causes(4, {"common prefix": 90.0, "rows": 9.0}, {"evicted": 9000, "never seen": 100}))
    shown = {each.check: each for each in found}
    assert shown["stalls"].state == LOOK and shown["stalls"].to_do == STALLS["rows"], "the first that can be changed"
    assert shown["prefix misses"].state == LOOK and shown["prefix misses"].to_do == MISSES["evicted"]
    assert "common prefix 90.0 s, rows 9.0 s" in shown["stalls"].seen
    calm = server_findings(CALM, Causes(4, {"rows": 0.1}, {"never seen": 9000, "evicted": 10}))
    assert {each.state for each in calm} == {FINE} == {each.state for each in server_findings({}, Causes())}


def test_the_machine_is_read_from_the_kernels_files(tmp_path: Path) -> None:
    clock = tmp_path / "sys/devices/system/clocksource/clocksource0"
    clock.mkdir(parents=True)
    (clock / "current_clocksource").write_text("hpet\n")
    (tmp_path / "meminfo").write_text("SwapTotal: 8000000 kB\nSwapFree: 1000000 kB\n")
    found = {each.check: each for each in machine_findings(tmp_path, tmp_path / "sys", tmp_path / "absent")}
    assert found["clock"].state == found["swap"].state == found["shared memory"].state == LOOK
    assert "7.2 GB" in found["swap"].seen and "tsc" in found["clock"].to_do
    (clock / "current_clocksource").write_text("tsc\n")
    (tmp_path / "meminfo").write_text("")
    found = {each.check: each for each in machine_findings(tmp_path, tmp_path / "sys", tmp_path)}
    assert found["clock"] == Finding("clock", FINE, "tsc") and found["swap"].state == FINE
    assert {"device", "memory", "cores", "open files", "disk"} <= found.keys()


def test_a_server_that_asks_for_no_key_is_told_apart_by_who_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, object] = {}
    monkeypatch.setattr(doctor, "ServerWatch", lambda url, key: SimpleNamespace(ask=answers.get))
    assert doctor._keys("http://0.0.0.0:8000", []).seen == "needed"
    answers["/v1/models"] = {}
    open_to_all = doctor._keys("http://0.0.0.0:8000", [])
    assert open_to_all.state == LOOK and "0.0.0.0:8000" in open_to_all.seen and "--api-key" in open_to_all.to_do
    assert doctor._keys("127.0.0.1:8000", ["http://0.0.0.0:8000", "http://127.0.0.1:1"]) == open_to_all
    assert doctor._keys("http://localhost:8000/v1", ["http://127.0.0.1:8000"]).state == FINE
    assert doctor._keys("http://10.0.0.3:8000", ["http://127.0.0.1:8000"]).state == LOOK


def test_what_is_wrong_comes_first_with_what_to_do() -> None:
    found = [Finding("a", FINE, "x"), Finding("b", WRONG, "y", "do it"), Finding("c", LOOK, "z", "see")]
    lines = as_text({"place": found}).splitlines()
    assert lines[0] == "place" and [line.split()[0] for line in lines[1:]] == ["wrong", "→", "look", "→", "fine"]


def test_the_exit_code_says_whether_something_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    for state, code in ((LOOK, 0), (WRONG, 1)):
        monkeypatch.setattr(doctor, "machine_findings", lambda state=state: [Finding("a", state, "x", "y")])
        assert main(["doctor", "--json"]) == code
        assert json.loads(capsys.readouterr().out)["this machine"][0]["state"] == state
    assert main(["doctor", "http://127.0.0.1:9"]) != 0
