"""Pixtral's encoder: images of any size, rows and columns as rotations, each image by itself."""

from quire.config.hf_config import HFConfig
from quire.models.residual import RMSNorm
from quire.models.rope import Rope
from quire.models.sight import Patches
from quire.models.spec import Attention, DecoderSpec, GatedMLP, WeightNames

TOWER = "vision_tower."
"""What checkpoints call an encoder."""
NO_TOKENS = 1
"""The vocabulary of an encoder, which has neither tokens nor logits: as small as a spec may say."""
NAMES = WeightNames(
    prefixes=("", "model."),
    layer=TOWER + "transformer.layers.{layer}.",
    modules={
        "patch": TOWER + "patch_conv",
        "embedding_norm": TOWER + "ln_pre",
        "before_mixer": "attention_norm",
        "qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "out": "attention.o_proj",
        "before_mlp": "ffn_norm",
        "gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "down": "feed_forward.down_proj",
        "merge_norm": "multi_modal_projector.norm",
        "merge": "multi_modal_projector.patch_merger.merging_layer",
        "up_projection": "multi_modal_projector.linear_1",
        "down_projection": "multi_modal_projector.linear_2",
    },
)


def pixtral_trunk(hf: HFConfig) -> DecoderSpec:
    """The layers that `vision_config` describes."""
    hidden, heads = hf.get("hidden_size", 1024), hf.get("num_attention_heads", 16)
    head_dim = hf.get("head_dim") or hidden // heads
    parameters = hf.to_dict().get("rope_parameters") or {}
    pairs, norm = head_dim // 4, RMSNorm(1e-5)
    # Even frequencies turn by the row, odd ones by the column.
    exponents = tuple((2 * pair + axis) * 2 / head_dim for axis in (0, 1) for pair in range(pairs))
    rope = Rope(
        float(parameters.get("rope_theta") or hf.get("rope_theta", 10000.0)),
        head_dim,
        axes=(0,) * pairs + (1,) * pairs,
        exponents=exponents,
    )
    return DecoderSpec(
        vocab=NO_TOKENS,
        hidden=hidden,
        layers=hf.get("num_hidden_layers", 24),
        mixer=Attention(heads, heads, head_dim, rope, causal=False),
        mlp=GatedMLP(hf.get("intermediate_size", 4096), act=hf.get("hidden_act", "gelu")),
        norm=norm,
        weights=NAMES,
        max_positions=1,
        embedding_norm=norm,
        final_norm=False,
        tied_embeddings=True,
        patches=Patches(hf.get("patch_size", 16), hf.get("num_channels", 3)),
    )
