"""StarCoder2: rotary positions with LayerNorm, biases and a plain feed-forward."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES, mistral
from quire.models.patterns import defaults
from quire.models.registry import register
from quire.models.residual import LayerNorm
from quire.models.spec import MLP, DecoderSpec

STARCODER2_NAMES = LLAMA_NAMES.but(drop=("gate_up",), up="mlp.c_fc", down="mlp.c_proj")


@register("Starcoder2ForCausalLM")
def starcoder2(hf: HFConfig) -> DecoderSpec:
    """StarCoder2 in all sizes."""
    bias = bool(hf.get("use_bias", True))
    return dataclasses.replace(
        mistral(defaults(hf, attention_bias=bias, tie_word_embeddings=True)),
        mlp=MLP(hf.intermediate_size, act=hf.hidden_act, bias=bias),
        norm=LayerNorm(hf.norm_epsilon),
        weights=STARCODER2_NAMES,
    )
