"""What an architecture can do, read from a spec: for `quire models`. Looks at shapes only."""

import dataclasses

from quire.errors import ConfigError
from quire.layers.decoder_layer import modules_of
from quire.layers.mixers import kind_of
from quire.layers.parallel import ParallelPlan
from quire.layers.stages import can_be_parted
from quire.models.spec import Attention, DecoderSpec, MoE
from quire.models.variants import CrossAttention

RANKS = 2


@dataclasses.dataclass(frozen=True)
class Features:
    """Answers of one architecture.

    Attributes:
        mixers: kinds of its layers' mixers, in order of first appearance.
        experts: whether some layer is a mixture of experts.
        tensor_parallel: whether its layers can be shared by ranks.
        pipeline_parallel: whether they can be parted into stages.
        generates: whether it gives tokens; otherwise only vectors and classes.
        quantization: whether it has matrices that may be in another number format.
        multimodal: whether it also sees or hears.
    """

    mixers: tuple[str, ...]
    experts: bool
    tensor_parallel: bool
    generates: bool
    quantization: bool
    pooling: bool = True
    pipeline_parallel: bool = False
    lora: bool = False
    multimodal: bool = False


def features_of(spec: DecoderSpec) -> Features:
    """The features of a spec."""
    mixers = [mixer for layer in range(spec.layers) for mixer in spec.mixers_of(layer)]
    modules = modules_of(spec)
    return Features(
        mixers=tuple(dict.fromkeys(map(_kind, mixers))),
        experts=any(isinstance(mlp, MoE) for mlp in spec.mlps()),
        tensor_parallel=_can_be_split(spec),
        generates=all(
            mixer.causal for mixer in mixers if type(mixer) is not CrossAttention and isinstance(mixer, Attention)
        ),
        pooling=spec.encoder is None,
        pipeline_parallel=can_be_parted(spec),
        quantization=any(module.is_quantizable for module in modules),
        multimodal=spec.vision is not None or any(tower.frames is not None for tower in spec.towers),
    )


def _kind(mixer: object) -> str:
    if not isinstance(mixer, Attention):
        return type(mixer).__name__
    if isinstance(mixer, CrossAttention):
        return "cross attention"
    if not mixer.causal:
        return "bidirectional attention"
    return "window attention" if mixer.window else "attention"


def _can_be_split(spec: DecoderSpec) -> bool:
    try:
        for module in modules_of(spec):
            module.local_shape(ParallelPlan(RANKS, 0))
        if not all(kind_of(mixer).can_shard for layer in range(spec.layers) for mixer in spec.mixers_of(layer)):
            return False
    except ConfigError:
        return False
    return any(module.shard in ("rows", "columns") for module in modules_of(spec))
