"""What adapters add to the product of a matrix: low-rank updates of many adapters in one batch.

A row (token) has a slot; slot 0 means no adapter. An update is two thin products: `adapter_shrink` brings a row down to its
adapter's rank, `adapter_expand` brings it up to the matrix's outputs. Kernels read the slots, and where each slot's numbers are,
from memory of the device: a step that was recorded serves any adapters.

Legend: T rows, K inputs and N outputs of a matrix, L slots, R rank, S segments, H numbers of a row between both products,
P parts of sums, F matrices of one shape.
"""

import dataclasses

import torch
from torch import Tensor

from quire.kernels.registry import operation

FIELDS = ("down", "up", "rank", "segments", "gain", "shift")
"""What is known of a slot, in the order of `AdapterTable.entries_FL`."""


@dataclasses.dataclass
class AdapterPart:
    """What one adapter does to one matrix, or to each of several of one shape.

    Attributes:
        down: [S * R, K], the segments one below the other; of an embedding [K, R], a row for each token. Of several matrices
            [F, S * R, K], or the same for all.
        up: [R, N]; each output has its segment's numbers, with the adapter's scale. Of several matrices [F, R, N], or the same.
        segments: bit s is set where segment s is updated.
        gain, shift: float32 [N]; outputs are multiplied by the gain, then the shift and the update are added. None: 1 and 0.
        magnitude: float32 [N], of DoRA: the rows of matrix and update together are to get these lengths. Before it is used, gain
            and `up` have to be made of it.
        tokens: int32, whose rows of an embedding are to become those of `up`. Before it is used, the base's rows have to be
            subtracted from them.
    """

    down: Tensor
    up: Tensor
    segments: int
    gain: Tensor | None = None
    shift: Tensor | None = None
    magnitude: Tensor | None = None
    tokens: Tensor | None = None

    @property
    def rank(self) -> int:
        """R."""
        return self.up.shape[-2]

    def of(self, number: int) -> "AdapterPart":
        """That of one of several matrices."""
        down, up = (tensor[number] if tensor.ndim == 3 else tensor for tensor in (self.down, self.up))
        return dataclasses.replace(self, down=down, up=up)

    def to(self, dtype: torch.dtype) -> "AdapterPart":
        """The same with an update in this type."""
        if self.down.dtype == self.up.dtype == dtype:
            return self
        return dataclasses.replace(self, down=self.down.to(dtype), up=self.up.to(dtype))

    def entries(self, fan: int) -> list[list[int]]:
        """`FIELDS` of a slot that has it, for each of so many matrices."""
        gain, shift = (0 if tensor is None else tensor.data_ptr() for tensor in (self.gain, self.shift))
        parts = (self.of(number) for number in range(fan))
        return [[part.down.data_ptr(), part.up.data_ptr(), self.rank, self.segments, gain, shift] for part in parts]


@dataclasses.dataclass
class AdapterTable:
    """All adapters' parts of one matrix, by slot.

    A segment is what one matrix of a checkpoint gave to ours (q, k and v): it has a low-rank update of its own.

    Attributes:
        entries_FL: int64 [6, L], `FIELDS` of each slot: addresses, or 0 for nothing. A slot of rank 0 changes nothing.
        tiles_X3: int32: outputs of one segment, (segment, first, count), at most `TILE` of them.
        num_segments: S.
        dtype: of what the addresses point to.
        parts: by slot, the tensors that the addresses point to.
        has_gains: some part has one, so that outputs have to be alone before the update.
        most_ranks, most_adapters: no slot has a larger rank, and no batch more adapters.
        fan: F matrices of one shape (experts, or heads), each with slots of its own: matrix f of slot l is slot l * F + f here.
            A batch has slots 0 to F - 1 for rows without an adapter.
    """

    entries_FL: Tensor
    tiles_X3: Tensor
    num_segments: int
    dtype: torch.dtype
    parts: list[AdapterPart | None]
    has_gains: bool = False
    most_ranks: int = 512
    most_adapters: int = 1 << 16
    fan: int = 1

    def part(self, slot: int) -> AdapterPart | None:
        """What a slot has."""
        part = self.parts[slot // self.fan]
        return part if part is None or self.fan == 1 else part.of(slot % self.fan)


TILE = 64
"""Most outputs of a tile."""


@dataclasses.dataclass
class AdapterRows:
    """Which adapter each row of a step has.

    Attributes:
        slots_T: int32.
        order_T: int32; rows with an adapter, those of one slot side by side. groups_G3: int32, (slot, first place in the order,
            rows) of up to `GROUP` of them; a count of 0 behind the last one. For devices that take rows together; else None.
        is_exact: there are as many groups as are to be looked at.
    """

    slots_T: Tensor
    order_T: Tensor | None = None
    groups_G3: Tensor | None = None
    is_exact: bool = False

    def most_groups(self, table: AdapterTable, count: int) -> int:
        """Groups that so many rows may have: each adapter has one that is not full, at most."""
        assert self.groups_G3 is not None
        if self.is_exact:
            return len(self.groups_G3)
        return min(count, -(-count // GROUP) + table.most_adapters, len(self.groups_G3))

    def of_heads(self, table: AdapterTable, count: int) -> "AdapterRows":
        """Rows of which each of `count` tokens has one for each of the table's matrices, side by side."""
        fan = table.fan
        numbers_F = torch.arange(fan, dtype=torch.int32, device=self.slots_T.device)
        slots_TF = self.slots_T[:count, None] * fan + numbers_F
        slots_X = torch.where(self.slots_T[:count, None] > 0, slots_TF, 0).flatten().to(torch.int32)
        if self.groups_G3 is None or self.order_T is None:
            return AdapterRows(slots_X)
        order_FT = self.order_T[None, :count] * fan + numbers_F[:, None]
        slot_G, first_G, size_G = self.groups_G3[: self.most_groups(table, count)].unbind(1)
        groups_3FG = (slot_G * fan + numbers_F[:, None], first_G + numbers_F[:, None] * count, size_G.expand(fan, -1))
        groups_X3 = torch.stack([part.flatten() for part in groups_3FG], dim=1)
        return AdapterRows(slots_X, order_FT.flatten(), groups_X3, is_exact=True)

    def of_one(self, index_S: Tensor, table: AdapterTable, number: int) -> "AdapterRows":
        """These rows, for one of the table's matrices; each is a group by itself."""
        slots_S = self.slots_T[index_S]
        slots_S = torch.where(slots_S > 0, slots_S * table.fan + number, 0).to(torch.int32)
        if self.groups_G3 is None:
            return AdapterRows(slots_S)
        order_S = torch.arange(len(slots_S), dtype=torch.int32, device=slots_S.device)
        groups_S3 = torch.stack((slots_S, order_S, (slots_S > 0).to(torch.int32)), dim=1)
        return AdapterRows(slots_S, order_S, groups_S3, is_exact=True)


GROUP = 16
"""Most rows of a group."""


@operation
def adapter_shrink(x_TK: Tensor, rows: AdapterRows, table: AdapterTable, out_PTH: Tensor) -> None:
    """out[0, t, :S * R] = x[t] @ down.T of the row's adapter, in float32. Of segments that it does not update, of rows without
    one, and behind S * R numbers, `out` may have anything; its other parts are room for parts of sums."""
    for slot, index in _by_slot(rows, len(x_TK)):
        part = table.part(slot)
        if part is not None:
            out_PTH[0, index, : len(part.down)] = x_TK[index].float() @ part.down.float().T


@operation
def adapter_lookup(ids_T: Tensor, rows: AdapterRows, table: AdapterTable, out_PTH: Tensor) -> None:
    """out[0, t, :R] = down[ids[t]] of the row's adapter of an embedding; ids are int32."""
    for slot, index in _by_slot(rows, len(ids_T)):
        part = table.part(slot)
        if part is not None:
            out_PTH[0, index, : part.rank] = part.down[ids_T[index].long()].float()


@operation
def adapter_expand(h_PTH: Tensor, rows: AdapterRows, table: AdapterTable, out_TN: Tensor, scale: float = 1.0) -> None:
    """out[t, n] = out[t, n] * gain[n] + shift[n] + scale * sum over r of h[0, t, s * R + r] * up[r, n], with the row's
    adapter and the output's segment s."""
    for slot, index in _by_slot(rows, len(out_TN)):
        part = table.part(slot)
        if part is None:
            continue
        out = out_TN[index].float()
        if part.gain is not None and part.shift is not None:
            out = out * part.gain + part.shift
        up, rank = part.up.float(), part.rank
        for segment, first, count in table.tiles_X3.tolist():
            if part.segments >> segment & 1:
                h = h_PTH[0, index, segment * rank : (segment + 1) * rank]
                out[:, first : first + count] += scale * (h @ up[:, first : first + count])
        out_TN[index] = out.to(out_TN.dtype)


def _by_slot(rows: AdapterRows, count: int) -> list[tuple[int, Tensor]]:
    """Each adapter's slot and rows."""
    slots_T = rows.slots_T[:count]
    return [(slot, (slots_T == slot).nonzero()[:, 0]) for slot in slots_T.unique().tolist() if slot]
