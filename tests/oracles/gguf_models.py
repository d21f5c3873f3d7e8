"""Tiny GGUF files, written by the `gguf` package from tiny checkpoints as llama.cpp's conversion writes them.

Block types that the package cannot round to are drawn: random codes, with scales that keep values small. What a file is worth
is what the package says.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

ROUNDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
PERMUTED = ("llama", "granite", "smollm3")
"""Architectures whose rows of q and k the conversion puts in another order."""
HALVES = {
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "Q1_0"), (0,)),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),
    "NVFP4": (),
}
"""Where a drawn block has its float16 scales."""
SPREAD = {
    "IQ4_NL": 2e-3, "IQ4_XS": 1e-4, "Q2_K": 2e-2, "Q3_K": 3e-3, "Q4_K": 1e-3, "Q5_K": 5e-4, "Q6_K": 1e-4, "IQ1_S": 1e-2,
    "IQ1_M": 1e-2, "IQ2_XXS": 2e-3, "IQ2_XS": 2e-3, "IQ2_S": 2e-3, "IQ3_XXS": 1e-3, "IQ3_S": 1e-3, "TQ1_0": 1e-1,
    "TQ2_0": 1e-1, "Q1_0": 1e-1,
}  # fmt: skip

OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
SANDWICH = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GPT_OSS = LAYER | {
    "self_attn.sinks": "attn_sinks", "mlp.router": "ffn_gate_inp", "post_attention_layernorm": "post_attention_norm",
}  # fmt: skip
EXPERTS = {
    "mlp.experts.{}.gate_proj": "ffn_gate_exps", "mlp.experts.{}.up_proj": "ffn_up_exps",
    "mlp.experts.{}.down_proj": "ffn_down_exps", "block_sparse_moe.experts.{}.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.{}.w3": "ffn_up_exps", "block_sparse_moe.experts.{}.w2": "ffn_down_exps",
}  # fmt: skip


def draw(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray:
    """Random rows in a block type."""
    values, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // values, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scale = (rng.uniform(0.5, 1.5, raw.shape[:-1]) * SPREAD[kind]).astype(np.float16)
        raw[..., at : at + 2] = scale[..., None].view(np.uint8)
    if kind == "IQ1_M":  # a quarter in the highest four bits of each of four words
        scale = (rng.uniform(0.5, 1.5, raw.shape[:-1]) * SPREAD[kind]).astype(np.float16).view(np.uint16)
        for quarter, at in enumerate(range(49, 57, 2)):
            raw[..., at] = raw[..., at] & 15 | (scale >> 4 * quarter & 15) << 4
    if kind == "NVFP4":
        raw[..., :4] &= 31
    return raw.reshape(*shape[:-1], -1)


def encode(values: np.ndarray, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(data as the file has it, what it is worth)."""
    if kind in ("F32", "F16"):
        data = values.astype(np.float32 if kind == "F32" else np.float16)
        return data, data.astype(np.float32)
    data = gguf.quants.quantize(values, Kind[kind]) if kind in (*ROUNDS, "BF16") else draw(values.shape, kind, rng)
    return data, dequantize(data, kind)


def dequantize(data: np.ndarray, kind: str) -> np.ndarray:
    """As the package; a type that it lacks by hand."""
    if kind != "Q1_0":
        return gguf.quants.dequantize(data, Kind[kind]).astype(np.float32)
    blocks = data.reshape(*data.shape[:-1], -1, 18)
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    is_plus = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little").astype(bool)
    return np.where(is_plus, scale, -scale).reshape(*data.shape[:-1], -1)


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head's two halves in turn, as llama.cpp has them."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    source: Path, target: Path, arch: str, kinds: dict[str, str], *, facts: dict[str, Any] | None = None
) -> Path:
    """Write a checkpoint as GGUF, and what it is worth as a checkpoint into the folder `worth` beside it; returns the file.

    Args:
        kinds: number types by a part of the tensor's GGUF name; "" for all others. Norms are F32.
        facts: further metadata.
    """
    hf = json.loads((source / "config.json").read_text())
    rng, tensors = np.random.default_rng(0), load_file(source / "model.safetensors")
    if arch == "gpt-oss":
        tensors = by_expert(tensors)
    path, worth = target / f"{arch}.gguf", dict(tensors)
    target.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(path), arch)
    _write_facts(writer, hf, arch, facts or {})
    write_tokenizer(writer, source)
    heads = {"attn_q": hf["num_attention_heads"], "attn_k": hf["num_key_value_heads"]}
    tables = {"gemma2": SANDWICH, "gemma3": SANDWICH, "gpt-oss": GPT_OSS}
    own = PACKAGE_NAMES if arch in PACKAGE_NAMES else tables.get(arch, LAYER)
    for name, names in _groups(tensors, _package_names(arch, hf) if own is PACKAGE_NAMES else own).items():
        values = (
            np.stack([tensors[n].float().numpy() for n in names])
            if "exps" in name
            else tensors[names[0]].float().numpy()
        )
        module = name.split(".")[-2]
        if arch in PERMUTED and module in heads:
            values = interleave(values, heads[module])
        if arch.startswith("gemma") and "norm" in name:
            values = values + 1
        values = values[0] if module == "ffn_gate_inp_shexp" else values
        kind = next((kind for part, kind in kinds.items() if part and part in name), kinds[""])
        kind = "F32" if values.ndim == 1 or "gate_inp" in name or name.endswith(".bias") else kind
        data, meant = encode(values, kind, rng)
        writer.add_tensor(name, data, raw_dtype=Kind[kind])
        if arch in PERMUTED and module in heads:
            meant = meant.reshape(heads[module], -1, 2, *meant.shape[1:]).swapaxes(1, 2).reshape(meant.shape)
        if kind != "F32":
            for i, n in enumerate(names):
                worth[n] = torch.from_numpy((meant[i] if "exps" in name else meant).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = target / "worth"
    folder.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(in_stacks(worth) if arch == "gpt-oss" else worth, folder / "model.safetensors")
    return path


def by_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gpt-oss' stacks of experts, gate and up in turn, as a matrix and a bias each."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        before, experts, kind = name.partition(".experts.")
        name = f"{name}.weight" if name.endswith(".sinks") else name
        if not experts:
            found[name] = tensor
            continue
        suffix = "bias" if kind.endswith("_bias") else "weight"
        parts = {"gate_proj": (..., slice(0, None, 2)), "up_proj": (..., slice(1, None, 2))}
        for part, columns in (parts if "gate_up" in kind else {"down_proj": (...,)}).items():
            for number, values in enumerate(tensor[columns]):
                found[f"{before}.experts.{number}.{part}.{suffix}"] = (
                    values.t().contiguous() if values.ndim == 2 else values
                )
    return found


def in_stacks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `by_expert`."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[tuple[str, str, str], list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        before, is_expert, rest = name.partition(".experts.")
        if is_expert:
            _, part, suffix = rest.split(".")
            experts.setdefault((before, part, suffix), []).append(tensor.t() if tensor.ndim == 2 else tensor)
        else:
            found[name.replace(".sinks.weight", ".sinks")] = tensor
    for (before, part, suffix), values in experts.items():
        end = "_bias" if suffix == "bias" else ""
        if part == "down_proj":
            found[f"{before}.experts.down_proj{end}"] = torch.stack(values).contiguous()
        elif part == "gate_proj":
            both = torch.stack((torch.stack(values), torch.stack(experts[before, "up_proj", suffix])), -1)
            found[f"{before}.experts.gate_up_proj{end}"] = both.flatten(-2).contiguous()
    return found


PACKAGE_NAMES = (
    "granite", "smollm3", "olmo2", "exaone4", "seed_oss", "hunyuan-dense", "ernie4_5", "glm4", "command-r", "cohere2",
    "starcoder2",
)  # fmt: skip
"""Architectures whose names are the package's own table."""


def _package_names(arch: str, hf: dict[str, Any]) -> dict[str, str]:
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(kind, 1).mapping
    prefix = "model.layers.0."
    return {
        name.removeprefix(prefix): known.removeprefix("blk.0.")
        for name, (_, known) in table.items()
        if name.startswith(prefix)
    }


def _groups(tensors: dict[str, torch.Tensor], layer: dict[str, str]) -> dict[str, list[str]]:
    """GGUF names, and the checkpoint's names that each holds."""
    found: dict[str, list[str]] = {}
    for name in tensors:
        module, _, kind = name.rpartition(".")
        if module in OUTSIDE:
            found[f"{OUTSIDE[module]}.{kind}"] = [name]
            continue
        _, _, number, rest = module.split(".", 3)
        for pattern, short in EXPERTS.items():
            before, after = pattern.split("{}")
            if rest.startswith(before) and rest.endswith(after):
                found.setdefault(f"blk.{number}.{short}.{kind}", []).append(name)
                break
        else:
            found[f"blk.{number}.{layer[rest]}.{kind}"] = [name]
    for names in found.values():
        names.sort(key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")])
    return found


def _write_facts(writer: gguf.GGUFWriter, hf: dict[str, Any], arch: str, facts: dict[str, Any]) -> None:
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    rope = hf.get("rope_parameters") or {}
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_key_length(head_dim)
    if "rms_norm_eps" in hf:
        writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(hf.get("layer_norm_eps") or hf["norm_epsilon"])
    if arch in ("olmo2", "exaone4") and "sliding_attention" in hf.get("layer_types", ()):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in hf["layer_types"]])
    if arch == "granite":
        writer.add_attention_scale(hf["attention_multiplier"])
        writer.add_embedding_scale(hf["embedding_multiplier"])
        writer.add_residual_scale(hf["residual_multiplier"])
        writer.add_logit_scale(hf["logits_scaling"])
    if "logit_scale" in hf:
        writer.add_logit_scale(hf["logit_scale"])
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_freq_base(rope.get("rope_theta") or rope.get("full_attention", {}).get("rope_theta") or 10000.0)
    if hf.get("sliding_window"):
        writer.add_sliding_window(hf["sliding_window"])
    experts = hf.get("num_experts") or hf.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(hf["num_experts_per_tok"])
    width = hf["intermediate_size"] if arch == "gpt-oss" else hf.get("moe_intermediate_size")
    if width:
        writer.add_expert_feed_forward_length(width)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if hf.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(hf["shared_expert_intermediate_size"])
    if hf.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(hf["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(hf["final_logit_softcapping"])
    for name, value in facts.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{arch}.{name}", value) if not isinstance(value, str) else writer.add_string(f"{arch}.{name}", value)


def write_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    """The folder's tokenizer.json (byte-level BPE), as llama.cpp's conversion writes it."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab, added = tokenizer["model"]["vocab"], {entry["content"]: entry for entry in tokenizer["added_tokens"]}
    tokens = sorted(
        {**vocab, **{content: entry["id"] for content, entry in added.items()}}.items(), key=lambda item: item[1]
    )
    size = json.loads((source / "config.json").read_text())["vocab_size"]
    names = [token for token, _ in tokens] + [f"[PAD{i}]" for i in range(len(tokens), size)]
    types = [3 if token in added else 1 for token in names]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([kind if i < len(tokens) else 5 for i, kind in enumerate(types)])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(3)
    writer.add_add_bos_token(False)
    writer.add_chat_template(json.loads((source / "tokenizer_config.json").read_text())["chat_template"])
