"""Custom logits processors at work: a failure ends only the rows that cause it.

Knows rows and logits on any device. Knows nothing of the sampler's other steps.
"""

import numpy as np
import numpy.typing as npt
import torch

from quire.sample.logits_processor import LogitsProcessor
from quire.sample.sampling_rows import SamplingRows, describe_failure

IntArray = npt.NDArray[np.int32]


def run_row_processors(
    table: SamplingRows, logits_SV: torch.Tensor, rows_S: IntArray, members: list[int], errors: dict[int, str]
) -> None:
    """The requests' own callables, on the batch indices that have some; edits in place."""
    for index in members:
        row = int(rows_S[index])
        objects = table.objects[row]
        try:
            logits_V = logits_SV[index]
            for processor in objects.processors:
                logits_V = processor(objects.prompt_token_ids, objects.output_token_ids, logits_V)
            _write_back(logits_SV[index], logits_V)
        except Exception as error:  # a user's code: whatever it raises ends this request alone
            errors[row] = describe_failure(error)


def run_engine_processors(
    table: SamplingRows, logits_SV: torch.Tensor, rows_S: IntArray, members: list[int], errors: dict[int, str]
) -> None:
    """Each of the engine's processors gets its rows together; if that fails, one at a time from the same logits."""
    by_processor: dict[int, tuple[LogitsProcessor, list[int]]] = {}
    for index in members:
        for processor in table.objects[int(rows_S[index])].engine_processors:
            by_processor.setdefault(id(processor), (processor, []))[1].append(index)
    for processor, wanted in by_processor.values():
        try:
            edited_NV = processor.apply(logits_SV[wanted], rows_S[wanted])
            _check_shape(edited_NV, (len(wanted), logits_SV.shape[1]))
            logits_SV[wanted] = edited_NV
        except Exception:
            for index in wanted:
                try:
                    _write_back(logits_SV[index], processor.apply(logits_SV[[index]], rows_S[[index]])[0])
                except Exception as error:
                    errors[int(rows_S[index])] = describe_failure(error)


def _check_shape(logits: torch.Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(logits, torch.Tensor) or tuple(logits.shape) != shape:
        seen = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ValueError(f"it returned {seen} in place of logits of shape {shape}")


def _write_back(target_V: torch.Tensor, logits_V: torch.Tensor) -> None:
    _check_shape(logits_V, tuple(target_V.shape))
    if logits_V.data_ptr() != target_V.data_ptr():
        target_V.copy_(logits_V)
