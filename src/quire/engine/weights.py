"""Which weights an engine core computes with, and the verbs that change them.

While they change nothing is scheduled: requests stand still, and are computed anew with the new weights. Weights that are not
whole (an update broke off, or the core that a trainer had sent them to has died) are never computed with.
"""

import abc
import contextlib
import os
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import msgspec

from quire.config import EngineConfig
from quire.config.hub import fetch_weights
from quire.engine.arg_resolve import hub_settings
from quire.errors import CapacityError, ConfigError, QuireError, RequestError, describe, refusing
from quire.executor.interface import Executor
from quire.guards import is_dict
from quire.logger import init_logger
from quire.request import WeightState
from quire.timeline import STARTUP

logger = init_logger(__name__)

CoreMethod = TypeVar("CoreMethod", bound=Callable[..., Any])

UTILITIES: set[str] = set()
"""The control verbs: methods of the core that frontends may call. Nothing else of it can be called from outside."""

_AGAIN = "start_weight_update and send them again, or reload_weights"


def utility(method: CoreMethod) -> CoreMethod:
    """Mark a method as a control verb. `engine/control.py` gives it to both engines, with its parameters and its docstring."""
    UTILITIES.add(method.__name__)
    return method


def restored(config: EngineConfig, state: WeightState) -> tuple[EngineConfig, WeightState]:
    """What a core begins with whose predecessor had these weights: they are read from where it had them from. Where that is not
    possible, the state says so."""
    if state.is_sent or (state.path is not None and not os.path.isdir(state.path)):
        why = "came from a trainer" if state.is_sent else f"were read from {state.path}, which is gone"
        gone = f"weights of version {state.version!r} {why}, and went with the engine core: {_AGAIN}"
        return config, msgspec.structs.replace(state, problem=gone)
    state = msgspec.structs.replace(state, problem=None)
    return (config if state.path is None else config.reading_from(state.path)), state


class WeightVerbs(abc.ABC):
    """The part of an engine core that changes weights."""

    _executor: Executor

    def __init__(self, state: WeightState | None = None) -> None:
        self._weights = state or WeightState()
        self._is_updating = False
        self._has_weight_news = state is not None

    @abc.abstractmethod
    def _drain(self) -> None:
        """Take in what is in flight."""

    @abc.abstractmethod
    def _forget_computed(self) -> None:
        """Pages are of other weights: cached ones are forgotten, requests are computed anew."""

    @abc.abstractmethod
    def _refuse_all(self, error: QuireError) -> None:
        """End every request with an error."""

    @property
    @abc.abstractmethod
    def _weights_sleep(self) -> bool:
        """Whether they were dropped, and not read again yet."""

    @property
    def _weights_are_whole(self) -> bool:
        return not self._is_updating and self._weights.problem is None

    def _check_weights(self) -> None:
        """Raises CapacityError: there are none to compute a new request with."""
        if self._weights.problem is not None:
            raise CapacityError(f"there are no weights to compute with: {self._weights.problem}")

    def _take_weight_news(self) -> WeightState | None:
        """The weights, if they have changed since the last call."""
        news, self._has_weight_news = self._weights if self._has_weight_news else None, False
        return news

    def _weights_were_dropped(self) -> None:
        """They were read again from where the core began: a trainer's are not there."""
        if self._weights.is_sent:
            why = "came from a trainer, and sleep level 2 dropped them"
            self._break(f"weights of version {self._weights.version!r} {why}: {_AGAIN}")

    def _break(self, problem: str) -> None:
        self._set(msgspec.structs.replace(self._weights, problem=problem))

    def _set(self, state: WeightState) -> None:
        self._weights, self._has_weight_news = state, True

    def _changed(self, version: str | None, path: str | None, *, is_sent: bool) -> None:
        count = self._weights.num_updates + 1
        self._is_updating = False
        self._forget_computed()
        self._set(WeightState(str(count) if version is None else version, count, path, is_sent))
        logger.info("The weights are of version %s now.", self._weights.version)

    @contextlib.contextmanager
    def _breaking(self, verb: str) -> Generator[None]:
        """A failure in it leaves weights that are half old, half new."""
        try:
            yield
        except Exception as error:
            problem = f"{verb} failed, and left old weights and new ones: {describe(error)}; {_AGAIN}"
            logger.error("%s", problem)
            self._is_updating = False
            self._break(problem)
            self._refuse_all(CapacityError(f"there are no weights to compute with: {problem}"))
            raise

    def _tell_workers(self, method: str, *args: Any) -> None:
        self._executor.collective_rpc(method, args)

    # --- utilities ---

    @utility
    def init_weight_transfer_engine(self, request: Any) -> None:
        """Join a trainer's group, which waits: `master_address`, `master_port`, `rank_offset`, `world_size`, `timeout_s`. Steps
        wait meanwhile. Raises RequestError: no trainer is there."""
        self._tell_workers("connect_trainer", _info(request, "init_info"))

    @utility
    def shutdown_weight_transfer_engine(self) -> None:
        """Leave the trainer's group."""
        self._tell_workers("connect_trainer", None)

    @utility
    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """A trainer is going to send weights; until `finish_weight_update` nothing is computed, and requests stand still. An
        update that was begun before is given up. Raises RequestError: weights of this model cannot be changed so, or they sleep.

        Args:
            is_checkpoint_format: names and shapes are the checkpoint's, which is the only format.
        """
        if not is_checkpoint_format:
            raise RequestError("is_checkpoint_format must be true", param="is_checkpoint_format")
        self._check_awake()
        self._drain()
        self._tell_workers("begin_update")
        self._is_updating = True

    @utility
    def update_weights(self, request: Any) -> None:
        """Take tensors by the checkpoint's names: `names`, `dtype_names` and `shapes` of what the trainer broadcasts next, or the
        `path` of a folder with safetensors files. May be called often; a module changes with the last of its tensors.
        Raises RequestError: they do not fit; nothing has changed. Raises EngineError: they did not all come."""
        info = _info(request, "update_info")
        self._check_updating()
        self._tell_workers("check_tensors", info)
        with self._breaking("update_weights"):
            self._tell_workers("take_tensors", info)

    @utility
    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All tensors were sent: requests go on, computed anew. Raises RequestError: of a module only some have come.

        Args:
            weight_version: what the weights are called; without one, the number of updates so far.
        """
        self._check_updating()
        self._tell_workers("finish_update")
        self._changed(weight_version, None, is_sent=True)

    @utility
    def reload_weights(
        self, weights_path: str | None = None, is_checkpoint_format: bool = True, weight_version: str | None = None
    ) -> None:
        """Read all weights from a folder, in place. Raises RequestError: they do not fit; nothing has changed.

        Args:
            weights_path: a checkpoint of the same model, on the engine's machine; None: the model's own.
            weight_version: what the weights are called; without one, the number of updates so far.
        """
        if not is_checkpoint_format:
            raise RequestError("is_checkpoint_format must be true", param="is_checkpoint_format")
        path = None if weights_path is None else os.path.abspath(weights_path)
        self._check_awake()
        with refusing(ConfigError, param="weights_path"):
            self._tell_workers("check_folder", path)
        self._drain()
        with self._breaking("reload_weights"):
            self._tell_workers("read_folder", path)
        self._changed(weight_version, path, is_sent=False)

    @utility
    def update_weight_version(self, new_version: str) -> None:
        """Call the weights otherwise."""
        self._set(msgspec.structs.replace(self._weights, version=new_version))

    @utility
    def get_weight_version(self) -> str:
        """What the weights are called: `default` at first."""
        return self._weights.version

    @utility
    def weight_info(self) -> dict[str, Any]:
        """The weights' version, the number of updates, the folder that they were read from last if it is not the model's, and why
        nothing can be computed with them, if it cannot."""
        state = self._weights
        return {
            "weight_version": state.version,
            "num_updates": state.num_updates,
            "weights_path": state.path,
            "is_updating": self._is_updating,
            "problem": state.problem,
        }

    def _check_updating(self) -> None:
        if not self._is_updating:
            raise RequestError("no weight update has begun: call start_weight_update first")

    def _check_awake(self) -> None:
        if self._weights_sleep:
            raise RequestError("the weights sleep: wake_up(['weights']) first", param="wake_up")


BY_RPC = (
    "reload_weights",
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
"""Verbs that programs written for vLLM call on the workers."""


def _info(request: Any, name: str) -> dict[str, Any]:
    """A request's information for workers, which may lie in a field `name`. Raises RequestError."""
    found = request.get(name, request) if is_dict(request) else getattr(request, name, None)
    if not is_dict(found):
        raise RequestError(f"{name} must be an object with fields", param=name)
    return found


def fetch_missing_weights(config: EngineConfig) -> None:
    """Fetch the weights of a hub's model that are not here yet; what could not run is refused first. One process fetches them,
    for any number of ranks; a parent does it before its child, whose time to start is limited.
    Raises ConfigError: the model cannot run on this machine, or its weights cannot be fetched."""
    if config.drafter is not None:
        fetch_missing_weights(config.of_drafter(config.drafter, config.cache.block_size))
    hub = config.model.hub
    if hub is None or config.load.load_format == "dummy" or not (hub.refusal or hub.missing()):
        return
    if not hub.refusal:
        from quire.platforms import current_platform
        from quire.worker.dry_run import check_without_weights

        check_without_weights(config, current_platform(config.device.device))
    with STARTUP.phase("download"):
        fetch_weights(hub, hub_settings(config.load, config.model.revision))
