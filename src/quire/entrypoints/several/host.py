"""Several models in the memory of one machine: a request's model is awake while it runs. Those that were used least recently
sleep, and end where that is too little, to make room for another.

Knows the models, their sizes and times. Knows nothing of HTTP.
"""

import asyncio
import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Literal

from quire import envs
from quire.entrypoints.several.hosted_model import HostedModel, ModelDown
from quire.entrypoints.several.models_file import ModelsFile, read_bytes
from quire.logger import init_logger

Deed = Literal["sleep", "stop"]


@dataclasses.dataclass(frozen=True)
class Occupant:
    """A model's part of the memory.

    Attributes:
        awake, asleep: bytes that it takes then; 0 without a process.
        state: `moving`: it is being started or woken, and cannot be asked to go.
        last_used: on any clock.
    """

    name: str
    state: Literal["off", "asleep", "awake", "moving"]
    awake: int
    asleep: int
    last_used: float

    @property
    def size(self) -> int:
        """What it takes now."""
        return {"off": 0, "asleep": self.asleep, "awake": self.awake, "moving": self.awake}[self.state]


def make_room(occupants: Sequence[Occupant], wanted: Occupant, budget: int) -> list[tuple[str, Deed]] | None:
    """What has to happen so that `wanted`, one of them, can be awake; None if it can only wait for others to have moved.
    A model that is larger than the budget gets all of it."""
    others = [each for each in occupants if each.name != wanted.name]
    free = budget - wanted.awake - sum(each.size for each in others)
    deeds: list[tuple[str, Deed]] = []
    by_age = sorted((each for each in others if each.state in ("awake", "asleep")), key=lambda each: each.last_used)
    for each in by_age:
        if free < 0 and each.state == "awake" and each.asleep < each.awake:
            deeds.append((each.name, "sleep"))
            free += each.awake - each.asleep
    for each in by_age:
        if free >= 0:
            break
        left = each.asleep if each.asleep < each.awake else each.size
        if left:
            deeds = [deed for deed in deeds if deed[0] != each.name]
            deeds.append((each.name, "stop"))
            free += left
    if free < 0 and any(each.state == "moving" for each in others):
        return None
    return deeds


logger = init_logger(__name__)

_SHARE = 0.9
"""Of the device's memory, what the models may take together unless the file says it."""


class ModelHost:
    """The models of one server.

    Args:
        words: flags of `quire serve` that all of them have.
        key: with which their servers are asked.
    """

    def __init__(self, file: ModelsFile, words: Sequence[str], key: str | None = None) -> None:
        self._folder = tempfile.mkdtemp(prefix="quire-", dir=envs.QUIRE_RPC_BASE_PATH)
        self._life_fd, self._my_end = os.pipe()
        self.models = [
            HostedModel(entry, words, f"{self._folder}/{number}", self._life_fd, key)
            for number, entry in enumerate(file.models)
        ]
        self._by_name = {name: model for model in self.models for name in model.entry.names}
        self._budget = read_bytes(file.memory, "memory")
        self._room = asyncio.Lock()
        self._moved = asyncio.Event()

    def find(self, name: str | None) -> HostedModel | None:
        """The model of a name; without one, the first of the file."""
        return self.models[0] if not name else self._by_name.get(name)

    async def start(self) -> None:
        """Wake the models that are to be there from the start, one after the other; one that fails is tried again on demand."""
        for model in self.models:
            if model.entry.load == "start":
                with contextlib.suppress(ModelDown):
                    await self._awake(model)

    async def close(self) -> None:
        """End all processes; running requests finish first, within limits."""
        waking = [model.waking for model in self.models if model.waking is not None]
        for task in waking:
            task.cancel()
        await asyncio.gather(*waking, return_exceptions=True)
        await asyncio.gather(*(model.stop() for model in self.models))
        os.close(self._my_end)
        for path in Path(self._folder).iterdir():
            path.unlink(missing_ok=True)
        Path(self._folder).rmdir()

    @contextlib.asynccontextmanager
    async def using(self, model: HostedModel) -> AsyncGenerator[None]:
        """While a request of a model runs. Raises ModelDown: it cannot be had now."""
        model.check()
        while model.state != "awake" or model.is_leaving:
            await self._awake(model)
            model.check()
        model.users += 1
        model.num_requests += 1
        model.idle.clear()
        try:
            yield
        finally:
            model.users -= 1
            model.last_used = time.monotonic()
            if not model.users:
                model.idle.set()

    async def put_to_sleep(self, model: HostedModel) -> None:
        """Have a model give its memory back once its requests have ended."""
        async with self._room:
            if model.state == "awake":
                await self._carry_out(model, "sleep")

    async def _awake(self, model: HostedModel) -> None:
        """Returns when a model is awake; whoever waits for it may leave, and it wakes all the same. Raises ModelDown."""
        if model.waking is None or model.waking.done():
            model.waking = asyncio.ensure_future(self._wake(model))
        await asyncio.shield(model.waking)

    async def _wake(self, model: HostedModel) -> None:
        await model.measure()
        async with self._room:
            if model.state == "awake":
                return
            await self._make_room(model)
            model.state = "moving"
        try:
            await model.wake()
        finally:
            if model.state == "moving":  # cut short, or failed in a way of its own
                await model.stop()
            model.last_used = time.monotonic()
            self._moved.set()

    async def _make_room(self, model: HostedModel) -> None:
        """Have others sleep or end until the model fits."""
        by_name = {each.name: each for each in self.models}
        while True:
            self._moved.clear()
            deeds = make_room([_occupant(each) for each in self.models], _occupant(model), self._size_of_all(model))
            if deeds is not None:
                break
            await self._moved.wait()
        for name, deed in deeds:
            await self._carry_out(by_name[name], deed)

    def _size_of_all(self, model: HostedModel) -> int:
        if self._budget is None:
            assert model.measured is not None
            self._budget = int(model.measured.total * _SHARE)
        return self._budget

    async def _carry_out(self, model: HostedModel, deed: Deed) -> None:
        model.is_leaving = True
        try:
            await model.idle.wait()
            await (model.sleep() if deed == "sleep" else model.stop())
        finally:
            model.is_leaving = False


def _occupant(model: HostedModel) -> Occupant:
    measured = model.measured
    awake, asleep = (0, 0) if measured is None else (measured.awake, measured.asleep)
    return Occupant(model.name, model.state, awake, asleep, model.last_used)
