"""The other processes of one server (`--api-server-count`): asking them for their figures, and adding those up.

Each process listens on a private Unix socket besides the public port. Knows Prometheus' text format.
"""

import asyncio
import operator
from collections.abc import Callable, Sequence

from quire.entrypoints.http.backend_link import ask_within
from quire.entrypoints.http_client import Target

ANSWER_WITHIN_S = 2.0
"""A process that does not answer by then is left out: it is starting, or its event loop is busy."""
OWN = "own"
"""The query parameter that asks a process for its own figures alone."""

_COUNTED_BY_ALL = (b":engine_restarts_total", b":engine_hangs_total")
"""Families that every process counts: all of them see the one engine core."""
_Family = tuple[list[bytes], dict[bytes, bytes | float]]
"""A family's comments, and its samples: name with labels, and value."""


class Siblings:
    """The other processes of this server.

    Args:
        paths: their private sockets.
        api_key: a key that opens every route, if keys are needed.
    """

    def __init__(self, paths: Sequence[str], api_key: str | None) -> None:
        self._targets = [Target("sibling", 0, uds=path) for path in paths]
        self._headers = [(b"Authorization", f"Bearer {api_key}".encode())] if api_key else []

    async def ask(self, path: str) -> list[bytes]:
        """What each of them answers to a GET; those that do not answer with 200 are left out."""
        return [answer for answer in await self._send("GET", path) if answer is not None]

    async def tell(self, path: str, body: bytes) -> None:
        """POST this to each of them."""
        await self._send("POST", path, body)

    async def _send(self, method: str, path: str, body: bytes = b"") -> list[bytes | None]:
        own, headers = f"{path}?{OWN}=1", self._headers
        asked = (ask_within(ANSWER_WITHIN_S, target, method, own, headers, body) for target in self._targets)
        return await asyncio.gather(*asked)


def merge_metrics(own: bytes, others: Sequence[bytes]) -> bytes:
    """Our figures with the others' added: counts, sums, buckets and gauges of work, also those that only another process has
    (a route or a tenant that we have not met). What a process tells of itself (`process_`, `python_`) and of its settings
    (`_info`) stays as it is here, if it is here; of what all of them count alike, the largest counts."""
    families = _families(own)
    for text in others:
        for family, (head, theirs) in _families(text).items():
            is_new = family not in families
            ours = families.setdefault(family, (head, {}))[1]
            for name, value in theirs.items():
                if join := _joined_by(name.partition(b"{")[0]):
                    ours[name] = join(float(ours.get(name, 0.0)), float(value))
                elif is_new:
                    ours[name] = value
    lines: list[bytes] = []
    for head, samples in families.values():
        lines += head
        lines += [b"%b %b" % (name, _as_text(value)) for name, value in samples.items()]
    return b"\n".join(lines) + b"\n"


def _families(text: bytes) -> dict[bytes, _Family]:
    """The families of a text by name, in their order; a value stays as it is written until something is added to it."""
    families: dict[bytes, _Family] = {}
    head, samples = families.setdefault(b"", ([], {}))
    for line in text.splitlines():
        if line.startswith(b"#"):
            family = line.split(b" ", 3)[2]
            head, samples = families.setdefault(family, ([], {}))
            head.append(line)
        elif line:
            name, _, value = line.rpartition(b" ")
            samples[name] = value
    return families


def _joined_by(name: bytes) -> Callable[[float, float], float] | None:
    """How two processes' values of a figure become one; None where ours stays."""
    if name.startswith((b"process_", b"python_")) or name.endswith((b"_info", b"_created")):
        return None
    return max if name.endswith(_COUNTED_BY_ALL) else operator.add


def _as_text(value: bytes | float) -> bytes:
    return value if isinstance(value, bytes) else repr(value).encode()
