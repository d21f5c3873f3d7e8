"""`quire bench chaos` on a server whose core it kills; and whatever is lost, repeated or different is noticed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.oracles.server_process import SERVE, ServerProcess

from quire.benchmarks.chaos import Answer, Chaos, Row, build_cases, find_process
from quire.entrypoints.cli.main import main
from quire.errors import ConfigError


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """The demo model."""
    process = ServerProcess(*SERVE, "--port", "0")
    yield process
    process.popen.terminate()
    process.popen.wait(60)


def test_a_server_whose_core_is_killed_loses_nothing(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    words = ["--url", server.url, "--pid", str(server.popen.pid), "--faults", "1"]
    assert main(["bench", "chaos", *words, "--streams", "8", "--max-tokens", "200", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    none, killed = result["rows"]
    assert none["ready_s"] is None and killed["ready_s"] > 0
    assert killed["fault"] == "SIGKILL of quire core, 1 times" and killed["answers"] >= 8
    assert killed["lost"] == killed["repeated"] == killed["different"] == 0


def test_each_kind_of_request_brings_what_it_is_compared_by(server: ServerProcess) -> None:
    streams = Chaos(server.url, streams=8, max_tokens=12)
    answers = [streams.fetch(case) for case in streams.cases]
    assert all(answer.equals(expected) for answer, expected in zip(answers, streams._oracle, strict=True))
    assert all(answer.token_ids[0] for answer in answers) and sum(bool(answer.texts[0]) for answer in answers) > 4
    assert len(answers[3].logprobs[0]) == 12 and sorted(answers[6].reasons) == [0, 1]


def answer(*token_ids: int) -> Answer:
    return Answer({0: "text"}, {0: list(token_ids)}, {0: []}, {0: "stop"})


def judged(got: Answer, monkeypatch: pytest.MonkeyPatch) -> Row:
    """What is said of an answer where the oracle says 1, 2, 3."""
    monkeypatch.setattr(Chaos, "__init__", lambda self: None)
    streams, row = Chaos(), Row("a fault")  # type: ignore[call-arg]
    streams.cases, streams._oracle = build_cases(1, "m", 3, 0), [answer(1, 2, 3)]
    streams._judge(row, 0, got)
    return row


def test_what_is_lost_repeated_or_different_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(answer(1, 2, 3), monkeypatch).is_good
    repeated = judged(answer(1, 2, 2, 3), monkeypatch)
    assert (repeated.repeated, repeated.different, repeated.is_good) == (1, 1, False)
    missing = judged(answer(1, 3), monkeypatch)
    assert (missing.repeated, missing.different, missing.is_good) == (0, 1, False)
    broken = answer(1, 2)
    broken.error = "it broke off"
    lost = judged(broken, monkeypatch)
    assert (lost.lost, lost.errors, lost.is_good) == (1, ["it broke off"], False)
    assert not Row("nothing was asked").is_good


def test_an_event_in_which_the_thoughts_end_counts_whole() -> None:
    apart, together = Answer(), Answer()
    for delta in ({"reasoning": "so"}, {"content": "42"}):
        apart.take([{"index": 0, "delta": delta}])
    together.take([{"index": 0, "delta": {"reasoning": "so", "content": "42"}}])
    assert apart.texts == together.texts == {0: "so42"}


def test_a_process_that_is_not_there_is_named(server: ServerProcess) -> None:
    with pytest.raises(ConfigError, match=r"no child 'quire rank 1'; it has .*quire core"):
        find_process(server.popen.pid, "quire rank 1")


def test_the_requests_are_the_same_for_the_same_seed_and_no_two_are_alike() -> None:
    cases = build_cases(64, "m", 10, 1)
    assert cases == build_cases(64, "m", 10, 1) != build_cases(64, "m", 10, 2)
    assert len({json.dumps(case.body) for case in cases}) == 64
    assert {case.path for case in cases} == {"/chat/completions", "/completions"}
