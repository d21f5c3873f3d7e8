"""The store of responses: conversations, bounds, age, files."""

import json
import os
import sqlite3

import pytest

from quire.entrypoints.responses.store import MAX_AGE_S, Missing, Record, ResponseStore, StillRunning, StoreLimits
from quire.errors import ConfigError

pytestmark = pytest.mark.anyio


def record(name, previous=None, words="x", **fields):
    body = {"id": name, "status": "completed", "output": [{"id": f"out-{name}", "text": words}]}
    given = [{"id": f"in-{name}", "text": words}]
    fields = {"is_running": False, "item_ids": (f"out-{name}",), **fields}
    return Record(name, previous, body=json.dumps(body).encode(), input=json.dumps(given).encode(), **fields)


async def kept(store, names):
    found = []
    for name in names:
        try:
            found.append((await store.get(name)).id)
        except Missing:
            pass
    return found


async def test_what_is_kept_can_be_read_replaced_and_forgotten():
    store = ResponseStore()
    await store.save(record("a", is_running=True, item_ids=()))
    await store.save(record("a", "before", "new", events=b"one\n\ntwo\n\n"))
    found = await store.get("a")
    assert (found.previous, found.is_running, found.events) == ("before", False, b"one\n\ntwo\n\n")
    assert b"new" in found.body and b"new" in found.input
    assert await store.items(["out-a", "out-b"]) == {"out-a": {"id": "out-a", "text": "new"}}
    await store.delete("a")
    assert await store.items(["out-a"]) == {}
    for forgotten in (store.get("a"), store.delete("a")):
        with pytest.raises(Missing, match="a"):
            await forgotten


async def test_a_conversation_is_every_item_in_order():
    store = ResponseStore()
    await store.save(record("a"))
    await store.save(record("b", "a"))
    await store.save(record("c", "b"))
    await store.save(record("other", "a"))
    expected = [f"{side}-{name}" for name in "abc" for side in ("in", "out")]
    assert [item["id"] for item in await store.conversation("c")] == expected
    assert len(await store.conversation("other")) == 4
    await store.delete("a")
    with pytest.raises(Missing, match="a"):
        await store.conversation("c")
    await store.save(record("waits", is_running=True))
    with pytest.raises(StillRunning, match="waits"):
        await store.conversation("waits")


async def test_the_longest_unused_go_first_whole_conversations_stay():
    seconds = [0.0]

    def clock():
        seconds[0] += 1.0
        return seconds[0]

    names = [f"r{number}" for number in range(40)]
    store = ResponseStore(limits=StoreLimits(8, 1 << 20), clock=clock)
    await store.save(record("first"))
    await store.save(record("second", "first"))
    for name in names:
        await store.save(record(name))
        assert len(await store.conversation("second")) == 4
    there = await kept(store, names)
    assert there == names[-len(there) :] and 6 <= len(there) <= 8


async def test_bytes_are_bounded():
    store = ResponseStore(limits=StoreLimits(1000, 100_000))
    names = [f"r{number}" for number in range(30)]
    for name in names:
        await store.save(record(name, words="y" * 10_000))
    there = await kept(store, names)
    assert there == names[-len(there) :] and 4 <= len(there) <= 5


async def test_what_is_too_old_is_gone():
    now = [0.0]
    store = ResponseStore(clock=lambda: now[0])
    await store.save(record("a"))
    now[0] = MAX_AGE_S - 1
    await store.save(record("b", "a"))
    now[0] = MAX_AGE_S + 1
    assert await kept(store, "ab") == ["b"]
    with pytest.raises(Missing, match="a"):
        await store.conversation("b")
    assert await store.items(["out-a", "out-b"]) == {"out-b": {"id": "out-b", "text": "x"}}


async def test_a_file_is_its_owners_and_lasts(tmp_path):
    path = str(tmp_path / "kept.sqlite")
    store = ResponseStore(path)
    await store.save(record("a"))
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert all(os.stat(tmp_path / name).st_mode & 0o077 == 0 for name in os.listdir(tmp_path))
    other = ResponseStore(path)
    assert (await other.get("a")).id == "a"
    await other.save(record("b", "a"))
    assert len(await store.conversation("b")) == 4
    store.close()
    other.close()
    assert os.listdir(tmp_path) == ["kept.sqlite"]


@pytest.mark.parametrize("make", ["folder", "text", "nowhere", "foreign"])
def test_a_file_that_cannot_be_used_is_refused_with_its_name(make, tmp_path):
    path = tmp_path / "kept"
    if make == "folder":
        path.mkdir()
    elif make == "text":
        path.write_text("no database at all, but more than a hundred bytes of text" * 3)
    elif make == "nowhere":
        path = tmp_path / "nowhere" / "kept"
    else:
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE responses (other INTEGER)")
    with pytest.raises(ConfigError, match="responses_store") as refused:
        ResponseStore(str(path))
    assert refused.value.setting == "responses_store" and str(path) in str(refused.value)


@pytest.fixture
def anyio_backend():
    return "asyncio"
