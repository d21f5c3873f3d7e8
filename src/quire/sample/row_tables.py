"""What the device keeps of rows for longer than a step: tokens seen, edits of single logits, allowed tokens.

A row that needs one of them holds a slot of the table; tables grow and are written in the device's own order of work, so
that nothing here waits. Knows numbers; knows nothing of sampling parameters.

Legend: X slots, C seen tokens a slot, E edits a slot, W words of 32 tokens, N rows or tokens given.
"""

import numpy as np
import numpy.typing as npt
import torch

from quire.platforms.interface import DeviceMemory

IntArray = npt.NDArray[np.int32]
FIRST_SLOTS, FIRST_SEEN, FIRST_EDITS = 8, 256, 16


class _Table:
    """A table's slots: they are handed out and come back, the lowest first."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._free: list[int] = []
        self._count = 0

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._count += 1
        return self._count - 1

    def give(self, slot: int) -> None:
        """The slot is free again."""
        self._free.append(slot)


def _room(needed: int, first: int) -> int:
    """`first`, doubled until it holds what is needed."""
    size = first
    while size < needed:
        size *= 2
    return size


def _grown(old: torch.Tensor, shape: tuple[int, ...], fill: int) -> torch.Tensor:
    """A larger tensor that begins with the old one's values."""
    new = torch.full(shape, fill, dtype=old.dtype, device=old.device)
    new[tuple(slice(size) for size in old.shape)] = old
    return new


class SeenTable(_Table):
    """The distinct tokens of rows with penalties, and how often each was generated.

    The device counts its own new tokens, so the host knows only how many there can be at most.

    Attributes:
        ids_XC, counts_XC, sizes_X: int32; a slot's first `size` entries are meant.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__(memory)
        device = memory.device()
        self._data_2XC = torch.zeros((2, FIRST_SLOTS, FIRST_SEEN), dtype=torch.int32, device=device)
        self.sizes_X = torch.zeros(FIRST_SLOTS, dtype=torch.int32, device=device)
        self._most_X = np.zeros(FIRST_SLOTS, dtype=np.int64)

    @property
    def ids_XC(self) -> torch.Tensor:
        """Tokens."""
        return self._data_2XC[0]

    @property
    def counts_XC(self) -> torch.Tensor:
        """How often each was generated (0: only in the prompt)."""
        return self._data_2XC[1]

    def put(self, ids_N: IntArray, counts_N: IntArray) -> int:
        """A slot that holds these."""
        slot, count = self._take(), len(ids_N)
        self._reserve(slot + 1, count + 1)
        if count:
            self._data_2XC[:, slot, :count] = self._memory.upload(np.stack((ids_N, counts_N)))
        self.sizes_X[slot].fill_(count)
        self._most_X[slot] = count
        return slot

    def prepare_step(self, slots_N: IntArray) -> int:
        """Room for one more token in each of these slots; the most tokens that any of them holds before it."""
        longest = int(self._most_X[slots_N].max(initial=0))
        self._most_X[slots_N] += 1
        self._reserve(0, longest + 1)
        return longest

    def _reserve(self, slots: int, tokens: int) -> None:
        _, num_slots, width = self._data_2XC.shape
        if slots > num_slots or tokens > width:
            slots, tokens = _room(slots, num_slots), _room(tokens, width)
            self._data_2XC = _grown(self._data_2XC, (2, slots, tokens), 0)
            self.sizes_X = _grown(self.sizes_X, (slots,), 0)
            self._most_X = np.concatenate((self._most_X, np.zeros(slots - num_slots, dtype=np.int64)))


class EditTable(_Table):
    """Edits of single logits, as `ops.edit_logits` takes them.

    Attributes:
        ids_XE: int32, -1 where there is no edit. values_XE: float32. until_XE: int32.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__(memory)
        self._data_3XE = torch.full((3, FIRST_SLOTS, FIRST_EDITS), -1, dtype=torch.int32, device=memory.device())

    @property
    def ids_XE(self) -> torch.Tensor:
        """Tokens."""
        return self._data_3XE[0]

    @property
    def values_XE(self) -> torch.Tensor:
        """What is added."""
        return self._data_3XE[1].view(torch.float32)

    @property
    def until_XE(self) -> torch.Tensor:
        """The position from which on the token is not hidden."""
        return self._data_3XE[2]

    def put(self, ids_N: IntArray, values_N: npt.NDArray[np.float32], until_N: IntArray) -> int:
        """A slot that holds these; ids are distinct."""
        slot = self._take()
        _, slots, width = self._data_3XE.shape
        if slot >= slots or len(ids_N) > width:
            self._data_3XE = _grown(self._data_3XE, (3, _room(slot + 1, slots), _room(len(ids_N), width)), -1)
        entry_3E = np.full((3, self._data_3XE.shape[2]), -1, dtype=np.int32)
        entry_3E[:, : len(ids_N)] = ids_N, values_N.view(np.int32), until_N
        self._data_3XE[:, slot] = self._memory.upload(entry_3E)
        return slot


class AllowedTable(_Table):
    """Sets of allowed tokens, as `ops.keep_allowed` takes them.

    Attributes:
        bits_XW: int32 words.
    """

    def __init__(self, vocab_size: int, memory: DeviceMemory) -> None:
        super().__init__(memory)
        self._words = -(-vocab_size // 32)
        self.bits_XW = torch.zeros((0, self._words), dtype=torch.int32, device=memory.device())

    def put(self, ids_N: npt.NDArray[np.int64]) -> int:
        """A slot that allows these tokens."""
        slot = self._take()
        if slot >= len(self.bits_XW):
            self.bits_XW = _grown(self.bits_XW, (_room(slot + 1, FIRST_SLOTS), self._words), 0)
        is_allowed = np.zeros(self._words * 32, dtype=np.bool_)
        is_allowed[ids_N] = True
        self.bits_XW[slot] = self._memory.upload(np.packbits(is_allowed, bitorder="little").view(np.int32))
        return slot


def _aligned(count: int) -> int:
    """So many words and more, up to where a kernel may assume 256 bytes of alignment."""
    return -(-count // 64) * 64


class MaskTable:
    """One step's masks, made on the host and read by the device as `ops.keep_allowed` takes them: one copy a step.

    The memory of both sides stays where it is, for a captured draw: first the number of each batch row's mask, then masks. A
    step's masks are written only once the device has drawn all earlier steps' tokens.

    Attributes:
        numbers_R, masks_RW: on the device.
    """

    def __init__(self, max_rows: int, vocab_size: int, memory: DeviceMemory) -> None:
        self._max_rows, self._words, self._memory = max_rows, -(-vocab_size // 32), memory
        self._begin = _aligned(max_rows)
        self._host: torch.Tensor | None = None

    def reserve(self, num_masks: int, batch: int) -> tuple[IntArray, IntArray]:
        """Room for masks [num_masks, W] and for the number of each batch row's mask [batch], -1 for none."""
        if self._host is None:  # few engines ever see a grammar
            size = self._begin + self._max_rows * self._words
            self._host, self._on_device = self._memory.mirrored(size, torch.int32)
            self._array = self._host.numpy()
            self.numbers_R = self._on_device[: self._max_rows]
            self.masks_RW = self._on_device[self._begin :].view(self._max_rows, self._words)
        self._array[: self._begin].fill(-1)
        end = self._begin + num_masks * self._words
        return self._array[self._begin : end].reshape(num_masks, self._words), self._array[:batch]

    def upload(self, num_masks: int) -> None:
        """The first masks and all numbers go to the device, in order with its work."""
        assert self._host is not None
        if self._on_device is self._host:
            return
        size = self._begin + num_masks * self._words
        self._on_device[:size].copy_(self._host[:size], non_blocking=True)
