"""What encoder-decoder models have in common: a layer of the decoder is two of ours, attention to the tokens before, then
attention to what the encoder has read with the feed-forward behind it.
"""

import dataclasses

from quire.models.spec import DecoderSpec, EncoderSpec
from quire.models.variants import CrossAttention

SUBLAYERS = 2


def with_cross_attention(spec: DecoderSpec, encoder: EncoderSpec) -> DecoderSpec:
    """A decoder's spec whose layers are of the checkpoint's, each made of two halves of ours."""
    mlp = spec.mlp
    assert not isinstance(mlp, tuple)
    own = spec.attentions()
    shared = {
        name: getattr(own[0], name) for name in ("heads", "kv_heads", "head_dim", "qkv_bias", "out_bias", "scale")
    }
    cross = CrossAttention(**shared, causal=False, length=encoder.length)
    return dataclasses.replace(
        spec,
        layers=SUBLAYERS * spec.layers,
        mixer=tuple(mixer for each in own for mixer in (each, cross)),
        mlp=(None, mlp) * spec.layers,
        weights=dataclasses.replace(spec.weights, sublayers=SUBLAYERS),
        encoder=encoder,
    )
