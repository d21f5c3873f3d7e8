"""The interface of logits processors of vLLM's second runner, on Quire's.

There a processor is told of a request by its slot (`add_request`), and gets the logits of a step with what the slots' tokens are
(`apply`). A slot is a row of Quire's. Knows both; knows nothing of sampling.
"""

import abc
import dataclasses
from typing import TYPE_CHECKING, Any

from quire.sample.logits_processor import LogitsProcessor as _LogitsProcessor
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch

    from quire.config import EngineConfig


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """A tensor under the name that vLLM's buffers give it."""

    gpu: "torch.Tensor"


@dataclasses.dataclass(frozen=True)
class LogitsProcRequestState:
    """What is known of all slots: the tokens [slots, length], and how many there are, of the prompt and in all [slots]."""

    device: "torch.device"
    max_num_reqs: int
    vocab_size: int
    all_token_ids: OnDevice
    prompt_len: OnDevice
    prefill_len: OnDevice
    total_len: OnDevice


@dataclasses.dataclass(frozen=True)
class LogitsContext:
    """The rows of a step: each is a request's, with its slot, its last token and that token's position."""

    expanded_idx_mapping: "torch.Tensor"
    idx_mapping: "torch.Tensor"
    idx_mapping_np: "np.ndarray"
    expanded_local_pos: "torch.Tensor"
    input_ids: "torch.Tensor"
    pos: "torch.Tensor"
    seq_lens_upper_bound_np: "np.ndarray"


class _MakesRows(abc.ABCMeta):
    """What an engine makes of a class for slots is a processor of rows that has it."""

    def __call__(cls, config: "EngineConfig", device: "torch.device", is_pin_memory: bool = False) -> Any:
        state = _empty_state(config, device)
        return SlotProcessor(super().__call__(config, state), state)


class LogitsProcessor(metaclass=_MakesRows):
    """A processor that was written for vLLM's second runner."""

    def __init__(self, vllm_config: "EngineConfig", req_states: LogitsProcRequestState) -> None:
        """Made once in each worker."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for parameters that cannot work."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """A request has this slot; whether its logits are to be edited."""
        return True

    def apply_staged_writes(self) -> None:
        """Before each step's logits."""

    @abc.abstractmethod
    def apply(self, logits: "torch.Tensor", ctx: LogitsContext) -> "torch.Tensor":
        """Edited logits, in place or not."""


_LogitsProcessor.register(LogitsProcessor)  # `logits_processors` takes such classes; what is made of them is a subclass


class SlotProcessor(_LogitsProcessor):
    """Quire's processor over one of slots: it keeps the slots' tokens up to date."""

    def __init__(self, processor: LogitsProcessor, state: LogitsProcRequestState) -> None:
        self._processor, self._state = processor, state
        self._tokens: dict[int, tuple[list[int], list[int]]] = {}

    def validate_params(self, params: SamplingParams) -> None:  # type: ignore[override]
        """As the processor does."""
        self._processor.validate_params(params)

    def add_row(
        self, row: int, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> bool:
        """The slot's tokens are kept if its request wants the processor."""
        is_wanted = self._processor.add_request(row, params)
        if is_wanted:
            self._tokens[row] = (prompt_token_ids, output_token_ids)
            for length, count in ((self._state.prompt_len, len(prompt_token_ids)), (self._state.total_len, 0)):
                length.gpu[row] = count
            self._state.prefill_len.gpu[row] = len(prompt_token_ids) + len(output_token_ids)
        return is_wanted

    def remove_row(self, row: int) -> None:
        """The slot is free."""
        self._tokens.pop(row, None)

    def apply(self, logits_NV: "torch.Tensor", rows_N: "np.ndarray") -> "torch.Tensor":
        """Bring the slots up to date, and have the rows edited."""
        import numpy as np
        import torch

        tokens = [prompt + output for prompt, output in map(self._tokens.__getitem__, rows_N.tolist())]
        lengths_N, known_N = np.array(list(map(len, tokens))), self._state.total_len.gpu.cpu()
        for row, ids in zip(rows_N.tolist(), tokens, strict=True):
            new = torch.tensor(ids[int(known_N[row]) :], dtype=torch.int32)
            self._state.all_token_ids.gpu[row, int(known_N[row]) : len(ids)] = new.to(self._state.device)
            self._state.total_len.gpu[row] = len(ids)
        slots, lengths = (torch.from_numpy(each).to(logits_NV.device) for each in (rows_N.astype(np.int64), lengths_N))
        last = torch.tensor([ids[-1] for ids in tokens], device=logits_NV.device)
        self._processor.apply_staged_writes()
        context = LogitsContext(slots, slots, rows_N, torch.zeros_like(slots), last, lengths - 1, lengths_N)
        return self._processor.apply(logits_NV, context)


def _empty_state(config: "EngineConfig", device: "torch.device") -> LogitsProcRequestState:
    import torch

    count, model = config.scheduler.max_num_seqs, config.model
    tokens, *lengths = (
        OnDevice(torch.zeros(count, *more, dtype=torch.int32, device=device))
        for more in ((model.max_model_len,), (), (), ())
    )
    return LogitsProcRequestState(device, count, model.vocab_size, tokens, *lengths)
