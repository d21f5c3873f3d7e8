"""The kinds of mixers: for each class of `models/spec.py`, the layer that runs it."""

from quire.layers.mixers.attention import AttentionLayer
from quire.layers.mixers.attention_variants import (
    BucketAttentionLayer,
    CrossAttentionLayer,
    DiffAttentionLayer,
    ExpertAttentionLayer,
    NarrowValuesLayer,
    SharedKVLayer,
)
from quire.layers.mixers.interface import MixerLayer
from quire.layers.mixers.mamba import Mamba2Layer, MambaLayer
from quire.layers.mixers.mla import CompressedAttentionLayer, MLALayer, SparseMLALayer
from quire.layers.mixers.recurrent import (
    ChannelMixLayer,
    DeltaNetLayer,
    KimiDeltaLayer,
    LightningLayer,
    RgLruLayer,
    ShortConvLayer,
    TimeMixLayer,
)
from quire.layers.mixers.relative import RelativeAttentionLayer
from quire.layers.mixers.zamba import ZambaLayer
from quire.models.spec import (
    MLA,
    Attention,
    ChannelMix,
    DeltaNet,
    KimiDelta,
    Lightning,
    Mamba,
    Mamba2,
    Mixer,
    RgLru,
    ShortConv,
    TimeMix,
    Zamba,
)
from quire.models.variants import (
    BucketAttention,
    CompressedAttention,
    CrossAttention,
    DiffAttention,
    ExpertAttention,
    NarrowValues,
    RelativeAttention,
    SharedKV,
    SparseMLA,
)

MIXERS: dict[type, type[MixerLayer]] = {
    Attention: AttentionLayer,
    SharedKV: SharedKVLayer,
    CrossAttention: CrossAttentionLayer,
    NarrowValues: NarrowValuesLayer,
    ExpertAttention: ExpertAttentionLayer,
    DiffAttention: DiffAttentionLayer,
    RelativeAttention: RelativeAttentionLayer,
    BucketAttention: BucketAttentionLayer,
    MLA: MLALayer,
    SparseMLA: SparseMLALayer,
    CompressedAttention: CompressedAttentionLayer,
    Mamba: MambaLayer,
    Mamba2: Mamba2Layer,
    DeltaNet: DeltaNetLayer,
    KimiDelta: KimiDeltaLayer,
    Lightning: LightningLayer,
    RgLru: RgLruLayer,
    TimeMix: TimeMixLayer,
    ChannelMix: ChannelMixLayer,
    ShortConv: ShortConvLayer,
    Zamba: ZambaLayer,
}

__all__ = ["MIXERS", "MixerLayer", "kind_of"]


def kind_of(mixer: Mixer) -> type[MixerLayer]:
    """The class that runs a mixer."""
    return MIXERS[type(mixer)]
