"""Transformers' models in float64: what a float32 result of theirs, or of ours, is off by."""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Widened(TorchFunctionMode):
    """Whatever the code inside asks to be float32 (norms, scans and softmaxes do) is float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        named = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*(_widened(value) for value in args), **named)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Code written for float32, over tensors in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


SOURCE = (7, 30, 31, 40, 9)
"""What an encoder reads beside every prompt."""


def inputs_of(model: Any, token_ids: list[int]) -> dict[str, Any]:
    """A prompt as Transformers' model takes it: it is the decoder's where there is an encoder too."""
    ids = torch.tensor([token_ids])
    if model.config.is_encoder_decoder:
        return {"input_ids": torch.tensor([SOURCE]), "decoder_input_ids": ids}
    return {"input_ids": ids}


@functools.lru_cache(maxsize=1)
def _in_float64(model: Any) -> Any:
    return copy.deepcopy(model).double()


@torch.no_grad()
def logprobs_in_float64(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities [T, V] of a model of Transformers, as if it were made for float64."""
    with in_float64():
        inputs = inputs_of(model, token_ids)
        logprobs = _in_float64(model)(**inputs, use_cache=False).logits[0].log_softmax(-1)
    assert logprobs.dtype is torch.float64
    return logprobs
