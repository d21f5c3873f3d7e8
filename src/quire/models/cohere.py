"""Command R and R7B: both halves in parallel, LayerNorm without bias, interleaved rotation, scaled logits."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.patterns import sliding_layers
from quire.models.registry import register
from quire.models.spec import PARALLEL, Attention, DecoderSpec, LayerNorm


@register("CohereForCausalLM")
def cohere(hf: HFConfig) -> DecoderSpec:
    """Command R."""
    if hf.get("use_qk_norm", False):
        raise ConfigError("use_qk_norm=true of config.json is not supported for Cohere", setting="model")
    spec = llama(HFConfig({"rms_norm_eps": 0.0, "tie_word_embeddings": True} | hf.to_dict()))
    return dataclasses.replace(
        spec,
        mixer=tuple(_interleaved(mixer) for mixer in spec.attentions()),
        norm=LayerNorm(hf.layer_norm_eps, bias=False),
        placement=PARALLEL,
        weights=LLAMA_NAMES.but(drop=("before_mlp",)),
        logits_scale=float(hf.get("logit_scale", 1.0)),
    )


@register("Cohere2ForCausalLM")
def cohere2(hf: HFConfig) -> DecoderSpec:
    """Command R7B: windowed layers rotate; full ones know no positions."""
    spec = cohere(hf)
    mixers = (
        mixer if sliding else dataclasses.replace(mixer, window=0, rope=None)
        for mixer, sliding in zip(spec.attentions(), sliding_layers(hf, every=4), strict=True)
    )
    return dataclasses.replace(spec, mixer=tuple(mixers))


def _interleaved(mixer: Attention) -> Attention:
    if mixer.rope is None:
        return mixer
    return dataclasses.replace(mixer, rope=dataclasses.replace(mixer.rope, interleaved=True))
