"""The start's phases: added up by name, told apart where they overlap, counted from the right moment."""

import threading
import time

import pytest

from quire.timeline import FRESH_PROCESS_S, Timeline, process_age


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_phases_are_counted_from_the_process_start(clock):
    timeline = Timeline(clock, age=0.5)
    clock.now += 1.0
    with timeline.phase("imports"):
        clock.now += 2.0
    clock.now += 0.25
    assert timeline.ready() == pytest.approx(3.75)
    assert timeline.line() == "python 1.5 s | imports 2.0 s | ready 3.8 s after the process's start"


def test_phases_of_one_name_add_up_and_keep_their_note(clock):
    timeline = Timeline(clock)
    for note in ("", "12 GB/s"):
        with timeline.phase("weights") as phase:
            clock.now += 1.5
            phase.note = note
    assert timeline.line() == "weights 3.0 (12 GB/s)"


def test_what_runs_beside_is_told_apart(clock):
    timeline = Timeline(clock)
    with timeline.phase("weights"), timeline.phase("kernels", is_beside=True):
        clock.now += 1.0
    assert timeline.line() == "weights 1.0 s | [kernels 1.0 s]"
    assert [phase.get("beside", False) for phase in timeline.report()["phases"]] == [False, True]


def test_what_lasts_has_no_seconds_yet(clock):
    timeline = Timeline(clock)
    with timeline.phase("kernels", is_beside=True) as phase:
        clock.now += 1.0
        phase.note = "5 compiled"
        assert timeline.line() == "[kernels … (5 compiled)]"
    assert timeline.line() == "[kernels 1.0 (5 compiled)]"


def test_a_phase_ends_also_when_it_fails(clock):
    timeline = Timeline(clock)
    with pytest.raises(KeyError), timeline.phase("weights"):
        clock.now += 1.0
        raise KeyError
    assert timeline.phases()[0].seconds == 1.0


def test_an_engine_in_an_old_process_counts_from_its_own_start(clock):
    timeline = Timeline(clock, age=0.1)
    clock.now += FRESH_PROCESS_S + 1
    timeline.begin_engine()
    with timeline.phase("weights"):
        clock.now += 1.0
    timeline.ready()
    assert timeline.line() == "weights 1.0 s | ready 1.0 s"


def test_a_second_engine_starts_a_new_line(clock):
    timeline = Timeline(clock, age=0.1)
    timeline.begin_engine()
    timeline.ready()
    timeline.begin_engine()
    assert timeline.phases() == []


def test_what_begins_after_the_start_is_no_part_of_it(clock):
    timeline = Timeline(clock)
    timeline.ready()
    with timeline.phase("weights"):
        clock.now += 1.0
    assert timeline.phases() == []


def test_threads_may_report_at_once():
    timeline = Timeline()

    def work():
        for _ in range(200):
            with timeline.phase("kernels", is_beside=True):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.phases()) == 800


def test_the_age_of_this_process_grows_with_the_clock():
    before, began = process_age(), time.monotonic()
    if before is None:
        pytest.skip("this system does not tell when a process was started")
    while time.monotonic() - began < 0.02:
        pass
    after = process_age()
    assert 0 <= before < after
