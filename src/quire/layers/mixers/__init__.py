"""The kinds of mixers: for each class of `models/spec.py`, the layer that runs it."""

from quire.layers.mixers.attention import AttentionLayer
from quire.layers.mixers.compressed import CompressedAttentionLayer
from quire.layers.mixers.delta_net import DeltaNetLayer
from quire.layers.mixers.diff_attention import DiffAttentionLayer
from quire.layers.mixers.expert_attention import ExpertAttentionLayer
from quire.layers.mixers.interface import LayerContext, MixerLayer, NarrowViews
from quire.layers.mixers.kimi_delta import KimiDeltaLayer
from quire.layers.mixers.lightning import LightningLayer
from quire.layers.mixers.mamba import MambaLayer
from quire.layers.mixers.mamba2 import Mamba2Layer
from quire.layers.mixers.mla import MLALayer
from quire.layers.mixers.narrow_values import NarrowValuesLayer
from quire.layers.mixers.rg_lru import RgLruLayer
from quire.layers.mixers.rwkv import ChannelMixLayer, TimeMixLayer
from quire.layers.mixers.shared_kv import SharedKVLayer
from quire.layers.mixers.short_conv import ShortConvLayer
from quire.layers.mixers.sparse_mla import SparseMLALayer
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
from quire.models.variants import CompressedAttention, DiffAttention, ExpertAttention, NarrowValues, SharedKV, SparseMLA

MIXERS: dict[type, type[MixerLayer]] = {
    Attention: AttentionLayer,
    SharedKV: SharedKVLayer,
    NarrowValues: NarrowValuesLayer,
    ExpertAttention: ExpertAttentionLayer,
    DiffAttention: DiffAttentionLayer,
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

__all__ = ["MIXERS", "LayerContext", "MixerLayer", "NarrowViews", "kind_of"]


def kind_of(mixer: Mixer) -> type[MixerLayer]:
    """The class that runs a mixer."""
    return MIXERS[type(mixer)]
