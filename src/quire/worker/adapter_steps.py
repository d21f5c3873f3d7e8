"""Adapters in a runner's steps: which row has which, and what the products of a step are told about it.

A step none of whose rows has an adapter is told nothing, and runs as if there were no adapters. Knows rows and slots; what is in
a slot is known by the store.

Legend: T tokens of the step, S tokens that need logits, B requests, R rows, G groups of rows with one slot.
"""

from typing import Any

import numpy as np
import torch

from quire.config.engine import EngineConfig
from quire.config.hub.listing import HubSettings
from quire.core.output import IntArray, SchedulerOutput
from quire.errors import ConfigError
from quire.kernels.adapters import GROUP, AdapterRows
from quire.layers.decoder import Decoder
from quire.layers.pooling.head import PoolingHead
from quire.lora.method import AdaptedProducts
from quire.lora.placement import Places
from quire.lora.random_adapter import write_random_adapter
from quire.lora.store import AdapterStore
from quire.platforms.interface import DeviceRuntime

NUM_BUFFERS = 4
"""Host copies of a device's buffer: as many as `device_inputs` has packets."""


def max_groups(rows: int, num_slots: int) -> int:
    """Groups that so many rows can have."""
    return min(rows, -(-rows // GROUP) + num_slots)


class _Part:
    """The part of a buffer that describes some rows: their slots, their order, their groups."""

    def __init__(self, start: int, most: int, num_slots: int) -> None:
        self.slots = slice(start, start + most)
        self.order = slice(self.slots.stop, self.slots.stop + most)
        self.groups = slice(self.order.stop, self.order.stop + 3 * max_groups(most, num_slots))

    def rows_in(self, buffer: torch.Tensor, *, is_grouped: bool) -> AdapterRows:
        """As products read it."""
        if not is_grouped:
            return AdapterRows(buffer[self.slots])
        return AdapterRows(buffer[self.slots], buffer[self.order], buffer[self.groups].view(-1, 3))

    def fill(self, array: IntArray, slots: IntArray, *, is_grouped: bool) -> None:
        """Describe rows with these slots."""
        array[self.slots][: len(slots)] = slots
        if is_grouped:
            array[self.slots][len(slots) :] = 0
            order, groups = _group(slots)
            array[self.order][: len(order)] = order
            places = array[self.groups]
            places[: groups.size] = groups.ravel()
            places[groups.size :] = 0


def _group(slots: IntArray) -> tuple[IntArray, IntArray]:
    """Rows with an adapter, slot by slot, and groups of them: (slot, first place, rows)."""
    order = np.argsort(slots, kind="stable")
    order = order[np.searchsorted(slots[order], 1) :].astype(np.int32)
    found, first, count = np.unique(slots[order], return_index=True, return_counts=True)
    each = -(-count // GROUP)
    number = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    start = np.repeat(first, each) + number * GROUP
    sizes = np.minimum(np.repeat(first + count, each) - start, GROUP)
    return order, np.stack([np.repeat(found, each), start, sizes], axis=1).astype(np.int32)


class AdapterSteps:
    """Adapters of a runner.

    Args:
        is_grouped: the device takes rows of one adapter together.
        head: of a pooling model.

    Attributes:
        is_wanted: whether the prepared step has adapters.
        store: what is in the slots.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Any,
        runtime: DeviceRuntime,
        max_rows: int,
        max_tokens: int,
        *,
        is_grouped: bool,
        head: PoolingHead | None = None,
    ) -> None:
        assert config.lora is not None
        method = getattr(model, "linear_method", None)
        if not isinstance(model, Decoder) or not isinstance(method, AdaptedProducts):
            raise ConfigError("enable_lora: adapters need a model with a spec", setting="enable_lora")
        self._adapters, self._is_grouped, self._device = method.adapters, is_grouped, runtime.device()
        num_slots = 1 + config.lora.num_slots(max_rows)
        max_logits = config.max_logits if config.model.pooling is None else max_rows
        self._slot_R: IntArray = np.zeros(max_rows, dtype=np.int32)
        self._virtual_R: IntArray = np.zeros(max_rows, dtype=np.int32)
        self._slots_T: IntArray = np.zeros(0, dtype=np.int32)
        self._tokens = _Part(0, max_tokens, num_slots)
        self._samples = _Part(self._tokens.groups.stop, max_logits, num_slots)
        size = self._samples.groups.stop
        hosts = NUM_BUFFERS if is_grouped else 1
        self._hosts = [runtime.pinned(torch.zeros(size, dtype=torch.int32)) for _ in range(hosts)]
        self._next = 0
        buffer = torch.zeros(size, dtype=torch.int32, device=self._device) if is_grouped else self._hosts[0]
        self._buffer = buffer
        self._adapters.tokens = self._tokens.rows_in(buffer, is_grouped=is_grouped)
        self._adapters.samples = self._samples.rows_in(buffer, is_grouped=is_grouped)
        self._dtype = model.dtype
        self._places = Places(
            model.spec,
            model.sources,
            model.plan,
            lambda module: model.linear(module).bias,
            model.fixed,
            has_whole_head=model.has_whole_head,
            max_positions=model.max_positions,
        )
        hub = HubSettings(cache=config.load.download_dir, token=config.load.hf_token)
        sizes = (num_slots, max_tokens)
        self.store = AdapterStore(config.lora, self._adapters, self._places, model, runtime, *sizes, hub, head)
        self._expected = config.lora.expected(max_rows)
        self._adapters.is_deterministic = config.model.deterministic
        self.is_wanted = False

    def apply_diff(self, plan: SchedulerOutput) -> None:
        """Rows come and go."""
        for row in plan.finished_rows:
            self._slot_R[row] = self._virtual_R[row] = 0
        for request in plan.new_requests:
            self._slot_R[request.row] = request.adapter_slot
            if request.adapter_slot:
                self.store.settle(request.adapter_slot)
                self._virtual_R[request.row] = self.store.num_virtual(request.adapter_slot)

    def head(self, row: int) -> PoolingHead | None:
        """A pooling model's head of a row's adapter, if that has its own."""
        return self.store.heads[self._slot_R[row]]

    @property
    def can_replay(self) -> bool:
        """Whether a step with adapters can be recorded, or captured as a graph."""
        return self._adapters.can_replay

    def begin(self, plan: SchedulerOutput, computed_R: IntArray, *, is_prepared: bool) -> bool:
        """Whether a step has adapters; its products then are those with adapters.

        Args:
            computed_R: how many tokens of each row count as computed. `is_prepared`: those of the step among them.
        """
        slot_B, virtual_B = self._slot_R[plan.rows], self._virtual_R[plan.rows]
        is_wanted = bool(slot_B.any())
        if is_wanted:
            counts_B = plan.num_scheduled_tokens
            self._slots_T = np.repeat(slot_B, counts_B)
            if virtual_B.any():  # such an adapter changes these tokens and nothing behind them
                starts_B = computed_R[plan.rows] - (counts_B if is_prepared else 0)
                first_B = np.cumsum(counts_B) - counts_B
                positions_T = np.arange(len(self._slots_T)) + np.repeat(starts_B - first_B, counts_B)
                virtual_T = np.repeat(virtual_B, counts_B)
                self._slots_T[(virtual_T > 0) & (positions_T >= virtual_T)] = 0
                is_wanted = bool(self._slots_T.any())
        self.is_wanted = self._adapters.is_active = is_wanted
        return is_wanted

    def prepare(self, rows_S: IntArray) -> None:
        """Tell the products of the step that has begun, of whose rows these need logits, what adapters its rows have."""
        if not self.is_wanted:
            return
        host = self._hosts[self._next]
        self._next = (self._next + 1) % len(self._hosts)
        array: IntArray = host.numpy()
        self._tokens.fill(array, self._slots_T, is_grouped=self._is_grouped)
        slots_S = np.where(self._virtual_R[rows_S] > 0, 0, self._slot_R[rows_S])
        self._samples.fill(array, slots_S, is_grouped=self._is_grouped)
        if self._is_grouped:
            self._buffer.copy_(host, non_blocking=True)

    def tell_samples(self, row: int, count: int) -> None:
        """The logits that are computed next, so many, are all of one row, whichever the prepared step has."""
        slot = 0 if self._virtual_R[row] else int(self._slot_R[row])
        self.is_wanted = self._adapters.is_active = slot > 0
        if slot:
            array: IntArray = np.zeros(len(self._buffer), dtype=np.int32)
            self._samples.fill(array, np.full(count, slot, dtype=np.int32), is_grouped=self._is_grouped)
            part = slice(self._samples.slots.start, self._samples.groups.stop)
            self._buffer[part].copy_(torch.from_numpy(array[part]))

    def limit(self, logits_SV: torch.Tensor) -> None:
        """Leave to each row the tokens of its adapter, or of the base, and no others."""
        least = self.store.least_tokens if self._adapters.is_active else self._places.own_tokens
        if least == logits_SV.shape[1]:
            return
        if not self._adapters.is_active:
            logits_SV[:, least:] = -torch.inf
        else:
            assert self._adapters.samples is not None
            tokens_S = self.store.tokens_L[self._adapters.samples.slots_T[: len(logits_SV)]]
            columns_X = torch.arange(least, logits_SV.shape[1], device=logits_SV.device)
            logits_SV[:, least:].masked_fill_(columns_X >= tokens_S[:, None], -torch.inf)

    def prepare_empty(self) -> None:
        """No row has an adapter: what then runs with adapters does no harm."""
        self._buffer.zero_()

    @property
    def reserved_bytes(self) -> int:
        """Device memory that is set aside for adapters."""
        count, rank = self._expected
        return count * self._places.num_bytes(rank, self._dtype)

    def explain(self) -> dict[str, int]:
        """Memory in numbers."""
        count, rank = self._expected
        loaded = self.store.num_bytes
        memory = {"expected": count, "rank": rank, "reserved_bytes": self.reserved_bytes, "loaded_bytes": loaded}
        return memory | {"loads_by_recipe": self.store.num_followed}

    def use(self, *, has_adapters: bool) -> None:
        """Whether the step that is computed next has adapters."""
        self._adapters.is_active = has_adapters

    def write_random(self, folder: str, rank: int, seed: int, targets: list[str], scale: float) -> int:
        """Write an adapter of random numbers; how many matrices it changes."""
        return write_random_adapter(self._places, folder, rank, seed, targets, self._dtype, scale)
