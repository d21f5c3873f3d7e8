"""Bytes of embeddings are those that PyTorch makes of the same numbers."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.pooling_api.number_formats import to_bytes

TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
FLOATS = (
    st.floats(width=32, allow_nan=False)
    | st.floats(-1, 1, width=32)
    | st.sampled_from([2.0**e for e in range(-24, 17)])
)


def of_torch(numbers, dtype):
    return torch.tensor(numbers, dtype=torch.float32).to(TYPES[dtype]).contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", TYPES)
@settings(deadline=None, max_examples=200)
@given(numbers=st.lists(FLOATS, min_size=1, max_size=50))
def test_numbers_are_rounded_as_pytorch_rounds_them(dtype, numbers):
    with np.errstate(over="ignore"):
        assert to_bytes(np.array(numbers, dtype=np.float32), dtype, sys.byteorder) == of_torch(numbers, dtype)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_every_code_and_every_midpoint_is_right(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(TYPES[dtype]).to(torch.float32)
    exact = codes[torch.isfinite(codes)].sort().values
    numbers = torch.cat([exact, (exact[1:] + exact[:-1]) / 2]).tolist()
    assert to_bytes(np.array(numbers, dtype=np.float32), dtype, "native") == of_torch(numbers, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_big_endian_bytes_are_turned_round(dtype):
    numbers = np.linspace(-1, 1, 7, dtype=np.float32)
    size = len(to_bytes(numbers, dtype, "little")) // 7
    little = np.frombuffer(to_bytes(numbers, dtype, "little"), dtype=np.uint8).reshape(7, size)
    assert to_bytes(numbers, dtype, "big") == little[:, ::-1].tobytes()


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_no_number_stays_none(dtype):
    data = torch.frombuffer(
        bytearray(to_bytes(np.array([np.nan], dtype=np.float32), dtype, sys.byteorder)), dtype=torch.uint8
    )
    assert torch.isnan(data.view(TYPES[dtype]).to(torch.float32)).all()
