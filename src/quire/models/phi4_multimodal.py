"""Phi-4-multimodal: Phi-4's decoder, SigLIP's layers over squares of an image and the whole of it, and a Conformer of its own.

What its adapters change is the decoder; they are adapters as any other.
"""

import dataclasses
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.layer_norm import phi3
from quire.models.registry import register
from quire.models.residual import LayerNorm
from quire.models.sight import Group, Modules, Product
from quire.models.spec import DecoderSpec, EncoderSpec, VisionSpec, WeightNames
from quire.models.vision.clip import SO400M, siglip_trunk, tower_names, up_to_layer
from quire.models.vision.gemma4 import without_layers

MERGE = 2
"""Patches of a side of the square that becomes one row."""
LONGEST = 500
"""Rows that the Conformer sees at once; of a longer sound it reads one part after another."""
WITHIN = "embed_tokens_extend."
EYES, EARS = WITHIN + "image_embed.", WITHIN + "audio_embed."
SEEING = WeightNames(
    layer=EYES + "img_processor.encoder.layers.{layer}.",
    modules=tower_names(EYES + "img_processor.")
    | {
        "up_projection": EYES + "img_projection_up",
        "down_projection": EYES + "img_projection_down",
        "row_end": EYES + "sub_img_feature_extensor",
        "whole_begin": EYES + "global_img_feature_extensor",
    },
    flattened=("patch", "row_end", "whole_begin"),
    ignored=("*img_processor.post_layernorm.*", "*img_processor.head.*"),
)
HEARING = WeightNames(
    modules={
        f"{name}{ours}": f"{EARS}{step}_proj_for_{theirs}"
        for ours, theirs in (("", "speech"), ("_beside", "vision_speech"))
        for name, step in (("up_projection", "up"), ("down_projection", "down"))
    }
)


def _projector(hidden: int, beside: str = "") -> tuple[Product, Product]:
    return Product(f"up_projection{beside}", hidden, act="gelu"), Product(f"down_projection{beside}", hidden)


def _seeing(hf: HFConfig) -> VisionSpec:
    """SigLIP as far as its last layer but one, over the patches that show something of the image.

    Raises:
        ConfigError: squares have an odd number of patches.
    """
    usual: dict[str, Any] = SO400M | {"image_size": 448}
    fields = HFConfig(usual | hf.vision_config.to_dict())
    if fields.image_size // fields.patch_size % MERGE:
        found = f"image_size={fields.image_size} and patch_size={fields.patch_size}"
        raise ConfigError(
            f"vision_config of config.json: squares of {found} have an odd number of patches", setting="model"
        )
    trunk = up_to_layer(siglip_trunk(hf, usual, SEEING), fields.get("feature_layer", -2))
    trunk = dataclasses.replace(trunk, final_norm=False)
    trunk = trunk.with_patches(merge=MERGE, is_cut=True, stretch="cells", fills=True)
    means = Group(MERGE**2, is_mean=True)
    between = ("row_end", "whole_begin")
    return VisionSpec(trunk, (means, *_projector(hf.hidden_size)), between=between, projects_between=True)


def _hearing(hf: HFConfig) -> EncoderSpec:
    """Its Conformer makes a row of eight frames, and embeddings that are others beside images.

    Raises:
        ConfigError: several rows become one.
    """
    audio = hf.audio_config
    if audio.get("downsample_rate", 1) != 1:
        raise ConfigError("config.json: Phi-4-multimodal hears with downsample_rate=1 alone", setting="model")
    within = EARS + "encoder."
    frames = Modules("Phi4MultimodalAudioModel", "audio_config", reads="hidden_states", others=("mask",), within=within)
    trunk = without_layers(audio.get("hidden_size", 1024), LayerNorm(1e-5), HEARING, reads_items=True, frames=frames)
    return EncoderSpec(trunk, LONGEST, _projector(hf.hidden_size), _projector(hf.hidden_size, "_beside"))


@register("Phi4MultimodalForCausalLM")
def phi4_multimodal(hf: HFConfig) -> DecoderSpec:
    """Phi-4-multimodal in Transformers' format."""
    parts = {"vision": ("vision_config", _seeing), "hearing": ("audio_config", _hearing)}
    found = {name: make(hf) for name, (section, make) in parts.items() if hf.get(section) is not None}
    return dataclasses.replace(phi3(hf), **found)
