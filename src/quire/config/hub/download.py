"""Fetches files of one repository: several at a time, with one progress bar for all of them.

Knows bytes and threads. Knows nothing of what the files mean.
"""

import queue
import shutil
import sys
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import Any

from quire.config.hub.huggingface import HuggingFaceHub
from quire.config.hub.listing import HubFile, Listing
from quire.config.hub.modelscope import ModelScopeHub
from quire.errors import ConfigError
from quire.logger import init_logger

logger = init_logger(__name__)

Hub = HuggingFaceHub | ModelScopeHub

AT_ONCE = 8
"""Files that are fetched at a time."""
LOOK_S = 0.2
"""Between two looks at how much is here."""
SHOW_AFTER_S = 0.5
"""What is done before shows no bar."""
LOG_EVERY_S = 15.0
"""Between two lines of the log, where no terminal shows the bar."""
SPARE_BYTES = 256 << 20
"""Of the disk, left to others."""
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def amount(num_bytes: float) -> str:
    """Bytes for a reader: 15.2 GB."""
    return next((f"{num_bytes / unit:.1f} {name}" for unit, name in _UNITS if num_bytes >= unit), f"{num_bytes:.0f} B")


def free_bytes(folder: Path) -> int:
    """Of the disk that a folder is or would be on."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def plan_line(source: Hub, listing: Listing, files: tuple[HubFile, ...]) -> str:
    """What would be fetched."""
    total = sum(file.size for file in files)
    here = sum(source.fetched_bytes(listing, file) for file in files)
    begun = f", of which {amount(here)} are here" if here else ""
    noun = "file" if len(files) == 1 else "files"
    return (
        f"{len(files)} {noun} of {listing.repository} at {listing.commit[:12]}: {amount(total)}{begun} "
        f"({amount(free_bytes(source.cache))} free in {source.cache})"
    )


def check_space(source: Hub, listing: Listing, files: tuple[HubFile, ...]) -> None:
    """Raises ConfigError if the disk has less room than the files need."""
    wanted = sum(file.size - source.fetched_bytes(listing, file) for file in files)
    free = free_bytes(source.cache)
    if wanted + SPARE_BYTES > free and wanted > 0:
        raise ConfigError(
            f"{listing.repository} needs {amount(wanted)} more in {source.cache}, where {amount(free)} are free and "
            f"{amount(SPARE_BYTES)} are to stay so: free space, or name another folder with download_dir or HF_HOME",
            setting="download_dir",
        )


def fetch_files(source: Hub, listing: Listing, files: tuple[HubFile, ...]) -> None:
    """Fetch the files that are not on this machine yet. Raises the source's first error unchanged; fetched files are kept."""
    missing = listing.missing(files)
    if not missing:
        return
    check_space(source, listing, missing)
    with source.quiet(), _Progress(source, listing, missing) as progress:
        ends = _begin_fetching(source, listing, missing)
        while _are_busy(ends):
            progress.look()
        progress.look()
        for end in ends:
            if end.done():
                end.result()


def _begin_fetching(source: Hub, listing: Listing, files: tuple[HubFile, ...]) -> list[Future[None]]:
    """Threads that fetch files one after another, the largest first, until there are no more or one has failed; the ends of
    them. They are daemons: an interrupted process ends without waiting for them."""
    waiting: queue.SimpleQueue[HubFile] = queue.SimpleQueue()
    for file in sorted(files, key=lambda file: -file.size):
        waiting.put(file)
    ends = [Future[None]() for _ in range(min(AT_ONCE, len(files)))]

    def run(end: Future[None]) -> None:
        try:
            while not any(each.done() for each in ends):
                source.fetch(listing, waiting.get_nowait())
        except queue.Empty:
            pass
        except BaseException as error:  # handed to the thread that waits
            end.set_exception(error)
            return
        end.set_result(None)

    for number, end in enumerate(ends):
        threading.Thread(target=run, args=(end,), name=f"hub-download-{number}", daemon=True).start()
    return ends


def _are_busy(ends: list[Future[None]]) -> bool:
    """Whether they are within `LOOK_S`, and none has failed."""
    over, busy = wait(ends, LOOK_S, FIRST_EXCEPTION)
    return bool(busy) and not any(end.exception() for end in over)


class _Progress:
    """A bar on a terminal; elsewhere a line in the log now and then, if it takes long."""

    def __init__(self, source: Hub, listing: Listing, files: tuple[HubFile, ...]) -> None:
        self._source, self._listing, self._files = source, listing, files
        self._total = sum(file.size for file in files)
        self._bar: Any = None
        self._begin = self._logged = time.monotonic()
        self._at_begin = 0
        self._is_quiet = not source.shows_progress

    def __enter__(self) -> "_Progress":
        self._at_begin = self._here()
        if not self._is_quiet and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            size = shutil.get_terminal_size((100, 24))  # tqdm draws nothing where a terminal says 0
            self._bar = tqdm(
                desc=f"Fetching {self._listing.repository}",
                total=self._total,
                initial=self._at_begin,
                unit="B",
                unit_scale=True,
                leave=False,
                delay=SHOW_AFTER_S,
                ncols=size.columns,
                nrows=size.lines,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _here(self) -> int:
        return sum(self._source.fetched_bytes(self._listing, file) for file in self._files)

    def look(self) -> None:
        """Show how much is here now."""
        if self._bar is not None:
            self._bar.n = self._here()
            if time.monotonic() - self._begin >= SHOW_AFTER_S:
                self._bar.refresh()
        elif not self._is_quiet and time.monotonic() - self._logged >= LOG_EVERY_S:
            self._logged = time.monotonic()
            self._log(self._here(), self._logged - self._begin)

    def _log(self, here: int, seconds: float) -> None:
        rate = max(0, here - self._at_begin) / seconds
        left = f", {(self._total - here) / rate:.0f} s left" if rate > 0 else ""
        logger.info(
            "fetching %s: %s of %s, %s a second%s",
            self._listing.repository,
            amount(here),
            amount(self._total),
            amount(rate),
            left,
        )
