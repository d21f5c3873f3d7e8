"""The log of events: bounded, counted, and one entry for what comes in a burst."""

from quire.metrics import events
from quire.metrics.events import Event, EventKind, EventLog, merge_events, merge_totals


def test_events_are_counted_and_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(events, "MERGED_WITHIN_S", 0.0)
    log = EventLog()
    for number in range(events.KEPT + 5):
        log.add(EventKind.RESTART, f"restart {number}")
    kept = log.latest()
    assert len(kept) == events.KEPT
    assert (kept[0].text, kept[-1].text) == ("restart 5", f"restart {events.KEPT + 4}")
    assert log.totals[EventKind.RESTART] == events.KEPT + 5


def test_a_burst_of_one_kind_is_one_entry():
    log = EventLog()
    for _ in range(1000):
        log.add(EventKind.REFUSAL, "the queue is full")
    log.add(EventKind.DEADLINE, "request a", count=2)
    assert [(event.kind, event.count) for event in log.latest()] == [(EventKind.REFUSAL, 1000), (EventKind.DEADLINE, 2)]
    assert log.totals == {EventKind.REFUSAL: 1000, EventKind.DEADLINE: 2}


def test_what_says_something_else_is_an_entry_of_its_own_but_for_what_comes_in_numbers():
    log = EventLog()
    for kind in (EventKind.CONTROL, EventKind.REPLAY):
        for text in ("one", "two", "two"):
            log.add(kind, text)
    told = [(event.kind, event.text, event.count) for event in log.latest()]
    assert told == [(EventKind.CONTROL, "one", 1), (EventKind.CONTROL, "two", 2), (EventKind.REPLAY, "one", 3)]


def test_what_is_given_out_does_not_change():
    log = EventLog()
    log.add(EventKind.HANG, "core 1")
    (before,) = log.latest()
    log.add(EventKind.HANG, "core 2")
    assert before.count == 1


def test_what_all_processes_saw_is_one_event_and_what_one_saw_is_its_own():
    crash = [Event(EventKind.RESTART, at, "killed") for at in (10.0, 10.4, 15.0)]
    refusals = [Event(EventKind.REFUSAL, at, "full", 3) for at in (10.1, 10.2)]
    merged = merge_events([[crash[0], refusals[0]], [refusals[1], crash[1], crash[2]]])
    assert merged == [crash[0], *refusals, crash[2]]


def test_totals_of_all_processes():
    older = {EventKind.RESTART: 3, EventKind.REFUSAL: 5}
    younger = {EventKind.RESTART: 1, EventKind.REFUSAL: 2, EventKind.REPLAY: 4}
    assert merge_totals([younger, older]) == {EventKind.RESTART: 3, EventKind.REFUSAL: 7, EventKind.REPLAY: 4}
