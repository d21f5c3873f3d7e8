"""RWKV-4: a weighted mean in the place of attention, and a feed-forward that sees the token before. Each half is a layer here,
since each keeps a state."""

from quire.config.hf_config import HFConfig
from quire.models.registry import register
from quire.models.residual import Joint, LayerNorm
from quire.models.spec import ChannelMix, DecoderSpec, TimeMix, WeightNames

_TIME, _CHANNEL = ("key", "value", "receptance"), ("key", "receptance")
RWKV_NAMES = WeightNames(
    modules={
        "embedding": "embeddings",
        "embedding_norm": "blocks.0.pre_ln",
        "before_mixer": "ln{sub1}",
        **{f"time_mix_{name}": f"attention.time_mix_{name}" for name in _TIME},
        **{f"time_{name}": f"attention.{name}" for name in _TIME},
        "time_decay": "attention.time_decay",
        "time_first": "attention.time_first",
        "time_out": "attention.output",
        **{f"channel_mix_{name}": f"feed_forward.time_mix_{name}" for name in _CHANNEL},
        **{f"channel_{name}": f"feed_forward.{name}" for name in (*_CHANNEL, "value")},
        "final_norm": "ln_out",
        "lm_head": "head",
    },
    prefixes=("rwkv.", ""),
    layer="blocks.{layer}.",
    sublayers=2,
    flattened=tuple(f"{half}_mix_{name}" for half, names in (("time", _TIME), ("channel", _CHANNEL)) for name in names),
)
FINAL_EPSILON = 1e-5
"""Of the last norm, whatever `layer_norm_epsilon` says."""


@register("RwkvForCausalLM")
def rwkv(hf: HFConfig) -> DecoderSpec:
    """RWKV-4 (Pile and World)."""
    blocks, hidden = hf.num_hidden_layers, hf.hidden_size
    time = TimeMix(hf.get("attention_hidden_size", hidden))
    channel = ChannelMix(hf.get("intermediate_size", 4 * hidden))
    joints = tuple(joint for block in range(blocks) for joint in _joints(block, hf.get("rescale_every", 6)))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hidden,
        layers=2 * blocks,
        mixer=(time, channel) * blocks,
        mlp=(None,) * (2 * blocks),
        norm=LayerNorm(hf.get("layer_norm_epsilon", 1e-5)),
        weights=RWKV_NAMES,
        max_positions=hf.get("context_length", 1024),
        embedding_norm=LayerNorm(hf.get("layer_norm_epsilon", 1e-5)),
        final_eps=FINAL_EPSILON,
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
        joints=joints if any(joint != Joint() for pair in joints for joint in pair) else (),
    )


def _joints(block: int, every: int) -> tuple[tuple[Joint, Joint], ...]:
    """The residual is halved behind every so many blocks, and what joins it later is too: norms' epsilons see that."""
    if every <= 0:
        return ((Joint(), Joint()),) * 2
    share, halved = 0.5 ** (block // every), 0.5 if (block + 1) % every == 0 else 1.0
    return (Joint(1.0, share), Joint()), (Joint(halved, share * halved), Joint())
