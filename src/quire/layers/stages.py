"""A stage of a pipeline, as far as a model is concerned: which modules it has, and which of a checkpoint's names it passes over.

Knows modules' names and layers' numbers. What stages hand to one another is `Decoder.payload`; how, `distributed/stage_link.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from quire.errors import ConfigError
from quire.layers.mixers import MixerLayer, kind_of
from quire.layers.modules import Module
from quire.layers.parallel import StagePlan
from quire.models.spec import DecoderSpec, MoE

_LAST = ("final_norm", "project_out", "lm_head", "hyper_head")
"""Modules outside of layers that come behind them, by how their names begin; the others come before the layers."""


def part(
    modules: Sequence[Module], spec: DecoderSpec, stage: StagePlan, layers: range
) -> tuple[list[Module], list[Module]]:
    """A stage's modules, and those of other stages."""
    here = [module for module in modules if _is_here(module.name, spec, stage, layers)]
    names = {module.name for module in here}
    return here, [module for module in modules if module.name not in names]


def _is_here(name: str, spec: DecoderSpec, stage: StagePlan, layers: range) -> bool:
    if name.startswith("layers."):
        return int(name.split(".")[1]) in layers
    if name == "embedding" and spec.tied_embeddings:
        return stage.is_first or stage.is_last
    return stage.is_last if name.startswith(_LAST) else stage.is_first


def ignoring(spec: DecoderSpec, elsewhere: Sequence[Module]) -> DecoderSpec:
    """The spec for a checkpoint whose names of these modules carry nothing to load."""
    names, patterns = spec.weights, set[str]()
    for module in elsewhere:
        if module.name.startswith("layers."):
            prefix = names.layer.format(layer=int(module.name.split(".")[1]) // names.sublayers)
            patterns |= {f"{prefix}*", f"*.{prefix}*"}
        else:
            patterns |= {f"*{source}*" for source in module.sources}
    return dataclasses.replace(spec, weights=dataclasses.replace(names, ignored=(*names.ignored, *sorted(patterns))))


def cannot_part(why: str) -> ConfigError:
    """The refusal of a split that would part what belongs together."""
    message = f"pipeline_parallel_size: {why}: choose other stages with QUIRE_PP_LAYER_PARTITION, or one stage"
    return ConfigError(message, setting="pipeline_parallel_size")


def can_be_parted(spec: DecoderSpec) -> bool:
    """Whether somewhere no layer reads what one before it keeps."""
    if spec.vision is not None or spec.hearing is not None:
        return False
    mixers = [spec.mixers_of(layer) for layer in range(spec.layers)]
    if not all(kind_of(mixer).can_stage for layer in mixers for mixer in layer):
        return False
    owners = [
        [getattr(mixer, name, None) for mixer in layer for name in ("kv_layer", "index_layer")] for layer in mixers
    ]
    mlps, together = spec.mlps(), spec.weights.sublayers
    for start in range(together, spec.layers, together):
        is_read = any(owner is not None and owner < start for layer in owners[start:] for owner in layer)
        mlp = mlps[start - 1]
        if not is_read and not (isinstance(mlp, MoE) and mlp.late):
            return True
    return False


class SeenLayers(Sequence[Sequence[MixerLayer]]):
    """The mixers of all layers, for those that read another layer's. Raises ConfigError: that one is in another stage."""

    def __init__(self, seen: Mapping[int, Sequence[MixerLayer]]) -> None:
        self._seen = seen

    def __len__(self) -> int:
        return 1 + max(self._seen)

    def __getitem__(self, layer: int) -> Sequence[MixerLayer]:  # type: ignore[override]
        if layer not in self._seen:
            raise cannot_part(f"a layer reads what layer {layer} keeps, in another stage")
        return self._seen[layer]
