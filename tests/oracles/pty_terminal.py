"""A program in a terminal of its own: what it shows, what is typed, how it ends."""

import os
import pty
import select
import time


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.execve(command[0], command, {**os.environ, "TERM": "xterm", **environment})
        self.screen = ""
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Until the screen shows a text after the last one that was waited for."""
        assert self._reads(text, seconds), f"{text!r} never came:\n{self.screen}"
        self._seen = self.screen.find(text, self._seen) + len(text)

    def interrupt(self, until_shown: str) -> None:
        """Ctrl-C, again each second until the screen shows a text: one that arrives just before a read is not noticed."""
        self.type("\x03")
        while not self._reads(until_shown, 1.0):
            self.type("\x03")
        self.wait_for(until_shown)

    def _reads(self, text: str, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self.screen.find(text, self._seen) < 0:
            if time.monotonic() >= until:
                return False
            if select.select([self._fd], [], [], 0.2)[0]:
                self.screen += os.read(self._fd, 65536).decode("utf-8", "replace")
        return True

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
