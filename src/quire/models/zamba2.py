"""Zamba2: Mamba-2 layers, some of them behind one of a few transformers that they share, each with adapters of its own."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES
from quire.models.mamba import ssm_names
from quire.models.registry import register
from quire.models.residual import Placement, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, GatedMLP, Mamba2, SharedBlock, Zamba

_BLOCK = "shared_transformer."
_ADAPTERS = _BLOCK + "feed_forward.gate_up_proj_adapter_list.{index}."
ZAMBA2_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        (), **ssm_names("mamba."), final_norm="final_layernorm", zamba_norm="input_layernorm.weight",
        block_norm=_BLOCK + "input_layernorm.weight",
        block_qkv=tuple(f"{_BLOCK}self_attn.{name}_proj" for name in "qkv"),
        block_out=_BLOCK + "self_attn.o_proj",
        block_mlp_norm=_BLOCK + "pre_ff_layernorm.weight",
        block_gate_up=_BLOCK + "feed_forward.gate_up_proj",
        block_down=_BLOCK + "feed_forward.down_proj",
        block_adapter_in=_ADAPTERS + "0",
        block_adapter_out=_ADAPTERS + "1",
        block_linear="linear",
        **{
            f"block_{name}_adapter_{side}": f"{_BLOCK}self_attn.linear_{name}_adapter_list.{{index}}.{number}"
            for name in "qkv" for number, side in enumerate(("in", "out"))
        },
    ),
    ignored=(*LLAMA_NAMES.ignored, "*.shared_transformer.*"),
)  # fmt: skip
"""Copies of a block in the layers that share it carry nothing to load."""


@register("Zamba2ForCausalLM")
def zamba2(hf: HFConfig) -> DecoderSpec:
    """Zamba2 (1.2B, whose blocks adapt attention too, 2.7B and 7B)."""
    heads, norm = hf.num_attention_heads, RMSNorm(hf.rms_norm_eps)
    head_dim = hf.get("attention_head_dim") or 2 * hf.hidden_size // heads
    groups, bias = hf.get("mamba_ngroups", 1), bool(hf.get("add_bias_linear", False))
    mamba = Mamba2(
        heads=hf.n_mamba_heads,
        head_dim=int(hf.mamba_expand * hf.hidden_size) // hf.n_mamba_heads,
        groups=groups,
        state=hf.mamba_d_state,
        conv=hf.get("mamba_d_conv", 4),
        bias=bias,
        out_bias=bias,
        dt_limits=(float(hf.get("time_step_min", 0.001)), float("inf")),
        norm=RMSNorm(1e-5),
        norm_groups=groups,
    )
    attention = Attention(
        heads, hf.get("num_key_value_heads", heads), head_dim, scale=(head_dim / 2) ** -0.5,
        rope=Rope.from_hf(hf, head_dim) if hf.get("use_mem_rope", False) else None,
    )  # fmt: skip
    mlp = GatedMLP(hf.get("intermediate_size") or 4 * hf.hidden_size, hf.get("hidden_act", "gelu"), bias)
    shared = [layer for layer, kind in enumerate(hf.layers_block_type) if kind == "hybrid"]
    is_tied = bool(hf.get("tie_word_embeddings", True))
    owners = shared[: hf.get("num_mem_blocks", 1)] if is_tied else shared  # Transformers ties blocks only with the head
    blocks = [
        SharedBlock(
            attention, mlp, owner=owners[index % len(owners)], index=index, adapter_rank=hf.get("adapter_rank", 128),
            adapts_attention=bool(hf.get("use_shared_attention_adapter", False)),
        )
        for index in range(len(shared))
    ]  # fmt: skip
    of_layer = dict(zip(shared, blocks, strict=True))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=tuple(
            Zamba(mamba, norm, of_layer.get(layer), blocks[0] if blocks else None, is_first=layer == 0)
            for layer in range(hf.num_hidden_layers)
        ),
        mlp=(None,) * hf.num_hidden_layers,
        norm=norm,
        weights=ZAMBA2_NAMES,
        max_positions=hf.max_position_embeddings,
        placement=Placement(before_mixer=False),
        tied_embeddings=is_tied,
    )
