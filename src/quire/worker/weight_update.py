"""A worker's weights are changed: its part of `update_weights` and `reload_weights`.

The core has the steps stand still meanwhile. Whether an update has begun is the core's to know.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from quire.config import EngineConfig
from quire.distributed.weight_transfer import WAIT_S, TransferGroup
from quire.errors import ConfigError, EngineError, RequestError, refusing
from quire.layers.assembly import Sliceable
from quire.layers.decoder import Decoder
from quire.model_loader.checkpoint import DTYPE_NAMES, TensorInfo
from quire.model_loader.loader import load_weights, read_tensors
from quire.model_loader.safetensors_reader import SafetensorsReader
from quire.model_loader.update import WeightUpdate, check_reload, source_of
from quire.platforms.interface import Platform

if TYPE_CHECKING:
    from quire.worker.runner import Runner


class InitInfo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where a trainer waits for the engine's ranks, which have the numbers from `rank_offset` on in the trainer's group."""

    master_address: str
    master_port: int
    rank_offset: int = 1
    world_size: int
    timeout_s: float = WAIT_S


class UpdateInfo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tensors that a trainer sends next, in this order; or the folder (in shared memory, say) with safetensors files of them."""

    names: Sequence[str] = ()
    dtype_names: Sequence[str] = ()
    shapes: Sequence[Sequence[int]] = ()
    path: str | None = None

    def infos(self) -> dict[str, TensorInfo]:
        """The tensors as a checkpoint's header would have them. Raises RequestError."""
        if not len(self.names) == len(self.dtype_names) == len(self.shapes) > 0:
            numbers = f"{len(self.names)}, {len(self.dtype_names)} and {len(self.shapes)}"
            raise RequestError(
                f"names, dtype_names and shapes have {numbers} entries, not as many and some", param="names"
            )
        if len(set(self.names)) < len(self.names):
            raise RequestError("a name is there twice", param="names")
        return {
            name: TensorInfo("", DTYPE_NAMES[_dtype(dtype)], tuple(shape), 0, 0)
            for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True)
        }


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if dtype not in DTYPE_NAMES:
        raise RequestError(f"{name!r} is no number type of tensors, as 'bfloat16' is", param="dtype_names", value=name)
    return dtype


class WeightUpdates:
    """Changes a runner's weights.

    Args:
        config: its parallel part has this worker's rank.
    """

    def __init__(self, config: EngineConfig, platform: Platform, device: torch.device) -> None:
        self._config, self._platform, self._device = config, platform, device
        self._group: TransferGroup | None = None
        self._update: WeightUpdate | None = None

    # The trainer's group.

    def connect(self, info: Mapping[str, Any]) -> None:
        """Join a trainer's group, and leave the one before. Raises RequestError: the trainer does not answer."""
        given = _read(InitInfo, info, "init_info")
        self.close()
        parallel = self._config.parallel
        rank = given.rank_offset + parallel.copy_number * parallel.world_size + parallel.world_rank
        if not 0 < rank < given.world_size:
            raise RequestError(
                f"world_size={given.world_size} has no rank {rank}: rank_offset={given.rank_offset} and the engine's "
                "ranks do not fit in it",
                param="world_size",
            )
        place = (given.master_address, given.master_port)
        try:
            self._group = TransferGroup(*place, rank, given.world_size, self._device, given.timeout_s)
        except RuntimeError as error:
            raise RequestError(
                f"no trainer at {given.master_address}:{given.master_port} within {given.timeout_s:.0f} s: "
                f"{str(error).splitlines()[0]}",
                param="master_address",
            ) from None

    def close(self) -> None:
        """Leave the trainer's group, if there is one."""
        if self._group is not None:
            self._group.close()
            self._group = None

    # An update in parts.

    def begin(self, runner: "Runner") -> None:
        """The first of them is going to come. Raises RequestError: this model's weights cannot be changed so."""
        self._update = WeightUpdate(runner.model, self._config)
        runner.forget_recorded()

    def check(self, info: Mapping[str, Any]) -> None:
        """Whether these tensors could be taken; nothing changes. Raises RequestError."""
        given, update = _read(UpdateInfo, info, "update_info"), self._open_update()
        if given.path is not None:
            update.check(self._reader(given.path).infos)
            return
        if self._group is None:
            raise RequestError(
                "no trainer is connected: call init_weight_transfer_engine first, or name a path", param="update_info"
            )
        update.check(given.infos())

    def take(self, runner: "Runner", info: Mapping[str, Any]) -> None:
        """Take tensors that were checked. Raises EngineError: they did not come."""
        given, update = _read(UpdateInfo, info, "update_info"), self._open_update()
        if given.path is not None:
            model, reader = runner.model, self._reader(given.path)
            assert isinstance(model, Decoder)
            uploads = self._platform.upload_stream(self._device)
            update.take(read_tensors(model, reader, uploads, copies=True))
            return
        try:
            update.take(self._receive(given))
        except RuntimeError as error:
            self.close()
            raise EngineError(f"the trainer has left in the middle of its tensors: {error}") from error

    def _receive(self, info: UpdateInfo) -> Iterator[tuple[str, Sliceable]]:
        assert self._group is not None, "checked before"
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            yield name, self._group.receive(shape, _dtype(dtype))

    def finish(self, runner: "Runner") -> None:
        """All have come. Raises RequestError: some are missing of modules of which others came."""
        self._open_update().check_end()
        self._update = None
        runner.model.post_load()
        runner.record_again()

    def _open_update(self) -> WeightUpdate:
        if self._update is None:
            raise RequestError("no update has begun: call start_weight_update first")
        return self._update

    def _reader(self, path: str) -> SafetensorsReader:
        with refusing(ConfigError, param="path"):
            return SafetensorsReader(Path(path))

    # All of them from a folder.

    def check_reload(self, runner: "Runner", path: str | None) -> None:
        """Whether a folder's weights fit; nothing changes. Raises RequestError."""
        check_reload(runner.model, source_of(self._config, path))

    def reload(self, runner: "Runner", path: str | None) -> EngineConfig:
        """Read all weights from a folder, or from the model's own; the configuration that a model would now be loaded from.
        Raises ConfigError: a file is damaged."""
        self._update = None
        config = source_of(self._config, path)
        runner.forget_recorded()
        load_weights(runner.model, config, self._platform.upload_stream(self._device), copies=True)
        runner.model.post_load()
        runner.record_again()
        return config


def _read(kind: type[Any], info: Mapping[str, Any], name: str) -> Any:
    with refusing(msgspec.ValidationError, param=name, what=f"{name}"):
        return msgspec.convert(info, kind)
