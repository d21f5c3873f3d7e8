"""Which architectures of GGUF files are which of the hub's: names of tensors, and what the conversion did to their values.

Tables only. A file's `general.architecture` names the family.
"""

import dataclasses
import re
from collections.abc import Mapping

from quire.config.gguf.container import GGUFTensor

LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias|scale)$")
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH = LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED = LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
AFTER = LLAMA | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
"""Norms behind the halves of a layer."""
GLM4 = LLAMA | {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
HUNYUAN = LLAMA | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
STARCODER2 = LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
MIXTURE = LLAMA | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
MIXTRAL = LLAMA | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
GPT_OSS = MIXTURE | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
GPT_OSS_BARE = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are part of the configuration."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        architecture, model_type: what config.json calls it.
        names: of a layer's modules.
        mixture: the same where the file has experts.
        permutes_heads: rows of q and k are in pairs of neighbours, for interleaved rotation.
        adds_one: norms' weights were increased by one.
        windowed: the same where the file has a sliding window.
        bare: of a layer's tensors that are not a module's weight or bias.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str]
    mixture: "Family | None" = None
    permutes_heads: bool = False
    adds_one: bool = False
    windowed: "Family | None" = None
    bare: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", "llama", LLAMA, Family("MixtralForCausalLM", "mixtral", MIXTRAL, permutes_heads=True), True
    ),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", LLAMA),
    "qwen2moe": Family("Qwen2MoeForCausalLM", "qwen2_moe", MIXTURE),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", LLAMA),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", MIXTURE),
    "gemma": Family("GemmaForCausalLM", "gemma", LLAMA, adds_one=True),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", SANDWICH, adds_one=True),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", SANDWICH, adds_one=True),
    "phi3": Family("Phi3ForCausalLM", "phi3", FUSED),
    "granite": Family("GraniteForCausalLM", "granite", LLAMA, permutes_heads=True),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", LLAMA, permutes_heads=True),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", AFTER, windowed=Family("Olmo3ForCausalLM", "olmo3", AFTER)),
    "exaone4": Family("Exaone4ForCausalLM", "exaone4", AFTER),
    "seed_oss": Family("SeedOssForCausalLM", "seed_oss", AFTER),
    "hunyuan-dense": Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", HUNYUAN),
    "ernie4_5": Family("Ernie4_5ForCausalLM", "ernie4_5", LLAMA),
    "glm4": Family("Glm4ForCausalLM", "glm4", GLM4),
    "command-r": Family("CohereForCausalLM", "cohere", LLAMA),
    "cohere2": Family("Cohere2ForCausalLM", "cohere2", LLAMA),
    "gpt-oss": Family("GptOssForCausalLM", "gpt_oss", GPT_OSS, bare=GPT_OSS_BARE),
    "starcoder2": Family("Starcoder2ForCausalLM", "starcoder2", STARCODER2),
}


def checkpoint_name(family: Family, tensor: GGUFTensor) -> str | None:
    """What a tensor is called in the hub's checkpoints, with `{expert}` where it holds all experts; None: it has no name
    there."""
    outside = re.fullmatch(r"(\w+)\.(weight|bias|scale)", tensor.name)
    if outside and outside[1] in OUTSIDE:
        return f"{OUTSIDE[outside[1]]}.{outside[2]}"
    layer = LAYER.fullmatch(tensor.name)
    if layer is None:
        return None
    module = family.names.get(layer[2])
    name = family.bare.get(f"{layer[2]}.{layer[3]}", module and f"{module}.{layer[3]}")
    return name and f"model.layers.{layer[1]}.{name}"
