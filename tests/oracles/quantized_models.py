"""Tiny checkpoints in the number formats that people publish, written from known codes, and what their matrices are worth.

Each writer draws codes, scales and zeros by rounding a matrix, lays them out as the format's own library does (numpy, bit by
bit), and computes the values by the format's definition. Nothing here is shared with `quire.quantization`.
Legend: N outputs, K inputs, G groups of columns.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
NF4_VALUES = np.array(
    [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
     0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0], dtype=np.float32,
)  # fmt: skip

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A matrix in a format: its tensors by suffix, and its values."""

    tensors: Tensors
    worth_NK: np.ndarray


Writer = Callable[[np.ndarray, np.random.Generator], Stored]


@dataclasses.dataclass(frozen=True)
class Format:
    """How to write a checkpoint: what config.json says, and each matrix; some in another way, or plain, by regular expressions
    for their names."""

    section: dict[str, Any]
    write: Writer
    others: Mapping[str, Writer | None] = dataclasses.field(default_factory=dict)

    def writer(self, name: str) -> Writer | None:
        """For a matrix's name."""
        return next((write for pattern, write in self.others.items() if re.search(pattern, name)), self.write)


MATRICES = r"layers\.\d+\..*_proj\.weight$"
"""Names of the matrices of a tiny Llama's layers."""


def is_matrix(name: str) -> bool:
    """Whether a tensor of a tiny model is one of a layer's matrices."""
    return bool(re.search(MATRICES, name))


def store(
    source: Path,
    target: Path,
    form: Format,
    *,
    plain: str = "^$",
    head: bool = False,
    matrices: str = MATRICES,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Write `source` again in a format, and its values as a plain checkpoint into `target`/worth; returns the values.

    Args:
        plain: a regular expression for names of matrices that stay as they are.
        head: the head is written so too.
        matrices: a regular expression for names of what is written in the format.
    """
    rng = np.random.default_rng(seed)
    tensors = load_file(source / "model.safetensors")
    worth = dict(tensors)
    wanted = [name for name in tensors if re.search(matrices, name) or (head and name == "lm_head.weight")]
    for name in [name for name in wanted if not re.search(plain, name)]:
        write = form.writer(name)
        if write is None:
            continue
        stored = write(tensors.pop(name).float().numpy(), rng)
        worth[name] = torch.from_numpy(np.ascontiguousarray(stored.worth_NK, dtype=np.float32))
        base = name.removesuffix("weight")
        tensors.update({base + suffix: tensor.contiguous().clone() for suffix, tensor in stored.tensors.items()})
    _write(source, target, tensors, form.section)
    _write(source, target / "worth", worth, None)
    return worth


def words(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes along an axis in int32 words, the first in the lowest bits; `order`: which code of a word stands where."""
    moved = np.moveaxis(codes.astype(np.int64), axis, -1)
    if 32 % bits:  # one stream of bits
        stream = (moved[..., None] >> np.arange(bits) & 1).reshape(*moved.shape[:-1], -1)
        short = -stream.shape[-1] % 32
        stream = np.concatenate([stream, np.zeros((*moved.shape[:-1], short), np.int64)], -1)
        packed = (stream.reshape(*moved.shape[:-1], -1, 32) << np.arange(32)).sum(-1)
        return torch.from_numpy(np.moveaxis(packed, -1, axis).astype(np.uint32).view(np.int32).copy())
    count = 32 // bits
    short = -moved.shape[-1] % count
    moved = np.concatenate([moved, np.zeros((*moved.shape[:-1], short), np.int64)], -1)
    packed = np.zeros((*moved.shape[:-1], moved.shape[-1] // count), np.int64)
    for place in range(count):
        packed |= moved[..., (order or range(count))[place] :: count] << (bits * place)
    return torch.from_numpy(np.moveaxis(packed, -1, axis).astype(np.uint32).view(np.int32).copy())


def rounded(w_NK: np.ndarray, bits: int, group_K: np.ndarray, symmetric: bool) -> tuple[np.ndarray, ...]:
    """(codes without sign [N, K], float16 scales [N, G], whole zeros [N, G]) by each column's group."""
    groups, top = int(group_K.max()) + 1, 2**bits - 1
    codes = np.zeros(w_NK.shape, np.int64)
    scales = np.zeros((w_NK.shape[0], groups), np.float32)
    zeros = np.zeros((w_NK.shape[0], groups), np.int64)
    for group in range(groups):
        part = w_NK[:, group_K == group]
        if symmetric:
            scales[:, group] = np.abs(part).max(1) / (top // 2)
            zeros[:, group] = 2 ** (bits - 1)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, group] = (high - low) / top
            zeros[:, group] = np.clip(np.round(-low / scales[:, group]), 0, top)
    scales = scales.astype(np.float16).astype(np.float32)
    codes = np.clip(np.round(w_NK / scales[:, group_K]) + zeros[:, group_K], 0, top).astype(np.int64)
    return codes, scales, zeros


def values(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_K: np.ndarray) -> np.ndarray:
    """What codes are worth."""
    return (codes - zeros[:, group_K]).astype(np.float32) * scales[:, group_K]


def half(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float16))


def gptq(bits: int, group: int, *, act_order: bool = False, symmetric: bool = True, v2: bool = False) -> Format:
    """AutoGPTQ's layout; with act order all matrices of one width share their columns' order."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        size = w_NK.shape[1] if group < 0 else group
        group_K = np.arange(w_NK.shape[1]) // size
        if act_order:
            group_K = np.random.default_rng(w_NK.shape[1]).permutation(group_K)
        codes, scales, zeros = rounded(w_NK, bits, group_K, symmetric)
        written = zeros.T if v2 else (zeros.T - 1) & (2**bits - 1)
        tensors = {
            "qweight": words(codes.T, bits, 0),
            "qzeros": words(written, bits, 1),
            "scales": half(scales.T),
            "g_idx": torch.from_numpy(group_K.astype(np.int32)),
        }
        return Stored(tensors, values(codes, scales, zeros, group_K))

    section = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }  # fmt: skip
    return Format(section, write)


def awq(group: int) -> Format:
    """AutoAWQ's `gemm` layout: outputs 0, 2, 4, 6, 1, 3, 5, 7 of every eight in a word, the first in the lowest bits."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        group_K = np.arange(w_NK.shape[1]) // group
        codes, scales, zeros = rounded(w_NK, 4, group_K, False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": words(codes.T, 4, 1, order),
            "qzeros": words(zeros.T, 4, 1, order),
            "scales": half(scales.T),
        }
        return Stored(tensors, values(codes, scales, zeros, group_K))

    section = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(section, write)


def compressed_section(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """compressed-tensors with one group for all linear modules."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def compressed_packed(bits: int, group: int, *, symmetric: bool = True, act_order: bool = False) -> Format:
    """compressed-tensors `pack-quantized`: codes along the inputs, zeros along the outputs."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        size = w_NK.shape[1] if group < 0 else group
        group_K = np.arange(w_NK.shape[1]) // size
        if act_order:
            group_K = np.random.default_rng(w_NK.shape[1]).permutation(group_K)
        codes, scales, zeros = rounded(w_NK, bits, group_K, symmetric)
        tensors = {
            "weight_packed": words(codes, bits, 1),
            "weight_scale": half(scales),
            "weight_shape": torch.tensor(w_NK.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros, bits, 0)
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(group_K.astype(np.int32))
        return Stored(tensors, values(codes, scales, zeros, group_K))

    weights = {"type": "int", "num_bits": bits, "symmetric": symmetric, "actorder": "group" if act_order else None}
    weights |= {"strategy": "channel"} if group < 0 else {"strategy": "group", "group_size": group}
    return Format(compressed_section("pack-quantized", weights), write)


def compressed_int8(by_channel: bool, inputs: str) -> Format:
    """compressed-tensors `int-quantized`; `inputs` is "none", "dynamic" or "static"."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        largest = np.abs(w_NK).max(1, keepdims=True) if by_channel else np.abs(w_NK).max(keepdims=True)
        scale = (largest / 127).astype(np.float32)
        codes = np.clip(np.round(w_NK / scale), -127, 127).astype(np.int8)
        tensors = {"weight": torch.from_numpy(codes), "weight_scale": torch.from_numpy(scale)}
        if not by_channel:
            tensors["weight_scale"] = tensors["weight_scale"].reshape(1)
        if inputs == "static":
            tensors["input_scale"] = torch.tensor([0.05])
        return Stored(tensors, codes.astype(np.float32) * scale)

    weights = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel" if by_channel else "tensor"}
    activations = {
        "none": None,
        "dynamic": {"type": "int", "num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"},
        "static": {"type": "int", "num_bits": 8, "symmetric": True, "dynamic": False, "strategy": "tensor"},
    }
    return Format(compressed_section("int-quantized", weights, activations[inputs]), write)


def fp8_blocks(rows: int, columns: int, compressed: bool) -> Format:
    """A scale a block: DeepSeek's `weight_scale_inv`, or compressed-tensors' `block`."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        count = [-(-w_NK.shape[0] // rows), -(-w_NK.shape[1] // columns)]
        scales, data, worth = (
            np.zeros(count, np.float32),
            torch.empty(w_NK.shape, dtype=torch.float8_e4m3fn),
            w_NK.copy(),
        )
        for i in range(count[0]):
            for j in range(count[1]):
                part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scales[i, j] = np.abs(w_NK[part]).max() / 448
                data[part] = torch.from_numpy(w_NK[part] / scales[i, j]).to(torch.float8_e4m3fn)
                worth[part] = data[part].float().numpy() * scales[i, j]
        suffix = "weight_scale" if compressed else "weight_scale_inv"
        return Stored({"weight": data, suffix: torch.from_numpy(scales)}, worth)

    if not compressed:
        section = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}
        return Format(section, write)
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [rows, columns]}
    inputs = {"type": "float", "num_bits": 8, "strategy": "group", "group_size": columns, "dynamic": True}
    return Format(compressed_section("float-quantized", weights, inputs), write)


def fp8_channels(section: dict[str, Any]) -> Format:
    """A scale an output channel."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        scale = torch.from_numpy(np.abs(w_NK).max(1, keepdims=True) / 448)
        data = (torch.from_numpy(w_NK) / scale).to(torch.float8_e4m3fn)
        return Stored({"weight": data, "weight_scale": scale}, (data.float() * scale).numpy())

    return Format(section, write)


def fbgemm() -> Format:
    return fp8_channels(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    )


def fp8_weights_only() -> Format:
    weights = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
    return fp8_channels(compressed_section("naive-quantized", weights))


def nearest_e2m1(x: np.ndarray) -> np.ndarray:
    """The code of the nearest 4-bit float."""
    return np.abs(x[..., None] - E2M1_VALUES).argmin(-1)


def pairs(codes: np.ndarray) -> torch.Tensor:
    """Two codes a byte, the even column in the low half."""
    return torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))


def nvfp4(modelopt: bool) -> Format:
    """A float8 scale every 16 columns times one number (modelopt), or divided by it (compressed-tensors)."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        whole = np.float32(np.abs(w_NK).max() / (6 * 448))
        groups = np.abs(w_NK.reshape(w_NK.shape[0], -1, 16)).max(-1)
        scale8 = torch.from_numpy(groups / 6 / whole).to(torch.float8_e4m3fn)
        scales = np.repeat(scale8.float().numpy() * whole, 16, 1)
        codes = nearest_e2m1(w_NK / np.maximum(scales, 1e-9))
        tensors = {"weight_scale": scale8}
        if modelopt:
            tensors |= {
                "weight": pairs(codes),
                "weight_scale_2": torch.tensor(whole),
                "input_scale": torch.tensor(0.01),
            }
        else:
            tensors |= {"weight_packed": pairs(codes), "weight_global_scale": torch.tensor([1 / whole])}
            tensors["input_global_scale"] = torch.tensor([100.0])
        return Stored(tensors, E2M1_VALUES[codes] * scales)

    if modelopt:
        section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "group_size": 16}
        return Format(section, write)
    weights = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    return Format(compressed_section("nvfp4-pack-quantized", weights, dict(weights)), write)


def modelopt_fp8() -> Format:
    """A scale a tensor, for weights and for activations."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        scale = torch.tensor(np.abs(w_NK).max() / 448)
        data = (torch.from_numpy(w_NK) / scale).to(torch.float8_e4m3fn)
        tensors = {"weight": data, "weight_scale": scale, "input_scale": torch.tensor(0.05)}
        return Stored(tensors, (data.float() * scale).numpy())

    section = {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    return Format(section, write)


def mxfp4_values(w_NK: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, biased exponents [N, K/32], values)."""
    largest = np.abs(w_NK.reshape(w_NK.shape[0], -1, 32)).max(-1)
    exponents = np.floor(np.log2(np.maximum(largest, 1e-9))) - 2
    scales = np.repeat(np.exp2(exponents), 32, 1).astype(np.float32)
    codes = nearest_e2m1(w_NK / scales)
    return codes, (exponents + 127).astype(np.uint8), E2M1_VALUES[codes] * scales


def compressed_mxfp4() -> Format:
    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        codes, exponents, worth = mxfp4_values(w_NK)
        return Stored({"weight_packed": pairs(codes), "weight_scale": torch.from_numpy(exponents)}, worth)

    weights = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
    return Format(compressed_section("mxfp4-pack-quantized", weights), write)


def bitsandbytes_int8() -> Format:
    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        largest = np.abs(w_NK).max(1)
        codes = np.round(w_NK / largest[:, None] * 127).astype(np.int8)
        tensors = {
            "weight": torch.from_numpy(codes),
            "SCB": torch.from_numpy(largest.astype(np.float32)),
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return Stored(tensors, codes.astype(np.float32) * largest[:, None] / 127)

    return Format({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, write)


def bitsandbytes_nf4(nested: bool) -> Format:
    """Blocks of 64 values of the matrix laid end to end, the earlier of two values in a byte's high half."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        blocks = w_NK.reshape(-1, 64)
        absmax = np.abs(blocks).max(1).astype(np.float32)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(w_NK.shape)}
        tensors: Tensors = {}
        if nested:
            table = np.linspace(-1, 1, 256).astype(np.float32)
            offset = float(absmax.mean())
            coarse = np.abs(absmax - offset).reshape(-1)
            short = -len(coarse) % 256
            coarse = np.concatenate([coarse, np.zeros(short, np.float32)]).reshape(-1, 256).max(1).astype(np.float32)
            spread = np.repeat(coarse, 256)[: len(absmax)]
            codes8 = np.abs(((absmax - offset) / spread)[:, None] - table).argmin(1).astype(np.uint8)
            absmax = table[codes8] * spread + np.float32(offset)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors["weight.nested_absmax"] = torch.from_numpy(coarse)
            tensors["weight.nested_quant_map"] = torch.from_numpy(table)
            tensors["weight.absmax"] = torch.from_numpy(codes8)
        else:
            tensors["weight.absmax"] = torch.from_numpy(absmax)
        codes = np.abs((blocks / absmax[:, None])[..., None] - NF4_VALUES).argmin(-1)
        flat = codes.reshape(-1)
        tensors["weight"] = torch.from_numpy((flat[0::2] << 4 | flat[1::2]).astype(np.uint8)).reshape(-1, 1)
        tensors["weight.quant_map"] = torch.from_numpy(NF4_VALUES)
        text = json.dumps(state).encode()
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return Stored(tensors, (NF4_VALUES[codes] * absmax[:, None]).reshape(w_NK.shape))

    section = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": "uint8",
    }  # fmt: skip
    return Format(section, write)


def torchao_section(kind: str, **facts: Any) -> dict[str, Any]:
    """torchao's configuration, as Transformers writes it."""
    return {
        "quant_method": "torchao", "modules_to_not_convert": ["lm_head"],
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": facts}},
    }  # fmt: skip


def torchao_int8(group: int, *, rounds: bool = False) -> Format:
    """Codes and zero points of a byte; `group` 0: one scale a row."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        group_K = np.arange(w_NK.shape[1]) // (group or w_NK.shape[1])
        codes, scales, zeros = rounded(w_NK, 8, group_K, symmetric=rounds)
        tensors = {
            "_weight_qdata": torch.from_numpy((codes - 128).astype(np.int8)),
            "_weight_scale": torch.from_numpy(scales),
            "_weight_zero_point": torch.from_numpy((zeros - 128).astype(np.int8)),
        }
        return Stored(tensors, values(codes, scales, zeros, group_K))

    if rounds:
        return Format(torchao_section("Int8DynamicActivationInt8WeightConfig"), write)
    granularity = {"_type": "PerGroup", "_data": {"group_size": group}} if group else {"_type": "PerRow", "_data": {}}
    packing = {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"}
    return Format(torchao_section("IntxWeightOnlyConfig", granularity=granularity, intx_packing_format=packing), write)


def torchao_int4(group: int) -> Format:
    """Signed codes two a byte, worth code * scale + zero point, which is a float; scales lie group by group."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        groups = w_NK.reshape(w_NK.shape[0], -1, group)
        low, high = groups.min(-1), groups.max(-1)
        scale = ((high - low) / 15).astype(np.float32)
        codes = np.clip(np.round((groups - low[..., None]) / scale[..., None]), 0, 15).astype(np.int64) - 8
        zero = low + 8 * scale
        flat = codes.reshape(w_NK.shape) & 15
        tensors = {
            "_weight_qdata": torch.from_numpy((flat[:, 0::2] | flat[:, 1::2] << 4).astype(np.uint8).view(np.int8)),
            "_weight_scale": torch.from_numpy(scale.T.copy()),
            "_weight_zero_point": torch.from_numpy(zero.T.copy()),
        }
        return Stored(tensors, (codes * scale[..., None] + zero[..., None]).reshape(w_NK.shape))

    packing = {"_type": "Int4PackingFormat", "_data": "PLAIN"}
    return Format(torchao_section("Int4WeightOnlyConfig", group_size=group, int4_packing_format=packing), write)


def torchao_fp8() -> Format:
    """A scale a row; activations are not rounded."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        scale = torch.from_numpy(np.abs(w_NK).max(1, keepdims=True) / 448)
        data = (torch.from_numpy(w_NK) / scale).to(torch.float8_e4m3fn)
        return Stored({"_weight_qdata": data, "_weight_scale": scale}, (data.float() * scale).numpy())

    return Format(
        torchao_section("Float8WeightOnlyConfig", granularity={"_type": "PerRow", "_data": {"dim": -1}}), write
    )


WEIGHT_ONLY = {
    "gptq 4 bits": gptq(4, 32),
    "gptq 4 bits, one group": gptq(4, -1),
    "gptq 4 bits, asymmetric": gptq(4, 32, symmetric=False),
    "gptq 4 bits, act order": gptq(4, 32, act_order=True),
    "gptq 8 bits, act order": gptq(8, 16, act_order=True),
    "gptq 8 bits, asymmetric, v2": gptq(8, 32, symmetric=False, v2=True),
    "gptq 4 bits, v2": gptq(4, 16, v2=True),
    "gptq 2 bits": gptq(2, 16),
    "awq": awq(32),
    "compressed 4 bits": compressed_packed(4, 32),
    "compressed 4 bits, asymmetric": compressed_packed(4, 16, symmetric=False),
    "compressed 4 bits, act order": compressed_packed(4, 32, act_order=True),
    "compressed 8 bits, channels": compressed_packed(8, -1),
    "compressed 8 bits, asymmetric": compressed_packed(8, 32, symmetric=False),
    "compressed int8 weights": compressed_int8(True, "none"),
    "compressed nvfp4": nvfp4(False),
    "compressed mxfp4": compressed_mxfp4(),
    "modelopt nvfp4": nvfp4(True),
    "bitsandbytes int8": bitsandbytes_int8(),
    "bitsandbytes nf4": bitsandbytes_nf4(False),
    "bitsandbytes nf4, nested": bitsandbytes_nf4(True),
    "torchao int8": torchao_int8(0),
    "torchao int8, groups": torchao_int8(32),
    "torchao int4": torchao_int4(32),
}
"""Formats whose activations are not rounded."""
ROUNDING = {
    "compressed int8, channels": compressed_int8(True, "dynamic"),
    "compressed int8, tensor, static": compressed_int8(False, "static"),
    "torchao int8, activations too": torchao_int8(0, rounds=True),
}
"""Formats whose activations are rounded to int8."""
FLOAT8 = {
    "fp8 blocks": fp8_blocks(128, 128, False),
    "fp8 small blocks": fp8_blocks(32, 64, False),
    "compressed fp8 blocks": fp8_blocks(32, 32, True),
    "compressed fp8 weights": fp8_weights_only(),
    "fbgemm": fbgemm(),
    "modelopt fp8": modelopt_fp8(),
    "torchao fp8": torchao_fp8(),
}
"""Formats in float8, which a CPU makes plain."""


def store_mxfp4_experts(source: Path, target: Path) -> None:
    """gpt-oss: all experts of a layer in `*_blocks` [E, N, K/32, 16] and `*_scales`, from [E, K, N]; and what they are worth."""
    tensors = load_file(source / "model.safetensors")
    worth = dict(tensors)
    for name in [name for name in tensors if re.search(r"experts\.(gate_up|down)_proj$", name)]:
        w_ENK = tensors.pop(name).float().numpy().swapaxes(1, 2)
        codes, exponents, values = (np.stack(part) for part in zip(*map(mxfp4_values, w_ENK), strict=True))
        low_high = codes.reshape(*codes.shape[:2], -1, 16, 2)
        blocks = (low_high[..., 0] | low_high[..., 1] << 4).astype(np.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = (
            torch.from_numpy(blocks),
            torch.tensor(exponents.tolist(), dtype=torch.uint8),
        )
        worth[name] = torch.from_numpy(values.swapaxes(1, 2).copy())
    section = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    _write(source, target, tensors, section)
    _write(source, target / "worth", worth, None)


def _write(source: Path, folder: Path, tensors: Tensors, section: dict[str, Any] | None) -> None:
    """A checkpoint with other tensors, and perhaps a description of their format."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors")
    if section is not None:
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": section}
        (folder / "config.json").write_text(json.dumps(config))
