"""Contents by name in files that several processes share: bounded, whole or not there, whatever becomes of a process."""

import concurrent.futures
import contextlib
import fcntl
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import kept_files
from quire.kept_files import DIGEST, KeptFiles, names_in, own_folder, roomiest

MOST = 4000


def name(number):
    return b"name" + number.to_bytes(12, "big")


def content(number, size):
    """Pieces whose bytes tell whose they are."""
    data = random.Random(number).randbytes(size)
    return [data[: size // 3], memoryview(data)[size // 3 :]]


def joined(pieces):
    return b"".join(bytes(piece) for piece in pieces)


def told(files):
    """The bytes that all processes go by."""
    with files._alone():
        return files._bytes


def sizes(folder):
    return [file.stat().st_size for file in folder.rglob("??/*") if file.exists()]


@pytest.fixture(params=[False, True], ids=["mapped", "lasting"])
def files(tmp_path, request):
    return KeptFiles(tmp_path, MOST, lasting=request.param)


def test_what_was_used_least_recently_goes_first(files, tmp_path):
    for number in range(4):
        assert files.write(name(number), content(number, 900)) == []
    assert joined([files.read(name(0))]) == joined(content(0, 900))
    assert files.write(name(4), content(4, 900)) == [name(1)]
    other = KeptFiles(tmp_path, MOST, lasting=False)
    assert told(other) == told(files) == 4 * (900 + DIGEST) == sum(sizes(tmp_path))
    assert other.write(name(5), content(5, 1700)) == [name(2), name(3)]
    assert set(names_in(tmp_path)) == {name(0), name(4), name(5)}
    assert files.write(name(6), content(6, MOST)) == [name(6)]
    assert files.write(name(5), content(5, 1700)) == []
    files.clear()
    assert told(files) == 0 and sizes(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        files.read(name(0))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 1800), st.integers(0, 1)), max_size=60))
def test_a_drawn_use_is_that_of_a_list_in_the_order_of_use(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("kept")
    both = [KeptFiles(folder, MOST, lasting=False) for _ in range(2)]
    model: dict[int, bytes] = {}
    for number, size, who in steps:
        if number in model:
            assert joined([both[who].read(name(number))]) == model[number]
            model[number] = model.pop(number)
            continue
        pieces = content(number, size)
        gone = both[who].write(name(number), pieces)
        model[number] = joined(pieces)
        expected = []
        while sum(len(each) + DIGEST for each in model.values()) > MOST:
            oldest = next(iter(model))
            expected.append(name(oldest))
            del model[oldest]
        assert gone == expected
        assert told(both[1 - who]) == sum(sizes(folder)) <= MOST
    assert set(names_in(folder)) == {name(number) for number in model}


def work(folder, seed):
    """Read and write at random; what is read is what was written."""
    files, chosen = KeptFiles(Path(folder), MOST, lasting=False), random.Random(seed)
    for _ in range(150):
        number = chosen.randrange(20)
        pieces = content(number, 150 + 90 * number)
        try:
            assert joined([files.read(name(number))]) == joined(pieces)
        except FileNotFoundError:
            files.write(name(number), pieces)
        assert told(files) <= MOST


def test_several_processes_and_threads_stay_within_the_bound(tmp_path):
    """Looked at from outside, while they work: nothing is larger than it may be, and nothing is read that was not written."""
    start = multiprocessing.get_context("spawn")
    processes = [start.Process(target=work, args=(str(tmp_path), seed)) for seed in range(3)]
    for process in processes:
        process.start()
    watcher = KeptFiles(tmp_path, MOST, lasting=False)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        working = [threads.submit(work, str(tmp_path), seed) for seed in range(3, 5)]
        while any(process.is_alive() for process in processes):
            with watcher._alone():
                assert sum(sizes(tmp_path)) <= MOST
        assert [each.result() for each in working] == [None, None]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert told(watcher) == sum(sizes(tmp_path)) and not list(tmp_path.rglob("*.*"))


KILLED = """
import os, signal, sys
from pathlib import Path
from quire.kept_files import KeptFiles
content, rename = [b"x" * 500, b"y" * 1000], Path.rename
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "writes":
    real = Path.open
    class Half:
        def __init__(self, opened):
            self.opened, self.truncate, self.fileno = opened, opened.truncate, opened.fileno
        def __enter__(self):
            return self
        def writelines(self, pieces):
            self.opened.write(pieces[1])
            self.opened.flush()
            die()
        __exit__ = die
    Path.open = lambda path, mode: Half(real(path, mode))
elif sys.argv[2] == "renames":
    Path.rename = die
elif sys.argv[2] == "has renamed":
    Path.rename = lambda *paths: (rename(*paths), die())
else:
    Path.unlink = die
KeptFiles(Path(sys.argv[1]), 4000, lasting=False).write(b"k" * 16, content)
"""


@pytest.mark.parametrize("moment", ["writes", "renames", "has renamed", "removes others"])
def test_a_writer_that_is_killed_leaves_nothing_broken(tmp_path, moment):
    files = KeptFiles(tmp_path, MOST, lasting=False)
    for number in range(3):
        files.write(name(number), content(number, 1000))
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert told(files) == sum(sizes(tmp_path)) <= MOST
    for number in range(3, 9):
        assert name(number) not in files.write(name(number), content(number, 1000))
        assert joined([files.read(name(number))]) == joined(content(number, 1000))
        assert told(files) == sum(sizes(tmp_path)) <= MOST
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize("fault", ["a bit", "the sum", "shorter", "longer", "empty"])
def test_what_is_damaged_is_found_and_may_be_written_again(files, tmp_path, fault):
    files.write(name(1), content(1, 500))
    (victim,) = tmp_path.rglob("??/*")
    data = victim.read_bytes()
    changed = {
        "a bit": data[:100] + bytes([data[100] ^ 1]) + data[101:],
        "the sum": bytes([data[0] ^ 1]) + data[1:],
        "shorter": data[:-1],
        "longer": data + b"x",
        "empty": b"",
    }
    victim.write_bytes(changed[fault])
    with pytest.raises(ValueError):
        files.read(name(1))
    assert not victim.exists()
    files.write(name(1), content(1, 500))
    assert joined([files.read(name(1))]) == joined(content(1, 500))


def test_a_content_of_another_name_is_no_content(files, tmp_path):
    files.write(name(1), content(1, 500))
    files.write(name(2), content(2, 500))
    first, second = (tmp_path / name(number)[:1].hex() / name(number).hex() for number in (1, 2))
    second.rename(first)
    with pytest.raises(ValueError):
        files.read(name(1))


def test_what_is_in_use_stays_readable_when_its_file_goes(tmp_path):
    files = KeptFiles(tmp_path, MOST, lasting=False)
    files.write(name(1), content(1, 3000))
    view = files.read(name(1))
    files.write(name(2), content(2, 3000))
    assert joined([view]) == joined(content(1, 3000))
    with pytest.raises(FileNotFoundError):
        files.read(name(1))


def full(*_, **__):
    raise OSError(28, "No space left on device")


class FullFile:
    """A file that takes its size and a piece, and then nothing."""

    def __init__(self, opened):
        self.opened, self.truncate, self.fileno, self.flush = opened, opened.truncate, opened.fileno, full

    def writelines(self, pieces):
        self.opened.write(pieces[0])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.opened.close()


@pytest.mark.parametrize("moment", ["begins", "writes", "ends", "renames"])
def test_a_full_disk_is_an_error_and_leaves_nothing(files, tmp_path, monkeypatch, moment):
    files.write(name(1), content(1, 500))
    real = Path.open
    changed = {
        "begins": (Path, "open", full),
        "writes": (Path, "open", lambda path, mode: FullFile(real(path, mode))),
        "ends": (os, "utime", full),
        "renames": (Path, "rename", full),
    }
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(*changed[moment])
        files.write(name(2), content(2, 500))
    assert told(files) == sum(sizes(tmp_path)) == 500 + DIGEST
    assert files.write(name(2), content(2, 500)) == []
    assert told(files) == 2 * (500 + DIGEST)


def test_a_folder_that_is_gone_is_an_error(files, tmp_path):
    tmp_path.rmdir()
    for use in (lambda: files.read(name(1)), lambda: files.write(name(1), [b"x"]), files.clear):
        with pytest.raises(OSError):
            use()


def test_a_folder_ends_with_its_process_and_those_of_killed_ones_are_removed(tmp_path):
    program = (
        "import sys, time, pathlib\nfrom quire.kept_files import own_folder\n"
        "with own_folder(pathlib.Path(sys.argv[1]), 'mine-') as folder:\n"
        "    (folder / 'file').write_text('x')\n    print(folder, flush=True)\n    sys.stdin.read()\n"
    )
    (tmp_path / "mine-").write_text("a file is left alone")
    words = [sys.executable, "-c", program, str(tmp_path)]
    with contextlib.ExitStack() as stack:
        alive, killed = (
            stack.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(2)
        )
        assert alive.stdin and alive.stdout and killed.stdout
        lives, left = (Path(stream.readline().strip()) for stream in (alive.stdout, killed.stdout))
        killed.kill()
        killed.wait()
        assert left.exists()
        with own_folder(tmp_path, "mine-") as folder:
            assert folder.stat().st_mode & 0o777 == 0o700
            assert lives.exists() and not left.exists() and (tmp_path / "mine-").exists()
        assert not folder.exists()
        alive.stdin.close()
        assert alive.wait(60) == 0 and not lives.exists()
    assert [each.name for each in tmp_path.iterdir()] == ["mine-"]


def test_a_bound_is_half_of_what_is_free_where_there_is_little(tmp_path, monkeypatch):
    free = {}

    def statvfs(folder):
        if folder not in free:
            raise FileNotFoundError(folder)
        return os.statvfs_result((1024, 1024, 0, 0, free[folder], 0, 0, 0, 0, 255))

    monkeypatch.setattr(kept_files.os, "statvfs", statvfs)
    shared, disk = tmp_path / "shm", tmp_path / "tmp"
    shared.mkdir()
    disk.mkdir()
    free |= {shared: 1000, disk: 400}
    assert roomiest(100 << 10, [shared, disk]) == (shared, 100 << 10)
    free[shared] = 64
    assert roomiest(100 << 10, [shared, disk]) == (disk, 100 << 10)
    assert roomiest(300 << 10, [shared, disk]) == (disk, 200 << 10)
    del free[shared]
    assert roomiest(100 << 10, [shared, disk]) == (disk, 100 << 10)
    free.clear()
    assert roomiest(100 << 10, [shared, disk])[1] == 0


def test_locks_are_those_of_files_not_of_processes(tmp_path):
    """A folder that this process holds itself is not taken for one that was left."""
    with own_folder(tmp_path, "mine-") as first, own_folder(tmp_path, "mine-") as second:
        assert first.exists() and second.exists()
        descriptor = os.open(first, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
