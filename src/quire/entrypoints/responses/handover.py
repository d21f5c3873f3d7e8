"""Background responses that a server leaves to its successor: each in a file of a folder, with its tokens and events so far.

A file is there whole or not at all, and goes when its response has been kept. One server at a time uses a folder.
"""

import asyncio
import os
import tempfile
from pathlib import Path

import msgspec

from quire.entrypoints.database import Missing
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.responses.prepare import prepare_response
from quire.entrypoints.responses.run import BackgroundRun, LeftResponse
from quire.errors import refusing
from quire.logger import init_logger
from quire.metrics.events import EventKind

logger = init_logger(__name__)

_SUFFIX = ".response.json"


class Handover:
    """One server's part of it.

    Args:
        folder: made if need be; only its owner may enter it.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, state: ServerState, folder: str) -> None:
        self._state, self._folder = state, Path(folder)
        with refusing(OSError, setting="handover", what=f"handover: {folder!r} cannot be used"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files = sorted(self._folder.glob(f"*{_SUFFIX}"))
        state.handed_over = {file.name.removesuffix(_SUFFIX) for file in files}

    async def leave(self) -> None:
        """Stop all background responses and write them down."""
        runs = [run for run in self._state.background.values() if isinstance(run, BackgroundRun)]
        left = [one for run in runs if (one := await run.leave()) is not None]
        for one in left:
            await asyncio.to_thread(self._write, one)
            self._note(f"response {one.response.id} is left to the next server behind its {len(one.token_ids)} tokens")
        if left:
            logger.info("%d background response(s) are left to the next server in %s.", len(left), self._folder)

    async def pick_up(self) -> None:
        """Go on with what the last server left."""
        for response_id in sorted(self._state.handed_over):
            try:
                await self._restore(response_id)
            except Missing:  # deleted meanwhile
                self._file(response_id).unlink(missing_ok=True)
            except Exception:
                logger.exception("Response %s cannot be picked up; its file stays.", response_id)
            finally:
                self._state.handed_over.discard(response_id)

    async def _restore(self, response_id: str) -> None:
        file = self._file(response_id)
        left = msgspec.json.decode(await asyncio.to_thread(file.read_bytes), type=LeftResponse)
        await self._state.responses.get(response_id)
        job = await prepare_response(self._state, left.request)
        job.restore(left)
        run = BackgroundRun(job, left.events)
        run.on_kept = file.unlink
        await run.start()
        logger.info("Response %s goes on behind its %d tokens.", response_id, len(left.token_ids))
        self._note(f"response {response_id} goes on here behind its {len(left.token_ids)} tokens")

    def _note(self, text: str) -> None:
        """Have the console and the metrics tell of it."""
        self._state.engine.events.add(EventKind.HANDOVER, text)

    def _file(self, response_id: str) -> Path:
        return self._folder / f"{response_id}{_SUFFIX}"

    def _write(self, left: LeftResponse) -> None:
        """Durably: the file's content and its name are on the disk."""
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(msgspec.json.encode(left))
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, self._file(left.response.id))
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
