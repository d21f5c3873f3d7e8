"""More layouts of quantized checkpoints, as `quantized_models.py`: other packings, ragged groups, mixtures of schemes.

Legend: N outputs, K inputs, G groups of columns.
"""

import dataclasses
import json
from typing import Any

import numpy as np
import torch
from tests.oracles import quantized_models as basic
from tests.oracles.quantized_models import Format, Stored, Writer, half, rounded, values, words

E2M1, pairs = basic.E2M1_VALUES, basic.pairs


def groups_of(w_NK: np.ndarray, group: int) -> np.ndarray:
    """Which group each column belongs to; the last may be shorter."""
    return np.arange(w_NK.shape[1]) // (w_NK.shape[1] if group < 0 else group)


def awq_gemv(group: int) -> Format:
    """Codes along the inputs one after another; zeros and scales of a row filled up to 32 groups of 32, or 16 of 64."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        group_K = groups_of(w_NK, group)
        codes, scales, zeros = rounded(w_NK, 4, group_K, False)
        width = 8 * {32: 4, 64: 2, 128: 1}[group]
        wide = ((0, 0), (0, -scales.shape[1] % width))
        tensors = {
            "qweight": words(codes, 4, 1),
            "qzeros": words(np.pad(zeros, wide), 4, 1),
            "scales": half(np.pad(scales, wide)),
        }
        return Stored(tensors, values(codes, scales, zeros, group_K))

    section = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemv"}
    return Format(section, write)


def auto_round(packing: str, form: Format, **facts: Any) -> Format:
    """Another format's tensors under AutoRound's description."""
    section = {"quant_method": "auto-round", "packing_format": packing, "sym": True, "data_type": "int"}
    given = {name: form.section[name] for name in ("bits", "group_size") if name in form.section}
    return Format(section | given | {"block_name_to_quantize": "model.layers"} | facts, form.write, form.others)


def auto_round_mixed() -> Format:
    """Values in 8 bits by name, `down` in 2 bits by a regular expression, output projections plain."""
    extra = {"model.layers.1.self_attn.v_proj": {"bits": 8}, r".*mlp\.down.*": {"bits": 2, "group_size": 16}}
    extra |= {f"model.layers.{i}.self_attn.o_proj": {"bits": 16, "data_type": "float"} for i in range(3)}
    form = auto_round("auto_round:auto_gptq", basic.gptq(4, 32), extra_config=extra)
    others = {r"1\.self_attn\.v_proj": basic.gptq(8, 32).write, "down_proj": basic.gptq(2, 16).write}
    return dataclasses.replace(form, others=others | {"o_proj": None})


def gptq_dynamic() -> Format:
    """Rules of GPTQModel: the first layer's queries stay plain, `up` has 8 bits."""
    form = basic.gptq(4, 32)
    dynamic = {r"-:.*layers\.0\..*q_proj.*": {}, r"+:.*\.up_proj.*": {"bits": 8, "group_size": 16}}
    others: dict[str, Writer | None] = {r"layers\.0\..*q_proj": None, "up_proj": basic.gptq(8, 16).write}
    return Format(form.section | {"dynamic": dynamic}, form.write, others)


def hqq(
    bits: int, group: int | None, axis: int = 1, *, as_floats: bool = False, by_tag: bool = False,
    rounds_scales: bool = False,
) -> Format:  # fmt: skip
    """Rows of a group each; packed rows hold, from the highest bits on, the first part of the rows, then the next."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        width = group or w_NK.shape[1]
        rows = w_NK.reshape(-1, width) if axis == 1 else w_NK.reshape(width, -1)
        low, high = rows.min(axis, keepdims=True), rows.max(axis, keepdims=True)
        scale = ((high - low) / (2**bits - 1)).astype(np.float32)
        zero = (-low / scale).astype(np.float32)
        codes = np.clip(np.round(rows / scale + zero), 0, 2**bits - 1).astype(np.int64)
        stored_bits = 8 if bits > 4 else bits
        count = 10 if bits == 3 else 8 // stored_bits
        filled = np.concatenate([codes, np.zeros((-len(codes) % count, codes.shape[1]), np.int64)])
        parts = np.split(filled, count)
        packed = sum(part << stored_bits * (count - 1 - i) for i, part in enumerate(parts))
        data = torch.from_numpy(packed.astype(np.int32 if bits == 3 else np.uint8))
        text = torch.tensor(list(b"torch.float32"), dtype=torch.uint8)
        tensors = {
            "W_q": data.view(torch.float16) if as_floats else data,
            "scale": torch.from_numpy(scale),
            "zero": torch.from_numpy(zero),
            "nbits": torch.tensor(bits, dtype=torch.int32),
            "group_size": torch.tensor(width, dtype=torch.int32),
            "shape": torch.tensor(w_NK.shape),
            "axis": torch.tensor(axis, dtype=torch.int32),
            "view_as_float": torch.tensor(int(as_floats), dtype=torch.uint8),
            "compute_dtype": text,
            "encoded_state_dict": torch.tensor(1, dtype=torch.uint8),
        }
        return Stored(tensors, ((codes - zero) * scale).reshape(w_NK.shape).astype(np.float32))

    params = {"nbits": bits, "group_size": group, "axis": axis, "view_as_float": as_floats, "channel_wise": True}
    ignored = {"nbits": 8, "channel_wise": True, "group_size": 128, "optimize": False} if rounds_scales else None
    config: dict[str, Any] = {"weight_quant_params": params} | dict.fromkeys(
        ("scale_quant_params", "zero_quant_params"), ignored
    )
    others: dict[str, Writer | None] = {}
    if by_tag:
        tags = [f"self_attn.{name}_proj" for name in "qkv"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        config, others = dict.fromkeys(tags, config), {"o_proj": None}
    return Format({"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]}, write, others)


def quark_section(weight: dict[str, Any], inputs: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    """Quark's description with one type for all matrices but the head."""
    return {
        "quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": inputs},
        "layer_quant_config": {}, "layer_type_quant_config": {}, "exclude": ["lm_head"],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized", "kv_cache_group": []}, **facts,
    }  # fmt: skip


def quark_fp8(by_channel: bool) -> Format:
    """Scales as [N] or one number; activations by token, or with a stored scale."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        w = torch.from_numpy(w_NK)
        scale = w.abs().amax(1) / 448 if by_channel else w.abs().max() / 448
        data = (w / (scale[:, None] if by_channel else scale)).to(torch.float8_e4m3fn)
        tensors = {"weight": data, "weight_scale": scale} | ({} if by_channel else {"input_scale": torch.tensor(0.05)})
        return Stored(tensors, (data.float() * (scale[:, None] if by_channel else scale)).numpy())

    sharing = "per_channel" if by_channel else "per_tensor"
    facts = {"dtype": "fp8_e4m3", "qscheme": sharing, "is_dynamic": False, "symmetric": True}
    return Format(quark_section(facts, facts | {"is_dynamic": by_channel}), write)


def quark_mxfp4() -> Format:
    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        codes, exponents, worth = basic.mxfp4_values(w_NK)
        return Stored({"weight": pairs(codes), "weight_scale": torch.from_numpy(exponents)}, worth)

    facts = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    return Format(quark_section(facts, facts | {"is_dynamic": True}), write)


def quark_int4(group: int, *, signed: bool, reorders: bool) -> Format:
    """Words along the outputs, rows of inputs; scales and zeros too."""
    order = (0, 2, 4, 6, 1, 3, 5, 7) if reorders else None

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        group_K = groups_of(w_NK, group)
        codes, scales, zeros = rounded(w_NK, 4, group_K, signed)
        shift = 8 if signed else 0
        tensors = {
            "weight": words((codes - shift & 15).T, 4, 1, order),
            "weight_zero_point": words((zeros - shift & 15).T, 4, 1, order),
            "weight_scale": torch.from_numpy(scales.T.copy()),
        }
        return Stored(tensors, values(codes, scales, zeros, group_K))

    facts = {"dtype": "int4" if signed else "uint4", "qscheme": "per_group", "group_size": group}
    export = {"pack_method": "reorder" if reorders else "order", "weight_format": "real_quantized"}
    return Format(quark_section(facts, export=export), write)


def quark_int8(inputs: str) -> Format:
    """A scale a channel; `inputs`: "none" or "static"."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        scale = (np.abs(w_NK).max(1) / 127).astype(np.float32)
        codes = np.round(w_NK / scale[:, None]).astype(np.int8)
        zeros = torch.zeros(len(scale), dtype=torch.int8)
        tensors = {
            "weight": torch.from_numpy(codes),
            "weight_scale": torch.from_numpy(scale),
            "weight_zero_point": zeros,
        }
        if inputs == "static":
            tensors |= {"input_scale": torch.tensor(0.05), "input_zero_point": torch.tensor(0, dtype=torch.int8)}
        return Stored(tensors, codes.astype(np.float32) * scale[:, None])

    facts = {"dtype": "int8", "qscheme": "per_channel", "symmetric": True, "is_dynamic": False}
    given = {"dtype": "int8", "qscheme": "per_tensor", "symmetric": True, "is_dynamic": False}
    return Format(quark_section(facts, given if inputs == "static" else None), write)


def modelopt(algorithm: str) -> Format:
    """Float8 by channel, by block (in four dimensions), or in MXFP8; int8; 4 bits with numbers for inputs."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        if algorithm.startswith("W8"):
            stored = basic.compressed_int8(True, "static").write(w_NK, rng)
            inputs = {"input_scale": torch.tensor(0.05)} if algorithm != "W8A16" else {}
            tensors = {
                "weight": stored.tensors["weight"],
                "weight_scale": stored.tensors["weight_scale"][:, 0],
            } | inputs
            return Stored(tensors, stored.worth_NK)
        if algorithm == "W4A16_AWQ":
            return _awq_of_modelopt(w_NK, rng)
        if algorithm == "MXFP8":
            return mxfp8_values(w_NK)
        if algorithm == "FP8_PB_WO":
            stored = basic.fp8_blocks(128, 128, compressed=True).write(w_NK, rng)
            tensors = stored.tensors | {"weight_scale": stored.tensors["weight_scale"][:, None, :, None]}
            return Stored(tensors, stored.worth_NK)
        stored = basic.fp8_channels({}).write(w_NK, rng)
        return Stored(stored.tensors | {"weight_scale": stored.tensors["weight_scale"][:, 0]}, stored.worth_NK)

    facts = {"quant_algo": algorithm, "exclude_modules": ["lm_head"], "group_size": 32}
    return Format({"quant_method": "modelopt", "quantization": facts}, write)


def _awq_of_modelopt(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
    group_K = groups_of(w_NK, 32)
    codes, scales, zeros = rounded(w_NK, 4, group_K, True)
    bits = (codes - 8) & 15
    per_input = (rng.random(w_NK.shape[1]) + 0.5).astype(np.float32)
    tensors = {
        "weight": torch.from_numpy((bits[0::2] | bits[1::2] << 4).astype(np.uint8)),
        "weight_scale": torch.from_numpy(scales),
        "pre_quant_scale": torch.from_numpy(per_input),
    }
    return Stored(tensors, values(codes, scales, zeros, group_K) * per_input)


def modelopt_mixed() -> Format:
    """Float8 for attention, NVFP4 for the rest, of which `gate` stays plain."""
    layers = {
        f"model.layers.{i}.{name}": {"quant_algo": "FP8" if "attn" in name else "NVFP4"}
        for i in range(3)
        for name in (*(f"self_attn.{part}_proj" for part in "qkvo"), "mlp.up_proj", "mlp.down_proj")
    }
    others: dict[str, Writer | None] = {"self_attn": basic.modelopt_fp8().write, "gate_proj": None}
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return Format(section, basic.nvfp4(modelopt=True).write, others)


def mxfp8_values(w_NK: np.ndarray) -> Stored:
    """Powers of two every 32 columns, as biased exponents."""
    largest = np.abs(w_NK.reshape(w_NK.shape[0], -1, 32)).max(-1)
    exponents = np.floor(np.log2(np.maximum(largest, 1e-9))) - 8
    scales = np.repeat(np.exp2(exponents), 32, 1).astype(np.float32)
    data = torch.from_numpy(w_NK / scales).to(torch.float8_e4m3fn)
    tensors = {"weight": data, "weight_scale": torch.from_numpy((exponents + 127).astype(np.uint8))}
    return Stored(tensors, data.float().numpy() * scales)


def compressed_mxfp8() -> Format:
    weights = {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return Format(basic.compressed_section("mxfp8-quantized", weights), lambda w_NK, rng: mxfp8_values(w_NK))


def compressed_mxfp6() -> Format:
    """Floats of 6 bits (a sign, two bits of exponent, three of mantissa), four in three bytes, the first in the lowest bits."""
    magnitudes = [m / 8 for m in range(8)] + [(1 + m / 8) * 2**e for e in range(3) for m in range(8)]
    table = np.array([*magnitudes, *(-m for m in magnitudes)], np.float32)

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        groups = w_NK.reshape(w_NK.shape[0], -1, 32)
        exponents = np.floor(np.log2(np.maximum(np.abs(groups).max(-1), 1e-9))) - 2
        scales = np.repeat(np.exp2(exponents), 32, 1).astype(np.float32)
        codes = np.abs((w_NK / scales)[..., None] - table).argmin(-1)
        fours = (codes.reshape(w_NK.shape[0], -1, 4) << np.arange(0, 24, 6)).sum(-1)
        packed = (fours[..., None] >> np.arange(0, 24, 8) & 255).astype(np.uint8).reshape(w_NK.shape[0], -1)
        tensors = {
            "weight_packed": torch.from_numpy(packed),
            "weight_scale": torch.from_numpy((exponents + 127).astype(np.uint8)),
        }
        return Stored(tensors, table[codes] * scales)

    weights = {"type": "float", "num_bits": 6, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return Format(basic.compressed_section("mxfp6-pack-quantized", weights), write)


def compressed_shared(bits: int, rows: int, columns: int, inputs: dict[str, Any] | None = None) -> Format:
    """Packed integers with a scale and a zero a block of rows and columns; 0 of each: one of both for the matrix."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        height, width = rows or w_NK.shape[0], columns or w_NK.shape[1]
        blocks = w_NK.reshape(w_NK.shape[0] // height, height, -1, width).swapaxes(1, 2)
        low, high = blocks.min((2, 3)), blocks.max((2, 3))
        scale = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
        zero = np.clip(np.round(-low / scale), 0, 2**bits - 1)
        wide = [np.repeat(np.repeat(each, height, 0), width, 1) for each in (scale, zero)]
        codes = np.clip(np.round(w_NK / wide[0]) + wide[1], 0, 2**bits - 1).astype(np.int64)
        shape = scale.shape if rows else (1,)
        tensors = {
            "weight_packed": words(codes, bits, 1),
            "weight_scale": half(scale.reshape(shape)),
            "weight_zero_point": torch.from_numpy((zero - 2 ** (bits - 1)).astype(np.int8).reshape(shape)),
            "weight_shape": torch.tensor(w_NK.shape),
        }
        return Stored(tensors, ((codes - wide[1]) * wide[0]).astype(np.float32))

    weights: dict[str, Any] = {"type": "int", "num_bits": bits, "symmetric": False, "strategy": "tensor"}
    weights |= {"strategy": "block", "block_structure": [rows, columns]} if rows else {}
    return Format(basic.compressed_section("pack-quantized", weights, inputs), write)


def compressed_int8_for(kind: str, bits: int) -> Format:
    """Int8 weights for activations in another type, which are left as they are."""
    form = basic.compressed_int8(True, "none")
    inputs = {"type": kind, "num_bits": bits, "symmetric": True, "dynamic": True, "strategy": "token"}
    weights = form.section["config_groups"]["group_0"]["weights"]
    return Format(basic.compressed_section("int-quantized", weights, inputs), form.write)


def compressed_int8_asymmetric(group: int) -> Format:
    """Weights and activations with zeros: int8 codes and int8 zeros."""

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        group_K = groups_of(w_NK, group)
        codes, scales, zeros = rounded(w_NK, 8, group_K, False)
        tensors = {
            "weight": torch.from_numpy((codes - 128).astype(np.int8)),
            "weight_scale": torch.from_numpy(scales),
            "weight_zero_point": torch.from_numpy((zeros - 128).astype(np.int8)),
            "input_scale": torch.tensor([0.05]),
            "input_zero_point": torch.tensor([3], dtype=torch.int8),
        }
        return Stored(tensors, values(codes, scales, zeros, group_K))

    weights = {"type": "int", "num_bits": 8, "symmetric": False} | (
        {"strategy": "channel"} if group < 0 else {"strategy": "group", "group_size": group}
    )
    inputs = {"type": "int", "num_bits": 8, "symmetric": False, "dynamic": False, "strategy": "tensor"}
    return Format(basic.compressed_section("int-quantized", weights, inputs), write)


def compressed_int8_asymmetric_inputs() -> Format:
    """Symmetric weights; activations by token, with zeros."""
    form = basic.compressed_int8(True, "none")
    inputs = {"type": "int", "num_bits": 8, "symmetric": False, "dynamic": True, "strategy": "token"}
    weights = form.section["config_groups"]["group_0"]["weights"]
    return Format(basic.compressed_section("int-quantized", weights, inputs), form.write)


def compressed_mixed() -> Format:
    """Three groups with formats of their own, an ignored regular expression, and activations that 4-bit weights pass over."""
    four, eight, float8 = basic.compressed_packed(4, 32), basic.compressed_int8(True, "none"), basic.fp8_weights_only()

    def group(form: Format, stored_as: str, targets: list[str], **facts: Any) -> dict[str, Any]:
        return form.section["config_groups"]["group_0"] | {"targets": targets, "format": stored_as, **facts}

    int8_inputs = {"type": "int", "num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"}
    section = {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head", "re:.*layers.1.*o_proj$"],
        "config_groups": {
            "a": group(four, "pack-quantized", ["Linear"], input_activations=int8_inputs),
            "b": group(eight, "int-quantized", ["re:.*down_proj", "model.layers.0.self_attn.v_proj"]),
            "c": group(float8, "float-quantized", ["re:.*gate_proj"]),
        },
    }  # fmt: skip
    others: dict[str, Writer | None] = {
        r"1\.self_attn\.o_proj": None, r"down_proj|0\.self_attn\.v_proj": eight.write, "gate_proj": float8.write,
    }  # fmt: skip
    return Format(section, four.write, others)


def bitsandbytes_as(kind: str, storage: torch.dtype) -> Format:
    """nf4 or fp4, whose bytes may be stored as another type."""
    table = basic.NF4_VALUES if kind == "nf4" else np.array(
        [0, 0.0052083, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25], np.float32
    )  # fmt: skip
    table = table if kind == "nf4" else np.concatenate([table, -table])

    def write(w_NK: np.ndarray, rng: np.random.Generator) -> Stored:
        blocks = w_NK.reshape(-1, 64)
        absmax = np.abs(blocks).max(1).astype(np.float32)
        codes = np.abs((blocks / absmax[:, None])[..., None] - table).argmin(-1)
        flat = codes.reshape(-1)
        state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(w_NK.shape)}
        data = torch.from_numpy((flat[0::2] << 4 | flat[1::2]).astype(np.uint8)).view(storage).reshape(-1, 1)
        tensors = {
            "weight": data,
            "weight.absmax": torch.from_numpy(absmax),
            "weight.quant_map": torch.from_numpy(table),
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
        return Stored(tensors, (table[codes] * absmax[:, None]).reshape(w_NK.shape))

    section = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
        "bnb_4bit_quant_storage": str(storage).removeprefix("torch."),
    }  # fmt: skip
    return Format(section, write)


def torchao_by_name() -> Format:
    """A configuration for all, another by a regular expression, and None for a module in full."""
    eight, four = basic.torchao_int8(32), basic.torchao_int4(32)
    configs: dict[str, Any] = {
        "_default": eight.section["quant_type"]["default"], r"re:.*up_proj": four.section["quant_type"]["default"],
        "model.layers.0.self_attn.k_proj": None,
    }  # fmt: skip
    facts = {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": configs}}
    section = {"quant_method": "torchao", "modules_to_not_convert": ["lm_head"], "quant_type": {"default": facts}}
    return Format(section, eight.write, {r"layers\.0\.self_attn\.k_proj": None, "up_proj": four.write})


VARIANTS = {
    "gptq 3 bits": basic.gptq(3, 32),
    "gptq 5 bits, v2": basic.gptq(5, 32, v2=True, symmetric=False),
    "gptq 4 bits, ragged groups": basic.gptq(4, 64),
    "gptq 4 bits, ragged groups, act order": basic.gptq(4, 64, act_order=True, symmetric=False),
    "gptq 4 bits, groups of 128": basic.gptq(4, 128, symmetric=False),
    "gptq 4 bits, dynamic rules": gptq_dynamic(),
    "awq gemv": awq_gemv(32),
    "awq gemv, ragged groups": awq_gemv(64),
    "auto-round gptq": auto_round("auto_round:auto_gptq", basic.gptq(4, 32)),
    "auto-round v2 zeros": auto_round("auto_round", basic.gptq(3, 32, v2=True, symmetric=False), sym=False),
    "auto-round gptqmodel": auto_round("auto_round:gptqmodel", basic.gptq(8, -1, v2=True)),
    "auto-round awq": auto_round("auto_round:auto_awq", basic.awq(32)),
    "auto-round mxfp4": auto_round("auto_round:llm_compressor", basic.compressed_mxfp4(), bits=4, data_type="mx_fp"),
    "auto-round nvfp4": auto_round("auto_round:llm_compressor", basic.nvfp4(False), bits=4, data_type="nv_fp4"),
    "auto-round mixed bits": auto_round_mixed(),
    "hqq 8 bits": hqq(8, 32),
    "hqq 6 bits": hqq(6, 32),
    "hqq 4 bits": hqq(4, 32),
    "hqq 4 bits, channels": hqq(4, None),
    "hqq 4 bits, over the ends of rows": hqq(4, 64),
    "hqq 4 bits, axis 0": hqq(4, 64, axis=0),
    "hqq 4 bits, by tag, as floats": hqq(4, 16, as_floats=True, by_tag=True),
    "hqq 3 bits": hqq(3, 32),
    "hqq 2 bits": hqq(2, 16),
    "hqq 1 bit": hqq(1, 16, rounds_scales=True),
    "quark mxfp4": quark_mxfp4(),
    "quark int4": quark_int4(32, signed=True, reorders=True),
    "quark uint4, in order": quark_int4(32, signed=False, reorders=False),
    "quark int8 weights": quark_int8("none"),
    "modelopt w4a16 awq": modelopt("W4A16_AWQ"),
    "modelopt w8a16": modelopt("W8A16"),
    "compressed 3 bits": basic.compressed_packed(3, 32),
    "compressed 4 bits, ragged groups": basic.compressed_packed(4, 64, symmetric=False),
    "compressed 4 bits, channels, asymmetric": basic.compressed_packed(4, -1, symmetric=False),
    "compressed 6 bits": basic.compressed_packed(6, 16, symmetric=False),
    "compressed int8, asymmetric": compressed_int8_asymmetric(-1),
    "compressed int8, asymmetric groups": compressed_int8_asymmetric(64),
    "compressed int8, asymmetric inputs": compressed_int8_asymmetric_inputs(),
    "compressed, three groups": compressed_mixed(),
    "compressed mxfp6": compressed_mxfp6(),
    "compressed 4 bits, tensors, asymmetric": compressed_shared(4, 0, 0),
    "compressed 8 bits, square blocks, asymmetric": compressed_shared(8, 16, 32),
    "compressed int8 for float8": compressed_int8_for("float", 8),
    "compressed int8 for int4": compressed_int8_for("int", 4),
    "bitsandbytes fp4": bitsandbytes_as("fp4", torch.uint8),
    "bitsandbytes nf4 as bfloat16": bitsandbytes_as("nf4", torch.bfloat16),
    "torchao by name": torchao_by_name(),
}
"""Formats whose activations are not rounded."""
VARIANTS_ROUNDING = {"quark int8": quark_int8("static"), "modelopt int8": modelopt("W8A8_SQ_PER_CHANNEL")}
"""Formats whose activations are rounded to int8."""
VARIANTS_FLOAT8 = {
    "quark fp8": quark_fp8(False),
    "quark fp8, channels": quark_fp8(True),
    "modelopt fp8, channels": modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt fp8 blocks": modelopt("FP8_PB_WO"),
    "modelopt mxfp8": modelopt("MXFP8"),
    "modelopt mixed": modelopt_mixed(),
    "compressed mxfp8": compressed_mxfp8(),
    "auto-round fp8": auto_round("auto_round:fp8_static", basic.modelopt_fp8(), data_type="fp8", group_size=0),
}
"""Formats in float8, which a CPU makes plain."""
