"""Recording of steps: the native operations that a function runs, kept as a list that is run again in one call.

While a recording is made every operation also runs (unless told not to), so the recorded step is a real one. A replay
reads the same memory: tensors are filled in place between replays, and batch sizes are read from
`AttentionMetadata.shape`. Only the number of rows may change, for operations whose rows are the step's tokens or its
logits. Knows nothing of models.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.cpu.library import Library, load
from quire.logger import init_logger
from quire.platforms.interface import RecordedStep

logger = init_logger(__name__)

FIXED, TOKENS, LOGITS = 0, 1, 2
_ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}


class _Recorder:
    """Collects operations into a native program, until something makes the recording impossible."""

    def __init__(self, library: Library, num_tokens: int, num_logits: int, *, runs: bool = True) -> None:
        self.runs = runs
        self._library = library
        self._row_kinds = {num_logits: LOGITS, num_tokens: TOKENS}
        self.program: int = library.program_new()
        self.tensors: list[torch.Tensor] = []
        self.count = 0
        self.refused: str | None = None

    def append(
        self, operation: int, arguments: ctypes.Structure, rows: int, tensors: tuple[torch.Tensor | None, ...]
    ) -> None:
        kind = self._row_kinds.get(rows, FIXED)
        self._library.program_add(
            self.program, operation, ctypes.byref(arguments), ctypes.sizeof(arguments), kind, rows
        )
        self.tensors.extend(tensor for tensor in tensors if tensor is not None)
        self.count += 1

    def refuse(self, why: str) -> None:
        if self.refused is None:
            self.refused = why


class _NothingToRecord(Exception):
    """Ends a recording that has become impossible and whose operations would be computed for nothing."""


class _TorchWatch(TorchDispatchMode):
    """Sees every PyTorch operator that runs, since none of them can be replayed; views and allocations do no harm."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Yes would import PyTorch's compiler at the first operator: seconds of start-up for a mode that nobody compiles.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        changes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        is_view = any(r.alias_info is not None for r in schema.returns) and not changes
        if not is_view and schema.name not in _ALLOCATIONS:
            self._recorder.refuse(f"{schema.name} ran, which is PyTorch's and not a native kernel")
            if not self._recorder.runs:
                raise _NothingToRecord
        return func(*args, **(kwargs or {}))


class CpuRecordedStep(RecordedStep):
    """A list of native operations over fixed memory. Keeps the tensors alive that it points to."""

    def __init__(self, library: Library, recorder: _Recorder, num_tokens: int, num_logits: int) -> None:
        self._library = library
        self._program = recorder.program
        self._tensors = list({id(tensor): tensor for tensor in recorder.tensors}.values())
        self._limits = (num_tokens, num_logits)
        self.num_operations = recorder.count

    def replay(self, num_tokens: int, num_logits: int) -> None:
        """Run it for this many tokens and logits rows.

        Raises:
            ValueError: more rows than it was recorded with.
        """
        if not (0 <= num_tokens <= self._limits[0] and 0 <= num_logits <= self._limits[1]):
            raise ValueError(
                f"replay of {num_tokens} tokens and {num_logits} logits rows; the step was recorded with {self._limits[0]}"
                f" and {self._limits[1]}"
            )
        self._library.program_run(self._program, num_tokens, num_logits)

    def __del__(self) -> None:
        if getattr(self, "_program", None):
            self._library.program_free(self._program)
            self._program = 0


def record(
    function: Callable[[], Any], num_tokens: int, num_logits: int, *, runs: bool = True
) -> CpuRecordedStep | None:
    """Run `function` once, recording its native operations; with `runs=False` they are recorded without being computed,
    which takes milliseconds also for the largest step.

    Operations with `num_tokens` rows will take the replay's tokens, those with `num_logits` rows its logits; the rest keep
    theirs.

    Returns:
        The recorded step, or None (with the reason in the log) if the library is missing or something else than a native
        operation ran.

    Raises:
        ValueError: num_tokens equals num_logits, so that rows could not be told apart, or a recording is being made already.
    """
    if num_tokens == num_logits:
        raise ValueError(f"num_tokens and num_logits are both {num_tokens}: rows could not be told apart")
    library, why = load()
    if library is None:
        if runs:
            function()
        logger.debug("step not recorded: %s", why)
        return None
    if library.recorder is not None:
        raise ValueError("a recording is being made already")
    recorder = _Recorder(library, num_tokens, num_logits, runs=runs)
    library.recorder = recorder
    try:
        with _TorchWatch(recorder):
            function()
    except _NothingToRecord:
        pass
    except BaseException:
        library.program_free(recorder.program)
        raise
    finally:
        library.recorder = None
    if recorder.refused is None and recorder.count > 0:
        return CpuRecordedStep(library, recorder, num_tokens, num_logits)
    library.program_free(recorder.program)
    logger.info("step not recorded, it runs eagerly: %s", recorder.refused or "no native operation ran")
    return None
