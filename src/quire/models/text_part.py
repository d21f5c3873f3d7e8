"""Models that also see or hear: their language model as its own architecture, and how it sees and hears, where that is known."""

import dataclasses
from collections.abc import Callable

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.audio_encoders import HEARING
from quire.models.patterns import OTHER_PARTS, PREFIXES
from quire.models.registry import ModelRegistry, register
from quire.models.spec import DecoderSpec, VisionSpec
from quire.models.vision.any_size import (
    glm_ocr_vision,
    glm_vision,
    qwen2_5_vision,
    qwen2_vision,
    qwen3_vision,
    with_axes,
)
from quire.models.vision.clip import (
    aya_vision,
    cohere_vision,
    deepseek2_vision,
    deepseek_vision,
    gemma3_vision,
    idefics_vision,
    intern_vision,
    janus_vision,
    lighton_vision,
    llama4_vision,
    llava_next_vision,
    llava_onevision_vision,
    llava_vision,
    mistral_vision,
    paddle_vision,
    paligemma_vision,
    qianfan_vision,
    vipllava_vision,
)
from quire.models.vision.gemma4 import gemma4_vision, unified_vision

ARCHITECTURES = {
    "cohere2": "Cohere2ForCausalLM",
    **dict.fromkeys(("exaone4", "exaone4_5_text"), "Exaone4ForCausalLM"),
    "gemma": "GemmaForCausalLM",
    "granite": "GraniteForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    **dict.fromkeys(("glm4", "glm4v_text", "glm_ocr_text"), "Glm4ForCausalLM"),
    **dict.fromkeys(("glm4_moe", "glm4v_moe_text"), "Glm4MoeForCausalLM"),
    "deepseek": "DeepseekForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "opt": "OPTForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    **dict.fromkeys(("paddleocr_vl", "paddleocr_vl_text"), "LlamaForCausalLM"),
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_text"), "Qwen2ForCausalLM"
    ),
    "qwen3_vl_text": "Qwen3ForCausalLM",
    **dict.fromkeys(("qwen3_vl_moe_text", "qwen3_omni_moe_text"), "Qwen3MoeForCausalLM"),
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
"""By the `model_type` of `text_config`."""
SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
DEEPSEEK_FIELDS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
LEFT_OUT = {
    "qwen2": SIZES | {"intermediate_size": 22016, "vocab_size": 151936},
    **dict.fromkeys(("deepseek", "deepseek_v2", "deepseek_v3"), DEEPSEEK_FIELDS),
    "llama": SIZES | {"intermediate_size": 11008, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "mistral": SIZES | {"intermediate_size": 14336, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    **{name: {"norm_topk_prob": True} for name in ("qwen3_vl_moe_text", "qwen3_omni_moe_text")},
    **{name: {"attention_bias": True} for name in ("glm4v_text", "glm4v_moe_text")},
    "glm_ocr_text": {"attention_bias": False},
}
"""What a `text_config` need not say (LLaVA 1.5's tells no size of its layers)."""


VISION: dict[str, Callable[[HFConfig], VisionSpec]] = {
    "aya_vision": aya_vision,
    "cohere2_vision": cohere_vision,
    "colpali": paligemma_vision,
    "colqwen2": qwen2_vision,
    "deepseek_vl": deepseek_vision,
    "deepseek_vl_v2": deepseek2_vision,
    "exaone4_5": qwen2_5_vision,
    "gemma3": gemma3_vision,
    "gemma4": gemma4_vision,
    "gemma4_unified": unified_vision,
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), glm_vision),
    "glm_ocr": glm_ocr_vision,
    "idefics3": idefics_vision,
    "internvl": intern_vision,
    "janus": janus_vision,
    "lighton_ocr": lighton_vision,
    "llama4": llama4_vision,
    "llava": llava_vision,
    "llava_next": llava_next_vision,
    "llava_onevision": llava_onevision_vision,
    "mistral3": mistral_vision,
    "paddleocr_vl": paddle_vision,
    "paligemma": paligemma_vision,
    "qianfan_ocr": qianfan_vision,
    "qwen2_vl": qwen2_vision,
    "qwen2_5_vl": qwen2_5_vision,
    **dict.fromkeys(("qwen2_5_omni", "qwen2_5_omni_thinker"), qwen2_5_vision),
    "qwen3_5": qwen3_vision,
    "qwen3_5_moe": qwen3_vision,
    **dict.fromkeys(("qwen3_omni_moe", "qwen3_omni_moe_thinker"), qwen3_vision),
    "qwen3_vl": qwen3_vision,
    "qwen3_vl_moe": qwen3_vision,
    "smolvlm": idefics_vision,
    "vipllava": vipllava_vision,
}
"""By the `model_type` of the whole: how it sees."""


SEES_ITEMS = ("gemma3", "paligemma")
"""By `model_type`: whose layers let an image's tokens, or a prompt's, see one another; of Gemma 4 those with windows may."""


@register("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniThinkerForConditionalGeneration")
@register("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration")
@register("AyaVisionForConditionalGeneration", "InternVLForConditionalGeneration")
@register("GraniteSpeechForConditionalGeneration")
@register("QianfanOCRForConditionalGeneration", "JanusForConditionalGeneration")
@register("Qwen2AudioForConditionalGeneration", "UltravoxModel", "VoxtralForConditionalGeneration")
@register("DeepseekVLV2ForCausalLM")
@register("DeepseekVLForConditionalGeneration", "LightOnOcrForConditionalGeneration")
@register("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "ColQwen2ForRetrieval")
@register("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration")
@register("PaliGemmaForConditionalGeneration", "ColPaliForRetrieval", "VipLlavaForConditionalGeneration")
@register("Cohere2VisionForConditionalGeneration", "GlmOcrForConditionalGeneration")
@register("PaddleOCRVLForConditionalGeneration", "Exaone4_5_ForConditionalGeneration")
@register("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
@register("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
@register("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
@register("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration")
@register(
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "FuyuForCausalLM",
    "Llama4ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
def text_part(hf: HFConfig) -> DecoderSpec:
    """Gemma 3 (4B and larger), Gemma 4, Mistral Small 3.1, Ministral 3, LLaVA to LLaVA-OneVision, Fuyu, Llama 4, Qwen-VL, …"""
    text = _text_of(hf)
    architecture = ARCHITECTURES.get(text.get("model_type", "llama"))
    if architecture is None:
        raise ConfigError(
            f"text_config.model_type={text.get('model_type')!r} of config.json is not known; known: {', '.join(ARCHITECTURES)}",
            setting="model",
        )
    above = {key: hf.get(key) for key in ("tie_word_embeddings",) if key in hf and key not in text}
    text = HFConfig(LEFT_OUT.get(text.get("model_type", "llama"), {}) | above | text.to_dict())
    spec = ModelRegistry.resolve(architecture).make_spec(text)
    see = VISION.get(hf.get("model_type", "")) if hf.get("vision_config") is not None else None
    if see is not None and text.get("model_type", "").startswith(
        ("glm4v", "glm_ocr", "paddleocr", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_")
    ):
        spec = with_axes(spec, text)
    if hf.get("model_type") in SEES_ITEMS and see is not None:
        spec = spec.with_attention(sees_items=True)
    both = "vision" if text.get("model_type") == "gemma4_unified_text" else None
    if see is not None and text.get("use_bidirectional_attention", both) == "vision":
        spec = spec.map_attention(lambda each: dataclasses.replace(each, sees_items=each.window > 0))
    ears = hf.get("audio_config", hf.get("encoder_config"))
    hear = HEARING.get(hf.get("model_type", "")) if ears is not None else None
    others = OTHER_PARTS if see is None and hear is None else ()
    weights = dataclasses.replace(spec.weights, prefixes=PREFIXES, ignored=(*spec.weights.ignored, *others))
    parts = {"vision": see, "hearing": hear}
    return dataclasses.replace(spec, weights=weights, **{name: part(hf) for name, part in parts.items() if part})


def _text_of(hf: HFConfig) -> HFConfig:
    return hf.get("text_config") or hf  # the first Qwen-VL's tell of the text beside `vision_config`


def knows_text(hf: HFConfig) -> bool:
    """Whether the language model within this one has a spec."""
    return _text_of(hf).get("model_type", "llama") in ARCHITECTURES


def text_beside_transformers(hf: HFConfig) -> DecoderSpec:
    """The text of a model that sees through Transformers' own modules, which read all that is not the text's."""
    spec = text_part(hf)
    return dataclasses.replace(spec, weights=dataclasses.replace(spec.weights, ignored=("*",)))
