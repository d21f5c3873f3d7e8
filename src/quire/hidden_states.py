"""Files with the hidden states of a request's tokens: how they are written, waited for, read and deleted.

A file is in safetensors' format: `hidden_states` [tokens, layers, hidden], and `token_ids` [tokens]. It is written under another
name and renamed. A lock file beside it is held from the request's start until the file is there, so that readers wait for it.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quire.logger import init_logger

if TYPE_CHECKING:
    import torch

logger = init_logger(__name__)


def load_hidden_states(path: str) -> "dict[str, torch.Tensor]":
    """`hidden_states` [tokens, layers, hidden] and `token_ids` [tokens] of a file; waits until it is written.
    Raises FileNotFoundError: the request was aborted before its prompt was computed, or the file could not be written."""
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] # one of its parameters has no type

    with contextlib.suppress(FileNotFoundError), open(_lock_name(path)) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    return load_file(path)


def cleanup_hidden_states(path: str, keep_hidden_states: bool = False) -> None:
    """Delete a file and its lock; or only the lock."""
    for name in (_lock_name(path), *(() if keep_hidden_states else (path,))):
        Path(name).unlink(missing_ok=True)


def lock_states(path: str) -> int | None:
    """Let readers of a file that will be written wait; the lock, to be closed then. None: it cannot be had."""
    try:
        lock = os.open(_lock_name(path), os.O_CREAT | os.O_WRONLY, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        logger.warning("hidden states: %s cannot be locked, its readers do not wait: %s", path, error)
        return None
    return lock


def write_states(path: str, dtype: str, shape: Sequence[int], states: memoryview, token_ids: Sequence[int]) -> None:
    """Write a file. `dtype`: of the states, as safetensors calls it; `shape`: of one token's. What fails is told in the log."""
    tokens = np.asarray(token_ids, dtype="<i8").tobytes()
    size, count = len(states), len(token_ids)
    entries = {
        "hidden_states": {"dtype": dtype, "shape": [count, *shape], "data_offsets": [0, size]},
        "token_ids": {"dtype": "I64", "shape": [count], "data_offsets": [size, size + len(tokens)]},
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    try:
        with open(partial := f"{path}.part", "wb") as file:
            file.writelines((len(header).to_bytes(8, "little"), header, states, tokens))
        os.replace(partial, path)
    except OSError as error:
        logger.error("hidden states could not be written to %s: %s", path, error)


def _lock_name(path: str) -> str:
    return f"{path}.lock"
