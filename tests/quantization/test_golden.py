"""Matrices that the formats' own libraries stored, against what these libraries make of them.

`golden/make.py` made the files; nothing of Quire had a part in it.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from quire.config import HFConfig
from quire.kernels import ops
from quire.quantization import join
from quire.quantization.registry import linear_method

SOURCE = "layers.0.mlp.down_proj"
FILES = sorted((Path(__file__).parent / "golden").glob("*.safetensors"))


def read(path):
    """(quantization_config, tensors by name, dequantised values)."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = json.loads(file.metadata()["quantization_config"])
    worth = tensors.pop("dequantized")
    return config, {f"{SOURCE}.{name.removeprefix('weight.')}": tensor for name, tensor in tensors.items()}, worth


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_matrix_is_worth_what_the_format_s_own_library_makes_of_it(path):
    ops.select("any")
    config, tensors, worth = read(path)
    method = linear_method(None, HFConfig({"quantization_config": config}))
    method.see_names(tensors)
    stored = method.stored(SOURCE)
    given = {suffix: tensors.pop(f"{SOURCE}.{suffix}") for suffix in stored if f"{SOURCE}.{suffix}" in tensors}
    assert not tensors, "tensors that the format does not know"
    shape = tuple(worth.shape)
    for suffix, tensor in given.items():
        axes, dtypes = stored[suffix].axes, stored[suffix].dtypes
        assert axes is None or tensor.numel() == math.prod(axis.length(shape) for axis in axes)
        assert tensor.is_floating_point() if dtypes is None else tensor.dtype in dtypes
    values = join.dense(method.decode(SOURCE, given, shape, torch.float32), torch.float32)
    # A library that computes in a type of 16 bits rounds twice: the product, and what it multiplies.
    torch.testing.assert_close(values, worth.float(), rtol=3 * torch.finfo(worth.dtype).eps, atol=0)
