"""The pause leaves Python's collector as it found it, and keeps what waits out of its sight."""

import gc

import pytest

from quire.engine.collector import FREEZE_FROM, CollectorPause


@pytest.fixture(autouse=True)
def collector():
    """The collector on, nothing frozen. Afterwards what other tests left is frozen again."""
    gc.unfreeze()
    gc.enable()
    yield
    gc.freeze()
    gc.enable()


def test_nothing_is_collected_until_all_are_queued():
    with CollectorPause() as pause:
        assert not gc.isenabled()
        pause.settle(1)
        assert gc.isenabled() and gc.get_freeze_count() == 0
    assert gc.isenabled()


def test_many_requests_are_kept_out_of_sight_while_they_run():
    with CollectorPause() as pause:
        waiting = [[number] for number in range(FREEZE_FROM)]
        pause.settle(len(waiting))
        assert gc.get_freeze_count() > len(waiting)
        assert not any(item is waiting for item in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert any(item is waiting for item in gc.get_objects())


def test_an_error_leaves_the_collector_as_it_was():
    with pytest.raises(ValueError), CollectorPause():
        raise ValueError
    assert gc.isenabled()


def test_what_the_program_has_turned_off_or_frozen_stays_so():
    gc.disable()
    with CollectorPause() as pause:
        pause.settle(FREEZE_FROM)
        assert not gc.isenabled()
    assert not gc.isenabled() and gc.get_freeze_count() == 0
    gc.enable()
    gc.freeze()
    with CollectorPause() as pause:
        pause.settle(FREEZE_FROM)
    assert gc.isenabled() and gc.get_freeze_count() > 0
