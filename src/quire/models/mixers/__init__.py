"""The kinds of mixers: for each class of `models/spec.py`, the layer that runs it."""

from quire.models.mixers.attention import AttentionLayer
from quire.models.mixers.interface import LayerContext, MixerLayer
from quire.models.mixers.mla import MLALayer
from quire.models.spec import MLA, Attention, Mixer

MIXERS: dict[type, type[MixerLayer]] = {Attention: AttentionLayer, MLA: MLALayer}

__all__ = ["MIXERS", "LayerContext", "MixerLayer", "kind_of"]


def kind_of(mixer: Mixer) -> type[MixerLayer]:
    """The class that runs a mixer."""
    return MIXERS[type(mixer)]
