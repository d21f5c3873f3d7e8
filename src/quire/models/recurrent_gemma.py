"""RecurrentGemma: Griffin's recurrent blocks, with attention over a window in every third layer."""

import dataclasses

import torch

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES
from quire.models.patterns import defaults
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, GatedMLP, RgLru

RECURRENT_GEMMA_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        before_mixer="temporal_pre_norm",
        before_mlp="channel_pre_norm",
        final_norm="final_norm",
        gate_up=("mlp_block.gate_proj", "mlp_block.up_proj"),
        down="mlp_block.down_proj",
        qkv=("temporal_block.q_proj", "temporal_block.k_proj", "temporal_block.v_proj"),
        out="temporal_block.o_proj",
        lru_x="temporal_block.linear_x",
        lru_y="temporal_block.linear_y",
        lru_conv="temporal_block.conv_1d.weight",
        lru_conv_bias="temporal_block.conv_1d.bias",
        lru_input_gate="temporal_block.rg_lru.input_gate_weight",
        lru_input_gate_bias="temporal_block.rg_lru.input_gate_bias",
        lru_forget_gate="temporal_block.rg_lru.recurrent_gate_weight",
        lru_forget_gate_bias="temporal_block.rg_lru.recurrent_gate_bias",
        lru_decay="temporal_block.rg_lru.recurrent_param",
        lru_out="temporal_block.linear_out",
    ),
    flattened=("lru_input_gate", "lru_input_gate_bias", "lru_forget_gate", "lru_forget_gate_bias"),
)
LENGTH = 8192
"""Of the published models' training; their configs name none."""


@register("RecurrentGemmaForCausalLM")
def recurrent_gemma(hf: HFConfig) -> DecoderSpec:
    """RecurrentGemma 2B and 9B."""
    hf = defaults(hf, partial_rotary_factor=0.5)
    heads, layers = hf.num_attention_heads, hf.num_hidden_layers
    head_dim, act = hf.hidden_size // heads, hf.get("hidden_activation", "gelu_pytorch_tanh")
    attention = Attention(
        heads=heads,
        kv_heads=hf.get("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=Rope.from_hf(hf, head_dim),
        window=hf.get("attention_window_size", 2048),
        qkv_bias=bool(hf.get("attention_bias", False)),
        out_bias=True,
    )
    block = RgLru(heads, hf.get("lru_width", hf.hidden_size), act, hf.get("conv1d_width", 4))
    kinds = hf.get("block_types", ["recurrent", "recurrent", "attention"])
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=layers,
        mixer=tuple(block if kinds[layer % len(kinds)] == "recurrent" else attention for layer in range(layers)),
        mlp=GatedMLP(hf.intermediate_size // 2, act, bias=True),
        norm=RMSNorm(hf.rms_norm_eps, weight_offset=1.0),
        weights=RECURRENT_GEMMA_NAMES,
        max_positions=hf.get("max_position_embeddings", LENGTH),
        embedding_scale=float(torch.tensor(hf.hidden_size**0.5, dtype=torch.bfloat16)),  # whatever the model's type
        tied_embeddings=bool(hf.get("tie_word_embeddings", True)),
        logits_soft_cap=float(hf.get("logits_soft_cap", 30.0)),
    )
