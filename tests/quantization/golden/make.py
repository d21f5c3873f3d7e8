"""Makes the golden checkpoints: one small matrix in each format, written and dequantised by the format's own library.

    python tests/quantization/golden/make.py [NAME ...]

Run it in an environment of its own: no test imports these libraries. Each file holds the matrix's tensors as the library stores
them (`weight.` and a suffix), and the values that the library computes from them, in its own type (`dequantized`). Its metadata
has the `quantization_config`, the library and its version.
"""

import importlib.metadata
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent
OUTPUTS, INPUTS, GROUP = 32, 128, 32
Tensors = dict[str, torch.Tensor]
Made = tuple[dict[str, Any], Tensors, torch.Tensor]
"""(`quantization_config`, tensors by suffix, dequantised values)."""


def matrix() -> torch.Tensor:
    """Values with some outliers."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.05
    values[:, ::41] *= 4
    return values


def linear(dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=dtype)
    layer.weight.data = matrix().to(dtype)
    return layer


def rounded(bits: int, group: int, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, zeros), each [outputs, groups]: what a calibration gives the packing functions of AutoAWQ and GPTQModel."""
    groups = matrix().unflatten(1, (-1, group))
    if symmetric:
        scales = groups.abs().amax(-1) / (2 ** (bits - 1) - 1)
        return scales, torch.full_like(scales, 2 ** (bits - 1))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = (high - low) / (2**bits - 1)
    return scales, (-low / scales).round()


def compressed(stored_as: str, compressor: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Made:
    """One scheme of compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    given = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    scheme = QuantizationScheme(**given)
    values, kind = matrix(), scheme.weights.strategy
    state: Tensors = {"weight": values}
    whole = None
    if kind == "tensor":
        pieces = values.reshape(1, -1)
    elif kind == "channel":
        pieces = values
    elif kind == "block":
        rows, columns = scheme.weights.block_structure
        pieces = values.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
    else:
        pieces = values.unflatten(1, (-1, scheme.weights.group_size))
    if kind == "tensor_group":
        whole = generate_gparam(values.amin(), values.amax())
        state["weight_global_scale"] = whole
    scale, zero = calculate_qparams(pieces.amin(-1), pieces.amax(-1), scheme.weights, whole)
    if kind == "channel":
        scale, zero = scale[:, None], zero[:, None]
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    library = BaseCompressor.get_value_from_registry(compressor)
    stored = library.compress(state, scheme)
    worth = library.decompress(stored, scheme)["weight"]
    group = json.loads(scheme.model_dump_json())
    config = {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "config_groups": {"group_0": group},
        "ignore": [],
    }
    return config, stored, worth


def compressed_int(bits: int, strategy: str, *, symmetric: bool = True, **more: Any) -> Made:
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, **more}
    return compressed("pack-quantized", "pack-quantized", weights)


def gptq(bits: int, *, symmetric: bool, version: str, ordered: bool = False) -> Made:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    scales, zeros = rounded(bits, GROUP, symmetric=symmetric)
    group_K = torch.arange(INPUTS, dtype=torch.int32) // GROUP
    if ordered:
        group_K = group_K[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))]
    layer = TorchLinear(bits, GROUP, symmetric, ordered, INPUTS, OUTPUTS)
    layer.pack(linear(), scales, zeros, group_K)
    layer.post_init()
    layer.eval()
    worth = layer.dequantize_weight().T
    if version == "gptq":
        convert_gptq_v2_to_v1_format_module(layer, types.SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    stored = dict(layer.state_dict())
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": ordered}
    return config | {"checkpoint_format": version, "pack_dtype": "int32"}, stored, worth


def awq() -> Made:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    scales, zeros = rounded(4, GROUP, symmetric=False)
    layer = WQLinear_GEMM.from_linear(linear(torch.float16), 4, GROUP, False, scales.T.half(), zeros.T)
    worth = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, GROUP).T
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return config, dict(layer.state_dict()), worth


def auto_round(bits: int, *, symmetric: bool) -> Made:
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    scales, zeros = rounded(bits, GROUP, symmetric=symmetric)
    layer = QuantLinear(bits, GROUP, INPUTS, OUTPUTS, bias=False)
    layer.device = torch.device("cpu")
    layer.pack(linear(), scales, zeros, None, device="cpu")
    layer.post_init()
    worth = layer(torch.eye(INPUTS).half()).T
    config = {"quant_method": "auto-round", "bits": bits, "group_size": GROUP, "sym": symmetric, "data_type": "int"}
    return config | {"packing_format": "auto_round:auto_gptq"}, dict(layer.state_dict()), worth


def hqq(bits: int, axis: int) -> Made:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=bits, group_size=GROUP, axis=axis)
    layer = HQQLinear(linear(), config, compute_dtype=torch.float32, device="cpu", del_orig=False)
    stored = {name: value for name, value in layer.state_dict().items() if isinstance(value, torch.Tensor)}
    weights = {"nbits": bits, "group_size": GROUP, "axis": axis}
    section = {"quant_method": "hqq", "quant_config": {"weight_quant_params": weights}, "skip_modules": ["lm_head"]}
    return section, stored, layer.dequantize()


def torchao(name: str, **options: Any) -> Made:
    import torchao.quantization as library
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    config = getattr(library, name)(**options)
    layer = linear(torch.bfloat16)
    library.quantize_(layer, config)
    stored, _ = flatten_tensor_state_dict({"layer.weight": layer.weight})
    stored = {name.removeprefix("layer."): tensor for name, tensor in stored.items()}
    section = {"quant_method": "torchao", "quant_type": {"default": config_to_dict(config)}}
    return section, stored, layer.weight.dequantize()


def bitsandbytes(kind: str, *, nested: bool = False) -> Made:
    import bitsandbytes as library

    if kind == "int8":
        layer = library.nn.Linear8bitLt(INPUTS, OUTPUTS, bias=False, has_fp16_weights=False)
        layer.weight = library.nn.Int8Params(matrix().half(), requires_grad=False, has_fp16_weights=False)
        layer = layer.to("cpu")
        codes, scales, _ = library.functional.int8_vectorwise_quant(matrix().half())
        stored = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return {"quant_method": "bitsandbytes", "load_in_8bit": True}, stored, codes.float() * scales[:, None] / 127
    layer = library.nn.Linear4bit(INPUTS, OUTPUTS, bias=False, quant_type=kind, compress_statistics=nested)
    layer.weight = library.nn.Params4bit(
        matrix().half(), requires_grad=False, quant_type=kind, compress_statistics=nested, blocksize=64
    )
    layer = layer.to("cpu")
    worth = library.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    section = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    return {"quant_method": "bitsandbytes", **section}, dict(layer.state_dict()), worth


INT8_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
FP4_BITS = {"num_bits": 4, "type": "float", "symmetric": True}
LIBRARIES = {
    "compressed": "compressed-tensors",
    "gptq": "GPTQModel",
    "awq": "autoawq",
    "auto": "auto-round",
    "hqq": "hqq",
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
}
"""By a name's first word, the distribution that makes it."""
MAKERS: dict[str, Callable[[], Made]] = {
    "compressed int4 group": lambda: compressed_int(4, "group", group_size=GROUP),
    "compressed int4 group asymmetric": lambda: compressed_int(4, "group", group_size=GROUP, symmetric=False),
    "compressed int3 channel": lambda: compressed_int(3, "channel"),
    "compressed int8 group": lambda: compressed_int(8, "group", group_size=GROUP),
    "compressed int8 channel": lambda: compressed(
        "int-quantized",
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        INT8_INPUTS,
    ),
    "compressed int8 asymmetric": lambda: compressed(
        "int-quantized", "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
    ),
    "compressed fp8 tensor": lambda: compressed(
        "float-quantized", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}
    ),
    "compressed fp8 block": lambda: compressed(
        "float-quantized",
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    ),
    "compressed nvfp4": lambda: compressed(
        "nvfp4-pack-quantized",
        "nvfp4-pack-quantized",
        {**FP4_BITS, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    ),
    "compressed mxfp4": lambda: compressed(
        "mxfp4-pack-quantized",
        "mxfp4-pack-quantized",
        {**FP4_BITS, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "gptq int4": lambda: gptq(4, symmetric=True, version="gptq"),
    "gptq int4 asymmetric v2": lambda: gptq(4, symmetric=False, version="gptq_v2"),
    "gptq int3 asymmetric": lambda: gptq(3, symmetric=False, version="gptq"),
    "gptq int8 ordered": lambda: gptq(8, symmetric=False, version="gptq", ordered=True),
    "awq gemm": awq,
    "auto-round int4": lambda: auto_round(4, symmetric=True),
    "auto-round int4 asymmetric": lambda: auto_round(4, symmetric=False),
    "hqq int4": lambda: hqq(4, 1),
    "hqq int3": lambda: hqq(3, 1),
    "hqq int4 axis 0": lambda: hqq(4, 0),
    "torchao int8": lambda: torchao("Int8WeightOnlyConfig", version=2),
    "torchao int8 activations": lambda: torchao("Int8DynamicActivationInt8WeightConfig", version=2),
    "torchao fp8": lambda: torchao("Float8WeightOnlyConfig", version=2),
    "bitsandbytes nf4": lambda: bitsandbytes("nf4"),
    "bitsandbytes nf4 nested": lambda: bitsandbytes("nf4", nested=True),
    "bitsandbytes fp4": lambda: bitsandbytes("fp4"),
    "bitsandbytes int8": lambda: bitsandbytes("int8"),
}


def main(names: list[str]) -> None:
    for name in names or MAKERS:
        config, tensors, worth = MAKERS[name]()
        library = LIBRARIES[name.replace("-", " ").split()[0]]
        facts = {
            "quantization_config": json.dumps(config),
            "made_by": f"{library} {importlib.metadata.version(library)}",
        }
        contents = {f"weight.{suffix}": tensor.detach().contiguous().clone() for suffix, tensor in tensors.items()}
        contents["dequantized"] = worth.detach().contiguous()
        save_file(contents, FOLDER / f"{name.replace(' ', '_')}.safetensors", facts)


if __name__ == "__main__":
    main(sys.argv[1:])
