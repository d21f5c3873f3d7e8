"""Who computes the items of prompts: the step that needs them or, on a device that works beside the host, a thread with a queue
of its own, so that other steps go on meanwhile.

All that runs on such a device's encoders runs in that thread, one batch after another. A batch is awaited before it is handed
to the steps, so that these wait for nothing on the device. Knows items and towers; knows no rows and no places.

Legend: E rows of an item, D columns of an embedding.
"""

import concurrent.futures
import contextlib
from collections.abc import Collection, Mapping, Sequence

import torch

from quire.distributed.communicator import Communicator
from quire.errors import EngineError
from quire.layers.tower import Tower
from quire.logger import init_logger
from quire.media import AUDIO, EMBEDS, MediaItem, in_batches
from quire.platforms.interface import DeviceRuntime
from quire.processes import yielding
from quire.worker.item_shares import ItemShares

logger = init_logger(__name__)

TOGETHER = 1024
"""Embeddings of a batch beside the steps: enough to keep a device busy, and few, so that the first of several items is not held
up by the others."""


class ItemEncoder:
    """The items that wait to be computed, and the embeddings of those that were.

    Args:
        towers: by what they read.
        scale: of embeddings that users give.
        most_at_once: embeddings that a step has computed together.
        like: of the type, the width and the device that embeddings have.
        ranks: those that divide the items among themselves; a single one: this rank computes all.
        is_beside: the device works beside the host.
    """

    def __init__(
        self,
        towers: Mapping[str, Tower],
        scale: float,
        most_at_once: int,
        like: torch.Tensor,
        runtime: DeviceRuntime,
        ranks: Communicator,
        *,
        is_beside: bool,
    ) -> None:
        self._towers, self._scale, self._most, self._like = towers, scale, most_at_once, like
        self._runtime, self._shares = runtime, ItemShares(ranks)
        self._waiting: dict[str, MediaItem] = {}
        self._embeddings: dict[str, torch.Tensor] = {}
        self._computed: dict[str, torch.Tensor] = {}
        """What the thread has computed and the steps have not taken in yet."""
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        if is_beside:
            entered = (runtime, contextlib.ExitStack())
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "encoder", _go_beside, entered)

    @property
    def is_beside(self) -> bool:
        """Whether `begin` computes beside the steps."""
        return self._thread is not None

    def __getitem__(self, key: str) -> torch.Tensor:
        """An item's embeddings [E, D], after `need`."""
        return self._embeddings[key]

    def take(self, items: Sequence[MediaItem]) -> None:
        """Items that this step or a later one needs."""
        self._waiting.update((item.key, item) for item in items)
        self._shares.divide(items)

    def drop(self, keys: Collection[str]) -> None:
        """These are not needed any more."""
        self._shares.drop(keys)
        for key in keys:
            for kept in (self._embeddings, self._waiting, self._computed):
                kept.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._shares.drop(list(self._waiting) + list(self._embeddings))
        self._waiting.clear()
        self.settle()
        self._embeddings.clear()
        self._computed.clear()

    def begin(self, items: Sequence[MediaItem]) -> "concurrent.futures.Future[None]":
        """Compute this rank's items beside the steps. The future has no error: what cannot be had waits for the step that needs
        it."""
        assert self._thread is not None
        self.take(items)
        mine = [item.key for item in items if self._shares.is_mine(item.key)]
        return self._thread.submit(self._compute_beside, mine)

    def settle(self) -> None:
        """Wait until nothing is computed beside the steps."""
        if self._thread is not None:
            self._thread.submit(int).result()

    def stop(self) -> None:
        """The engine ends: begin nothing more."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for the thread's end, after `stop`."""
        if self._thread is not None:
            self._thread.shutdown()

    def need(self, keys: Collection[str]) -> None:
        """Have these computed: what nobody has computed is, now. Ranks that divide items need the same ones in the same order.

        Raises:
            EngineError: an encoder gave another number of rows than an item has places.
        """
        self._take_in()
        missing = [key for key in keys if key in self._waiting and self._shares.is_mine(key)]
        if missing and self._thread is not None:
            self._thread.submit(self._compute, missing, self._most).result()
        elif missing:
            self._compute(missing, self._most)
        self._take_in()
        gathered = self._shares.gather(keys, self._embeddings, self._like)
        self._embeddings.update(gathered)
        for key in gathered:
            self._waiting.pop(key, None)

    def _take_in(self) -> None:
        """Let steps read what was computed, unless it was dropped meanwhile."""
        for key in list(self._computed):
            if self._waiting.pop(key, None) is not None:
                self._embeddings[key] = self._computed[key]
                self._runtime.reads(self._embeddings[key])
            del self._computed[key]

    def _compute_beside(self, keys: Sequence[str]) -> None:
        try:
            self._compute(keys, TOGETHER)
        except Exception as error:  # the step that needs the item meets it again
            logger.warning("items could not be encoded beside the steps (%s: %s)", type(error).__name__, error)

    def _compute(self, keys: Sequence[str], most: int) -> None:
        """In the thread, where there is one."""
        left = (self._waiting.get(key) for key in keys if key not in self._computed)
        for batch in in_batches((item for item in left if item is not None), lambda item: item.num_embeds, most):
            with yielding():
                embeddings = self._encode(batch)
            if self._thread is not None:
                done = self._runtime.event()
                done.record()
                done.wait()
            self._computed.update(embeddings)

    def _encode(self, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
        embeddings: dict[str, torch.Tensor] = {}
        read: dict[str, list[MediaItem]] = {}
        for item in items:
            if EMBEDS in item.tensors:
                embeddings[item.key] = self._given(item)
            else:
                read.setdefault(item.modality, []).append(item)
        for modality, each in read.items():
            arrays = [{name: tensor.to_array() for name, tensor in item.tensors.items()} for item in each]
            encoded = self._towers[modality].encode(arrays)
            whole = map(self._padded, encoded) if modality == AUDIO else encoded
            embeddings |= {item.key: _checked(item, own) for item, own in zip(each, whole, strict=True)}
        return embeddings

    def _given(self, item: MediaItem) -> torch.Tensor:
        """Embeddings that a user gave, on the device; nothing of them joins behind the first layers."""
        given_ED = torch.tensor(item.tensors[EMBEDS].to_array(), dtype=self._like.dtype) * self._scale
        return self._padded(given_ED).to(self._like.device)

    def _padded(self, rows_ED: torch.Tensor) -> torch.Tensor:
        """Of sounds nothing joins behind the first layers either."""
        return torch.nn.functional.pad(rows_ED, (0, self._like.shape[1] - rows_ED.shape[1]))


def _go_beside(runtime: DeviceRuntime, entered: contextlib.ExitStack) -> None:
    """The thread begins. It must not know the encoder, which it would keep alive."""
    runtime.adopt_thread()
    entered.enter_context(runtime.beside_steps())


def _checked(item: MediaItem, embeddings_ED: torch.Tensor) -> torch.Tensor:
    if len(embeddings_ED) != item.num_embeds:
        raise EngineError(
            f"an item has {item.num_embeds} places in its prompt, and the encoder gave {len(embeddings_ED)} embeddings"
        )
    return embeddings_ED
