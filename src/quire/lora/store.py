"""Adapters' numbers on a device: read from disk in a thread, kept on the host for their next use, and found by steps by slot.

An adapter on the device is one piece of memory, exactly as large as its numbers. Which adapter has which slot is decided
elsewhere. Knows modules and memory; knows nothing of requests.

Legend: L slots, M modules.
"""

import concurrent.futures
import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch

from quire.adapters import LoRARequest, id_of
from quire.config.engine import LoRAConfig
from quire.config.hub import find_adapter
from quire.config.hub.listing import HubSettings
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.adapters import FIELDS, AdapterPart, AdapterTable
from quire.kernels.types import LinearWeight
from quire.layers.decoder import Decoder
from quire.layers.pooling.head import PoolingHead
from quire.logger import init_logger
from quire.lora.kinds import read_adapter
from quire.lora.magnitude import apply_magnitude, squared_rows, update_squares
from quire.lora.method import Adapters
from quire.lora.own_heads import take_head, with_tensors
from quire.lora.packed_adapter import Packed
from quire.lora.peft_folder import PeftAdapter
from quire.lora.placement import Places
from quire.lora.recipes import Recipes
from quire.lora.several import HEADS
from quire.platforms.interface import DeviceRuntime

logger = init_logger(__name__)


class AdapterStore:
    """The adapters of one model on one rank.

    Args:
        adapters: what its products read.
        places: what of the model can be adapted.
        num_slots: with slot 0, which no adapter has.
        hub: how a hub is asked, where an adapter's folder is a hub id.
        max_tokens: of a step.
        head: of a pooling model.

    Attributes:
        version: changes with what steps with adapters consist of.
        heads: by slot, a pooling model's head where it is the adapter's own.
        tokens_L: int32, how many tokens the rows of each slot have. least_tokens: no slot ever had fewer.
    """

    def __init__(
        self,
        config: LoRAConfig,
        adapters: Adapters,
        places: Places,
        model: Decoder,
        runtime: DeviceRuntime,
        num_slots: int,
        max_tokens: int,
        hub: HubSettings | None = None,
        head: PoolingHead | None = None,
    ) -> None:
        self._hub, self._head = hub, head
        self._config, self._adapters, self._places, self._model = config, adapters, places, model
        self._runtime, self._device = runtime, runtime.device()
        self.version = 0
        self._hosts: OrderedDict[str, Packed] = OrderedDict()
        self._loaded: dict[int, Packed] = {}
        self._slots: list[Packed | None] = [None] * num_slots
        self.heads: list[PoolingHead | None] = [None] * num_slots
        self.least_tokens = places.own_tokens
        self.tokens_L = torch.full((num_slots,), places.own_tokens, dtype=torch.int32, device=self._device)
        self._several: dict[str, AdapterTable] = {}
        shape = (len(places.modules), len(FIELDS), num_slots)
        self._entries_MFL = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self._all = {
            module: self._table(module, self._entries_MFL[number], num_segments)
            for number, (module, num_segments) in enumerate(places.modules.items())
        }
        self._max_tokens = max_tokens
        self._recipes = Recipes(places, runtime)
        self._activation = model.context.activation_dtype
        self._squares: dict[str, torch.Tensor] = {}
        self._make_room(config.max_lora_rank or FIRST_RANK)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "adapters")

    def _table(self, module: str, entries_FL: torch.Tensor, num_segments: int, fan: int = 1) -> AdapterTable:
        tiles, dtype = self._places.tiles(module).to(self._device), self._model.dtype
        parts: list[AdapterPart | None] = [None] * len(self._slots)
        return AdapterTable(entries_FL, tiles, num_segments, dtype, parts, most_ranks=0, most_adapters=0, fan=fan)

    @contextlib.contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Within this, products are those of adapters of every matrix."""
        tables, self._adapters.tables = self._adapters.tables, self._all
        try:
            yield
        finally:
            self._adapters.tables = tables

    def load(self, request: LoRARequest, slot: int) -> "concurrent.futures.Future[None]":
        """Have an adapter read, and brought to a slot that no row has; an error of the future says why it cannot be used."""
        return self._thread.submit(self._load, request, slot)

    def kept_ids(self) -> list[int]:
        """The numbers of adapters that are kept on the host."""
        return sorted({id_of(key) for key in list(self._hosts)})

    def forget(self, lora_id: int) -> bool:
        """Keep no adapter of this number on the host; whether there was one."""
        keys = [key for key in list(self._hosts) if id_of(key) == lora_id]
        for key in keys:
            self._hosts.pop(key, None)
        return bool(keys)

    def _load(self, request: LoRARequest, slot: int) -> None:
        self._slots[slot] = None
        host = self._hosts.pop(request.key, None) or self._read(request)
        self._hosts[request.key] = host
        if host.num_virtual != request.num_virtual_tokens:
            raise ConfigError(
                f"{request.lora_path} has {host.num_virtual} virtual tokens, which a request learns from the adapter's folder on "
                "this machine: give that in the place of a hub's name",
                setting="lora_path",
            )
        keeps = self._config.max_cpu_loras or MOST_ON_HOST
        while len(self._hosts) > keeps:
            self._hosts.popitem(last=False)
        self._loaded[slot] = self._upload(host)

    def clear(self, *, is_base_new: bool) -> None:
        """Have nothing on the device; with a new base nothing on the host either. No step is in flight."""
        self._thread.submit(self._clear, is_base_new).result()

    def _clear(self, is_base_new: bool) -> None:
        if is_base_new:
            self._hosts.clear()
            self._squares.clear()
        self._loaded.clear()
        self._several.clear()
        self._adapters.tables, self._adapters.can_replay = {}, True
        self._slots, self.heads = [None] * len(self._slots), [None] * len(self._slots)
        self._entries_MFL.zero_()
        for table in self._all.values():
            table.parts, table.has_gains = [None] * len(self._slots), False
        self.version += 1

    @property
    def num_bytes(self) -> int:
        """Device memory of the adapters that are in slots."""
        return sum(each.memory.nbytes for each in self._slots if each is not None)

    def _upload(self, host: Packed) -> Packed:
        """Bring an adapter to the device, in memory of the steps' stream, beside the steps."""
        if host.memory.device == self._device:
            return host
        try:
            memory, event = torch.empty_like(host.memory, device=self._device), self._runtime.event()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the device has no {host.memory.nbytes / 2**20:.0f} MiB left for one more adapter: set max_loras and "
                "max_lora_rank, for which memory is set aside at the start",
                setting="max_loras",
            ) from error
        event.record()
        event.wait()  # of the memory's last owner steps may have been on their way
        with self._runtime.beside_steps():
            memory.copy_(host.memory, non_blocking=True)
            event.record()
            event.wait()
        return host.viewed_in(memory)

    def _read(self, request: LoRARequest) -> Packed:
        path = find_adapter(request.lora_path, self._hub)
        return self._recipes.follow(path) or self._place(path, request)

    def _place(self, path: str, request: LoRARequest) -> Packed:
        """An adapter whose structure is new."""
        adapter = read_adapter(path)
        if self._config.target_modules:
            _leave_out(adapter, self._config.target_modules)
        head = {} if self._head is None else take_head(adapter, self._head)
        parts, limit = self._places.place(adapter, self._model.dtype), self._config.max_lora_rank
        num_virtual = 0 if adapter.virtual is None else len(adapter.virtual)
        several = (part.rank for name, part in parts.items() if name in self._places.several and not num_virtual)
        rank = max(adapter.max_rank, *several, 0)
        if limit is not None and rank > limit:
            raise ConfigError(
                f"{request.lora_path} has rank {rank}, and max_lora_rank is {limit}: raise it, or leave it out",
                setting="max_lora_rank",
            )
        unpacked = Packed(torch.empty(0), parts, num_virtual, self._places.num_tokens(adapter), head)
        packed = unpacked.packed(self._runtime)
        if not head:
            self._recipes.learn(path, packed)
        return packed

    @property
    def num_followed(self) -> int:
        """Adapters that were read as others of their structure were."""
        return self._recipes.num_followed

    def num_virtual(self, slot: int) -> int:
        """Tokens that what is in a place puts before prompts."""
        packed = self._slots[slot]
        return 0 if packed is None else packed.num_virtual

    def settle(self, slot: int) -> None:
        """Let steps find what was loaded into a place, if that is new."""
        loaded = self._loaded.pop(slot, None)
        if loaded is not None:
            self._finish(loaded)
            self._install(slot, loaded)

    def _finish(self, loaded: Packed) -> None:
        """Complete what depends on the base: gains of magnitudes, and updates that put other rows in the place of its own."""
        for module, part in loaded.parts.items():
            if part.tokens is not None:
                base = torch.empty(part.up.shape, dtype=self._activation, device=self._device)
                ops.embedding(part.tokens, self._model.linear(module), base, 1.0)
                part.up.sub_(base)
                part.tokens = None
            if part.magnitude is not None:
                weight, segment_N = self._model.linear(module), self._places.segment_of_outputs(module)
                squares_N = self._squares_of(module) + update_squares(part, segment_N, weight, self._product)
                if self._places.is_summed(module):
                    self._model.communicator.all_reduce(squares_N)
                apply_magnitude(part, squares_N, weight.bias)

    def _squares_of(self, module: str) -> torch.Tensor:
        """The sums of squares of a matrix's rows."""
        if module not in self._squares:
            self._squares[module] = squared_rows(self._model.linear(module), self._product, self._device)
        return self._squares[module]

    def _product(self, x_TK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """x @ weight.T of the base alone, in float32."""
        out_TN = torch.empty(len(x_TK), weight.out_features, dtype=self._activation, device=self._device)
        with self._adapters.paused():
            self._model.linear_method.apply(x_TK.to(self._activation).contiguous(), weight, out_TN)
        return out_TN.float() if weight.bias is None else out_TN.float() - weight.bias

    def _install(self, slot: int, loaded: Packed) -> None:
        for module in loaded.parts.keys() & self._places.several.keys() - self._several.keys():
            each = self._places.several[module]
            entries_FL = torch.zeros(len(FIELDS), len(self._slots) * each.count, dtype=torch.int64, device=self._device)
            self._several[module] = self._table(module, entries_FL, each.segments, each.count)
            self._adapters.can_replay &= not each.is_apart
        entries_MF = list[list[int]]()
        for module, table in [*self._all.items(), *self._several.items()]:
            part = table.parts[slot] = loaded.parts.get(module)
            entries_XF = [[0] * len(FIELDS)] * table.fan if part is None else part.entries(table.fan)
            if module in self._several:
                places = slice(slot * table.fan, (slot + 1) * table.fan)
                table.entries_FL[:, places] = torch.tensor(entries_XF).T.to(self._device)
            else:
                entries_MF += entries_XF
            if part is None:
                continue
            if part.gain is not None and not table.has_gains:
                table.has_gains = True
                self.version += 1
            if module not in self._adapters.tables:
                self._adapters.tables[module] = table
                self.version += 1
        self._slots[slot] = loaded
        self.heads[slot] = with_tensors(self._head, loaded.head) if self._head is not None and loaded.head else None
        self.tokens_L[slot] = loaded.num_tokens
        if loaded.num_tokens < self.least_tokens:
            self.least_tokens = loaded.num_tokens
            self.version += 1
        rank = max((part.rank for part in loaded.parts.values()), default=0)
        self._bound(sum(each is not None for each in self._slots), rank)
        self._entries_MFL[:, :, slot] = torch.tensor(entries_MF).to(self._device)
        self._make_room(rank)

    def _bound(self, num_adapters: int, rank: int) -> None:
        """Let kernels be launched for so many adapters of such a rank, rounded up so that steps seldom change."""
        tables = [*self._all.values(), *self._several.values()]
        most_adapters = max(1 << (num_adapters - 1).bit_length(), *(table.most_adapters for table in tables))
        most_ranks = max(16 << max(0, (rank - 1).bit_length() - 4), *(table.most_ranks for table in tables))
        for table in tables:
            if (most_adapters, most_ranks) != (table.most_adapters, table.most_ranks):
                table.most_adapters, table.most_ranks = most_adapters, most_ranks
                self.version += 1

    def _make_room(self, rank: int) -> None:
        """Have room for what rows are between both products, for updates of some rank."""
        rank, rows = max(rank, self._adapters.max_rank), max(self._places.modules.values())
        heads = [table.fan for name, table in self._several.items() if name.endswith(HEADS)]
        size = self._max_tokens * rank * max(rows, *heads, 2 if self._several else 0)
        if size > len(self._adapters.scratch):
            self._adapters.max_rank = rank
            self._adapters.scratch = torch.zeros(size, device=self._device)
            self.version += 1

    def shutdown(self) -> None:
        """Read nothing any more."""
        self._thread.shutdown(wait=True, cancel_futures=True)


_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""vLLM's names of matrices that it has in one, and their names in checkpoints."""


def _leave_out(adapter: PeftAdapter, targets: Sequence[str]) -> None:
    """Keep only the updates of these matrices."""
    wanted = {name for target in targets for name in (target, *_PACKED.get(target, ()))}
    others = [name for name in adapter.updates if name not in wanted and name.rpartition(".")[2] not in wanted]
    for name in others:
        del adapter.updates[name]
    if others:
        logger.info("%s: %d matrices are left as they are, as lora_target_modules says", adapter.path, len(others))


FIRST_RANK = 64
"""There is room for updates of this rank from the start unless `max_lora_rank` says it otherwise."""
MOST_ON_HOST = 64
"""Adapters that are kept on the host unless `max_cpu_loras` says it otherwise."""
