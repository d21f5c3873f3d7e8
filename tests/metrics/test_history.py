"""The history of an engine in slots of some seconds."""

from quire.metrics.history import EVERY_S, MAX_SLOTS, History, Slot, merge_slots


def test_a_slot_has_the_most_requests_the_last_pages_and_its_own_tokens() -> None:
    now = [1000.0]
    history = History(lambda: now[0])
    history.note(2, 5, 0.25, 10)
    now[0] += EVERY_S - 0.5
    history.note(1, 0, 0.5, 14)
    now[0] += 10 * EVERY_S
    history.note(3, 0, 0.75, 20)
    assert history.slots() == [Slot(1000, 2, 5, 0.5, 14), Slot(1000 + 10 * EVERY_S, 3, 0, 0.75, 6)]


def test_only_the_last_slots_are_kept_and_their_tokens_add_up() -> None:
    now = [0.0]
    history = History(lambda: now[0])
    for number in range(2 * MAX_SLOTS):
        now[0] = float(number * EVERY_S)
        history.note(1, 0, 0.1, 7 * (number + 1))
    assert len(history.slots()) == MAX_SLOTS and {slot.tokens for slot in history.slots()} == {7}


def test_processes_before_one_core_add_up_their_tokens() -> None:
    one, two = [Slot(0, 4, 1, 0.5, 10), Slot(5, 1, 0, 0.1, 1)], [Slot(0, 3, 2, 0.5, 20)]
    assert merge_slots([one, two]) == [Slot(0, 4, 2, 0.5, 30), Slot(5, 1, 0, 0.1, 1)]
