"""The other processes of one server (`--api-server-count`): asking them for their figures, and adding those up.

Each process listens on a private Unix socket besides the public port. Knows HTTP and Prometheus' text format.
"""

import asyncio
from collections.abc import Sequence

ANSWER_WITHIN_S = 2.0
"""A process that does not answer by then is left out: it is starting, or its event loop is busy."""
OWN = "own"
"""The query parameter that asks a process for its own figures alone."""


class Siblings:
    """The other processes of this server.

    Args:
        paths: their private sockets.
        api_key: a key that opens every route, if keys are needed.
    """

    def __init__(self, paths: Sequence[str], api_key: str | None) -> None:
        self._paths = tuple(paths)
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def ask(self, path: str) -> list[bytes]:
        """What each of them answers to a GET; those that do not answer with 200 are left out."""
        answers = await asyncio.gather(*(self._get(socket, path) for socket in self._paths))
        return [answer for answer in answers if answer is not None]

    async def _get(self, socket: str, path: str) -> bytes | None:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                reader, writer = await asyncio.open_unix_connection(socket)
                try:
                    head = f"GET {path}?{OWN}=1 HTTP/1.1\r\nHost: sibling\r\n{self._key}Connection: close\r\n\r\n"
                    writer.write(head.encode())
                    answer = await reader.read(-1)
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return None
        status, _, body = answer.partition(b"\r\n\r\n")
        return body if status.split(b" ", 2)[1:2] == [b"200"] else None


def merge_metrics(own: bytes, others: Sequence[bytes]) -> bytes:
    """Our figures with the others' added: counts, sums, buckets and gauges of work. What a process tells of itself
    (`process_`, `python_`) and of its settings (`_info`) stays as it is here."""
    added: dict[bytes, float] = {}
    for text in others:
        for line in text.splitlines():
            name, _, value = line.rpartition(b" ")
            if name and not line.startswith(b"#") and _adds_up(name):
                added[name] = added.get(name, 0.0) + float(value)
    lines: list[bytes] = []
    for line in own.splitlines():
        name, _, value = line.rpartition(b" ")
        if name in added and not line.startswith(b"#"):
            line = b"%b %b" % (name, repr(float(value) + added.pop(name)).encode())
        lines.append(line)
    return b"\n".join(lines) + b"\n"


def _adds_up(name: bytes) -> bool:
    family = name.partition(b"{")[0]
    return not (family.startswith((b"process_", b"python_")) or family.endswith((b"_info", b"_created")))
