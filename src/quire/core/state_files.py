"""Hidden states of requests' tokens, for files: the half beside the scheduler of the connector `hidden_states`.

Workers give the states of a step's tokens with its result. Here they are put together by request, and a thread writes them when
the request ends (`quire.hidden_states`). Knows which tokens a step computes, and bytes; nothing of tensors.
"""

import collections
import concurrent.futures
import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig
from quire.core.kv_connector import EXTRA, PARAMS, KVConnectorScheduler, Progress, params_of
from quire.core.output import ModelRunnerOutput, SchedulerOutput, read_extra
from quire.core.request_state import Request, RequestStatus
from quire.errors import RequestError, refusing
from quire.hidden_states import cleanup_hidden_states, lock_states, write_states
from quire.logger import init_logger
from quire.request import EngineRequest

logger = init_logger(__name__)

_LONGEST_NAME = 128


class States(msgspec.Struct, array_like=True):
    """Of a step's tokens: `shape` [tokens, layers, hidden] numbers of the type that safetensors calls `dtype`."""

    step_id: int
    dtype: str
    shape: list[int]
    data: bytes


@dataclasses.dataclass(eq=False)
class _Kept:
    """What there is of a request. `wanted`: tokens whose states go into the file; None: all but the last one."""

    path: str
    lock: int | None
    wanted: int | None
    computed: int = 0
    states: bytearray = dataclasses.field(default_factory=bytearray)


class StateFiles(KVConnectorScheduler):
    """Keys of `kv_connector_extra_config`: those of `quire.config.kv_transfer.HiddenStatesConfig`."""

    def __init__(self, config: EngineConfig, kv_cache: KVCacheConfig) -> None:
        super().__init__(config, kv_cache)
        assert config.kv_transfer is not None
        self._settings = config.kv_transfer.hidden_states()
        self._kept: dict[str, _Kept] = {}
        self._rows: dict[int, _Kept] = {}
        self._planned: collections.deque[tuple[int, list[tuple[_Kept, int, int, int]]]] = collections.deque()
        """By step: whose states it computes, from which place of the request on, where in the step, and how many."""
        self._form: tuple[str, list[int], int] = ("", [], 0)
        """Of a token's states: type, shape, bytes."""
        threads = self._settings.num_writer_threads
        self._writers = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="hidden-states")

    def check(self, source: EngineRequest) -> None:
        path = params_of(source).get("hidden_states_path", "x")
        if not isinstance(path, str) or not path:
            raise RequestError(f"{PARAMS}.hidden_states_path={path!r} must be a file's name", param=PARAMS)
        with refusing(OSError, param=PARAMS, what=f"{PARAMS}: the folder of hidden states cannot be made"):
            Path(self._path_of(source)).parent.mkdir(parents=True, exist_ok=True)

    def _path_of(self, source: EngineRequest) -> str:
        asked = params_of(source).get("hidden_states_path")
        if asked is not None and self._settings.allow_custom_save_path:
            return os.path.abspath(asked)
        if asked is not None:
            logger.warning_once("hidden_states_path of requests is ignored: allow_custom_save_path is off")
        name = re.sub(r"[^\w.~-]", "_", source.request_id)[-_LONGEST_NAME:]
        return os.path.abspath(os.path.join(self._settings.path, f"{name}.safetensors"))

    def update_state_after_alloc(self, request: Request, block_ids: list[list[int]], num_external_tokens: int) -> None:
        if request.request_id not in self._kept:
            path, has_lock = self._path_of(request.source), self._settings.use_synchronization_lock
            wanted = None if params_of(request.source).get("include_output_tokens") else request.num_prompt_tokens
            self._kept[request.request_id] = _Kept(path, lock_states(path) if has_lock else None, wanted)
            request.transfer_params = {"hidden_states_path": path}
        self._rows[request.row] = kept = self._kept[request.request_id]
        kept.computed = request.num_computed_tokens

    def build_connector_meta(self, step: SchedulerOutput, progress: Sequence[Progress]) -> tuple[int, int] | None:
        places: list[tuple[_Kept, int, int, int]] = []
        begin = 0
        for row, count in zip(step.rows.tolist(), step.num_scheduled_tokens.tolist(), strict=True):
            kept = self._rows[row]
            if kept.wanted is None or kept.computed < kept.wanted:
                places.append((kept, kept.computed, begin, count))
            kept.computed += count
            begin += count
        if not places:
            return None
        self._planned.append((step.step_id, places))
        return step.step_id, begin

    def update_connector_output(self, output: ModelRunnerOutput) -> None:
        told = read_extra(output.extras, EXTRA, States)
        while told is not None and self._planned and self._planned[0][0] <= told.step_id:
            step_id, places = self._planned.popleft()
            if step_id == told.step_id:  # an earlier one was lost, and is computed again
                self._put(told, places)

    def _put(self, told: States, places: list[tuple[_Kept, int, int, int]]) -> None:
        self._form = told.dtype, told.shape[1:], (size := len(told.data) // told.shape[0])
        data = memoryview(told.data)
        for kept, first, begin, count in places:
            kept.states[first * size : (first + count) * size] = data[begin * size : (begin + count) * size]

    def request_finished(self, request: Request, block_ids: list[list[int]]) -> None:
        if request.status is not RequestStatus.PREEMPTING and (kept := self._kept.pop(request.request_id, None)):
            tokens = list(request.token_ids[: -1 if kept.wanted is None else kept.wanted])
            self._writers.submit(self._write, kept, tokens)

    def _write(self, kept: _Kept, token_ids: list[int]) -> None:
        """Write a request's file, unless it was aborted before these tokens were computed. Readers wait no more."""
        states, kept.states = kept.states, bytearray()  # `_rows` may still have it
        try:
            if len(states) >= (end := len(token_ids) * self._form[2]) > 0:
                write_states(kept.path, *self._form[:2], memoryview(states)[:end], token_ids)
            else:
                cleanup_hidden_states(kept.path, keep_hidden_states=True)
        finally:
            if kept.lock is not None:
                os.close(kept.lock)
