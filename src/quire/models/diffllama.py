"""DiffLlama: Llama with differential attention."""

import dataclasses
import math

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.patterns import defaults
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.spec import Attention, DecoderSpec
from quire.models.variants import DiffAttention

NAMES = LLAMA_NAMES.but(
    (), **{name: f"self_attn.{name}" for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")}
)


@register("DiffLlamaForCausalLM")
def diffllama(hf: HFConfig) -> DecoderSpec:
    """DiffLlama.

    Raises:
        ConfigError: heads that are no pairs.
    """
    hf = defaults(hf, rms_norm_eps=1e-5)
    spec = llama(HFConfig(hf.to_dict() | {"mlp_bias": False}))
    for name, heads in (("num_attention_heads", hf.num_attention_heads), ("num_key_value_heads", _kv_heads(spec))):
        if heads % 2:
            raise ConfigError(
                f"{name}={heads} of config.json must be even: differential attention takes heads in pairs",
                setting="model",
            )

    def differential(layer: int, attention: Attention) -> DiffAttention:
        fields = {field.name: getattr(attention, field.name) for field in dataclasses.fields(attention)}
        start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        return DiffAttention(**fields, norm=RMSNorm(hf.rms_norm_eps), start=start)

    mixers = tuple(differential(layer, attention) for layer, attention in enumerate(spec.attentions()))
    return dataclasses.replace(spec, mixer=mixers, weights=NAMES)


def _kv_heads(spec: DecoderSpec) -> int:
    return spec.attentions()[0].kv_heads
