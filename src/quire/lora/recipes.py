"""How the numbers of an adapter's file become its one piece of memory: found out once, for all adapters of one structure.

Many adapters of one base differ in their numbers alone. The first two of a structure (the same tensors, of the same shapes, at
the same places of the file, and the same configuration) are placed matrix by matrix. Then an adapter whose numbers are their own
places in the file goes the same way, and one of ones: they tell for each number of the memory where it comes from, and what it
is multiplied by. All further adapters are one gather. A recipe that does not make the second one again is not used. Knows files
and memory; knows nothing of modules.

Legend: M numbers of the memory.
"""

import dataclasses
import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.adapters import read_config
from quire.lora.packed_adapter import Packed, padded, tensors_of_part
from quire.lora.peft_folder import NEW_ROWS_FILE, WEIGHTS, read_lora
from quire.lora.placement import Places
from quire.platforms.interface import DeviceRuntime

MOST_NUMBERS = 1 << 22
"""Of an adapter in memory. In larger ones copying takes longer than finding out; and these are exact in float32."""
MOST_RECIPES, MOST_SEEN, MOST_HEADER = 8, 1024, 1 << 20
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_IDLE = ("target_modules", "base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version")
"""Settings that an adapter's numbers do not depend on, beside its tensors."""


@dataclasses.dataclass
class _Recipe:
    """What all adapters of a structure have in common.

    Attributes:
        dtype: of the file's numbers.
        index_M: where in the file each number of the memory is. scale_M: what it is multiplied by.
        first: an adapter of this structure.
    """

    dtype: torch.dtype
    index_M: torch.Tensor
    scale_M: torch.Tensor
    first: Packed

    def follow(self, file: Path, runtime: DeviceRuntime) -> Packed:
        """The adapter in a file."""
        with open(file, "rb") as stream:
            stream.seek(int.from_bytes(stream.read(8), "little"), 1)
            numbers = torch.from_numpy(np.fromfile(stream, dtype=np.uint8)).view(self.dtype)
        memory = runtime.pinned(torch.empty(self.first.memory.shape, dtype=torch.uint8))
        part = next(iter(self.first.parts.values()))
        memory.view(part.up.dtype).copy_(numbers.index_select(0, self.index_M).float().mul_(self.scale_M))
        return self.first.viewed_in(memory)


class Recipes:
    """The structures of the adapters of one model.

    Attributes:
        num_followed: adapters that were loaded by one.
    """

    def __init__(self, places: Places, runtime: DeviceRuntime) -> None:
        self._places, self._runtime = places, runtime
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._recipes: OrderedDict[str, _Recipe | None] = OrderedDict()
        self.num_followed = 0

    def follow(self, path: str) -> Packed | None:
        """An adapter of a structure that is known; None: it has another one."""
        key, _ = _structure(path)
        recipe = self._recipes.get(key)
        if recipe is None:
            return None
        self._recipes.move_to_end(key)
        self.num_followed += 1
        return recipe.follow(Path(path) / WEIGHTS, self._runtime)

    def learn(self, path: str, packed: Packed) -> None:
        """An adapter was placed matrix by matrix: the second one of a structure shows how that is done."""
        key, text = _structure(path)
        if not key or key in self._recipes:
            return
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
            return
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        self._recipes[key] = self._found_out(path, header, packed)
        if len(self._recipes) > MOST_RECIPES:
            self._recipes.popitem(last=False)

    def _found_out(self, path: str, header: Mapping[str, Any], packed: Packed) -> _Recipe | None:
        """A recipe that makes just this adapter of its file; None: there is none."""
        dtypes = {entry["dtype"] for entry in header.values()}
        dtype = _DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None
        laid = [tensor for part in packed.parts.values() for tensor in tensors_of_part(part).values()]
        counts = (sum(math.prod(entry["shape"]) for entry in header.values()), sum(map(torch.numel, laid)))
        if dtype is None or max(counts) > MOST_NUMBERS or len({tensor.dtype for tensor in laid}) > 1:
            return None
        places_M = self._trace(path, header, packed, lambda first, count: torch.arange(first + 1, first + count + 1.0))
        scale_M = self._trace(path, header, packed, lambda first, count: torch.ones(count), is_scaled=True)
        recipe = _Recipe(dtype, (places_M.long() - 1).clamp_(min=0), scale_M, packed)
        made = recipe.follow(Path(path) / WEIGHTS, self._runtime)
        pairs = ((tensors_of_part(made.parts[name]), tensors_of_part(part)) for name, part in packed.parts.items())
        is_same = all(torch.equal(one[field], other[field]) for one, other in pairs for field in other)
        return recipe if is_same else None

    def _trace(
        self,
        path: str,
        header: Mapping[str, Any],
        packed: Packed,
        numbers: Callable[[int, int], torch.Tensor],
        *,
        is_scaled: bool = False,
    ) -> torch.Tensor:
        """[M]: the memory of an adapter of this structure whose numbers, from `first` on in the file, are these."""
        tensors: dict[str, torch.Tensor] = {}
        for name, entry in header.items():
            first = entry["data_offsets"][0] // _DTYPES[entry["dtype"]].itemsize
            tensors[name] = numbers(first, math.prod(entry["shape"])).view(entry["shape"])
        adapter = read_lora(path, read_config(path), tensors.items())
        if not is_scaled:
            for update in adapter.updates.values():
                update.scale = 1.0
        parts, at = self._places.place(adapter, torch.float32), 0
        item = next(iter(packed.parts.values())).up.itemsize
        laid_M = torch.zeros(len(packed.memory) // item)
        for name, part in packed.parts.items():
            for field, tensor in tensors_of_part(part).items():
                laid_M[at // item : at // item + tensor.numel()] = getattr(parts[name], field).flatten()
                at += padded(tensor.nbytes)
        return laid_M


def _structure(path: str) -> tuple[str, bytes]:
    """What adapters of one structure have in common, and the header of the file; empty: it is no such adapter."""
    file = Path(path) / WEIGHTS
    config = read_config(path) if file.is_file() and not (file.parent / NEW_ROWS_FILE).exists() else {}
    if config.get("peft_type") != "LORA":
        return "", b""
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        text = stream.read(size) if size <= MOST_HEADER else b""
    relevant = {name: value for name, value in config.items() if name not in _IDLE}
    digest = hashlib.blake2b(text, digest_size=16)
    digest.update(json.dumps(relevant, sort_keys=True).encode())
    return (digest.hexdigest(), text) if text else ("", b"")
