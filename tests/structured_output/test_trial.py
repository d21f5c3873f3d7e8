"""A grammar that explodes is refused and takes nobody with it."""

import os
import sys
import time

import pytest

from quire.config import StructuredOutputsConfig, limits
from quire.errors import EngineError, RequestError
from quire.sampling_params import StructuredOutputsParams
from quire.structured_output import trial
from quire.structured_output.grammars import Grammars
from quire.structured_output.vocabulary import Vocabulary

EOS = 256
VOCABULARY = Vocabulary([bytes([byte]) for byte in range(256)] + [b"<eos>"], [EOS], lambda text: list(text.encode()))
HUGE = {"type": "object", "properties": {f"k{n}": {"type": "string", "maxLength": 50 + n} for n in range(8000)}}


@pytest.fixture
def grammars():
    made = Grammars(StructuredOutputsConfig(backend="guidance"))
    yield made
    made.close()


def check(grammars: Grammars, **fields: object) -> None:
    grammars.check(StructuredOutputsParams(**fields), [EOS], lambda: VOCABULARY, apart=True)  # type: ignore[arg-type]


def test_what_a_child_says_is_what_the_engine_says(grammars: Grammars) -> None:
    check(grammars, regex="a+")
    with pytest.raises(RequestError, match="look-around") as caught:
        check(grammars, regex="(?=a)")
    assert caught.value.param == "regex"
    check(grammars, json={"type": "object"})


def test_a_grammar_that_takes_too_long_is_killed_and_the_next_one_is_not(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(grammars, regex="warm")
    monkeypatch.setattr(limits, "MAX_GRAMMAR_SECONDS", 0.3)
    with pytest.raises(RequestError, match="takes longer than") as caught:
        check(grammars, json=HUGE)
    assert caught.value.param == "json"
    monkeypatch.undo()
    check(grammars, regex="b+")
    with pytest.raises(RequestError, match="takes longer than"):  # known by now: nobody waits again
        check(grammars, json=HUGE)


def test_a_grammar_that_takes_too_much_memory_ends_its_child_alone(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_GRAMMAR_MEMORY_BYTES", 4 << 20)
    with pytest.raises(RequestError, match="MiB of memory"):
        check(grammars, json={"enum": [f"value {number} of many" for number in range(20000)]})
    check(grammars, regex="a")


def test_a_child_that_died_is_replaced(grammars: Grammars) -> None:
    check(grammars, regex="a")
    (trials,) = grammars._trials.values()
    child = trials._places.get()
    assert isinstance(child, trial._Child)
    child._process.kill()
    child._process.wait()
    trials._places.put(child)
    check(grammars, regex="ab")


def test_a_grammar_seen_before_is_answered_at_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    check(grammars, regex="a")
    monkeypatch.setattr(trial.Trials, "check", lambda *_: pytest.fail("asked again"))
    check(grammars, regex="a")


def test_children_end_with_their_grammars() -> None:
    made = Grammars()
    check(made, regex="a")
    (trials,) = made._trials.values()
    child = trials._places.get()
    trials._places.put(child)
    assert child is not None and child._process.poll() is None
    made.close()
    deadline = time.monotonic() + 30
    while child._process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child._process.poll() is not None


def test_what_is_known_needs_no_thread(grammars: Grammars) -> None:
    params = StructuredOutputsParams(regex="a")
    assert not grammars.is_known(params, [EOS], shared=False)
    check(grammars, regex="a")
    assert grammars.is_known(params, [EOS], shared=False)
    assert not grammars.is_known(params, [EOS], shared=True)
    grammars.check(params, [EOS], lambda: VOCABULARY)
    assert grammars.is_known(params, [EOS], shared=True)


def test_a_child_that_was_started_ahead_tries_the_first_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    plain = trial.start_child
    monkeypatch.setattr(trial, "start_child", lambda *args, **named: started.append(args) or plain(*args, **named))
    ahead = grammars.read_ahead(lambda: [EOS], lambda: VOCABULARY, apart=True)
    assert ahead is not None
    ahead.result(timeout=60)
    assert len(started) == 1
    check(grammars, regex="a+")
    check(grammars, regex="b+")
    assert len(started) == 1


def test_an_engine_that_cannot_be_used_is_told_and_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "broken_engine.py").write_text(
        "class Broken:\n    def __init__(self, *given):\n        raise TypeError('too old')\n"
    )
    (tmp_path / "sitecustomize.py").write_text(
        "import quire.structured_output.backend as backend\n"
        "backend.BACKENDS['guidance'] = ('broken_engine', 'Broken', 'broken', 'broken')\n"
    )
    children = trial.Trials("guidance", (EOS,), VOCABULARY)
    with monkeypatch.context() as changed:
        changed.setenv("PYTHONPATH", f"{tmp_path}:{os.pathsep.join(sys.path)}")
        changed.syspath_prepend(str(tmp_path))
        with pytest.raises(EngineError, match="could not be started: TypeError: too old"):
            children.begin()
    children.check(StructuredOutputsParams(regex="a"))
    children.close()
