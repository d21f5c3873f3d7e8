"""Servers that can take one another's requests: which of them are up, and which has the least to compute for a prompt.

Knows health and loads. Knows nothing of what is asked.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from quire.engine.replica_choice import Assignment, ReplicaChooser
from quire.entrypoints.http.backend_link import BackendGone, exchange
from quire.entrypoints.http_client import Target
from quire.logger import init_logger

logger = init_logger(__name__)

CHECK_TIMEOUT_S = 5.0


@dataclasses.dataclass(slots=True)
class Replica:
    """A server behind the router. Attributes: is_up: it answered last; the others count requests that it was given, and how often
    it failed."""

    target: Target
    is_up: bool = True
    num_requests: int = 0
    num_failures: int = 0


class ReplicaPool:
    """Some servers.

    Args:
        piece_tokens: what one of a prompt's keys stands for.
        by_prefix: a prompt's cached beginning counts; else the load alone.
    """

    def __init__(self, targets: Sequence[Target], piece_tokens: int, *, by_prefix: bool = True) -> None:
        self.replicas = [Replica(target) for target in targets]
        self.chooser = ReplicaChooser(len(targets), by_prefix=by_prefix)
        self._piece_tokens = piece_tokens

    async def watch(self, number: int, every_s: float) -> None:
        """Ask a replica's health again and again."""
        while True:
            await self.check_once(number)
            await asyncio.sleep(every_s)

    async def check_once(self, number: int) -> None:
        """Ask a replica's health."""
        try:
            async with (
                asyncio.timeout(CHECK_TIMEOUT_S),
                exchange(self.replicas[number].target, "GET", "/health", [], b"") as answer,
            ):
                self.note(number, "" if answer.status < 400 else f"/health answers {answer.status}")
        except (BackendGone, TimeoutError) as error:
            self.note(number, str(error) or "no answer to /health")

    def note(self, number: int, problem: str) -> None:
        """How a replica stands: empty, or why it gets no requests."""
        replica = self.replicas[number]
        if problem and replica.is_up:
            logger.warning("%s gets no requests: %s", replica.target.url, problem)
            replica.num_failures += 1
            self.chooser.forget(number)
        elif not problem and not replica.is_up:
            logger.info("%s gets requests again", replica.target.url)
        replica.is_up = not problem

    def choose(self, keys: Sequence[int], num_tokens: int, tried: set[int]) -> Assignment | None:
        """The replica for a prompt, of those that were not tried; None: all were."""
        usable = [number for number, replica in enumerate(self.replicas) if replica.is_up and number not in tried]
        if not usable:  # what is down may be back: better asked than refused
            usable = [number for number in range(len(self.replicas)) if number not in tried]
        if not usable:
            return None
        chosen = self.chooser.choose(keys, self._piece_tokens, num_tokens, usable)
        self.replicas[chosen.replica].num_requests += 1
        return chosen

    def describe(self) -> list[dict[str, Any]]:
        """How the replicas stand."""
        return [
            {
                "url": replica.target.url,
                "is_up": replica.is_up,
                "requests": replica.num_requests,
                "failures": replica.num_failures,
                "open_requests": load.num_requests,
                "waiting_tokens": load.num_tokens,
            }
            for replica, load in zip(self.replicas, self.chooser.loads, strict=True)
        ]
