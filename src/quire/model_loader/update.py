"""New weights for a model that is loaded already: tensor by tensor from a trainer, or all of them from another folder.

What comes has a checkpoint's names and goes the way of one that is read at the start, through the same assembler. A module
changes when its last part has come. Knows names and shapes; knows nothing of how tensors travel.
"""

import os
from collections.abc import Iterable, Mapping

from quire.config import EngineConfig
from quire.errors import ConfigError, RequestError, refusing
from quire.layers.assembly import Sliceable
from quire.layers.decoder import Decoder
from quire.layers.interface import CausalLM
from quire.layers.weights import canonical_name, check_shapes, is_ignored
from quire.model_loader.checkpoint import TensorInfo
from quire.model_loader.loader import check_checkpoint, check_types, open_weights


class WeightUpdate:
    """One update by a trainer, in as many parts as it likes; a module that it sends nothing of stays as it is.

    Raises:
        RequestError: the model's weights cannot be changed so.
    """

    def __init__(self, model: CausalLM, config: EngineConfig) -> None:
        self._model = updatable(model, config)
        self._assembler = self._model.assembler()

    def check(self, infos: Mapping[str, TensorInfo]) -> None:
        """Look at what is going to come, before anything changes.

        Raises:
            RequestError: a name is unknown or has come already, or a tensor has another shape or type than the checkpoint's.
        """
        model = self._model
        canonical = {name: canonical_name(name, model.sources, model.spec) for name in infos}
        unknown = sorted(
            name for name, ours in canonical.items() if ours not in model.sources and not is_ignored(name, model.spec)
        )
        if unknown:
            raise RequestError(
                f"{len(unknown)} names are no tensors of the checkpoint: {', '.join(unknown[:5])}", param="names"
            )
        again = sorted(
            name for name, ours in canonical.items() if ours in model.sources and not self._assembler.awaits(ours)
        )
        if again:
            raise RequestError(
                f"{', '.join(again[:5])} came already in this update: finish it, or start another one", param="names"
            )
        with refusing(ConfigError, param="names"):
            check_shapes(model.sources, model.spec, {name: info.shape for name, info in infos.items()})
            check_types(model, infos)

    def take(self, weights: Iterable[tuple[str, Sliceable]]) -> None:
        """Use tensors that were checked; each module changes with its last part."""
        for name, tensor in weights:
            self._model.take_weights(self._model.put(self._assembler, name, tensor))

    def check_end(self) -> None:
        """Raises RequestError: of a module only some parts have come."""
        if missing := self._assembler.missing_of_begun():
            raise RequestError(
                f"the update is not whole: {len(missing)} tensors are missing of modules of which others came: "
                f"{', '.join(missing[:5])}; send them too",
                param="names",
            )


def updatable(model: CausalLM, config: EngineConfig) -> Decoder:
    """The model, if it can take a checkpoint's tensors one by one. Raises RequestError."""
    if not isinstance(model, Decoder):
        raise RequestError(f"weights of {type(model).__name__} cannot be changed in place: it reads files by itself")
    if config.model.pooling is not None:
        raise RequestError("weights of a pooling model cannot be changed in place: its head is read by itself")
    if config.load.load_format == "sharded_state":
        raise RequestError("load_format='sharded_state' keeps no checkpoint's tensors that could be changed")
    return model


def source_of(config: EngineConfig, path: str | None) -> EngineConfig:
    """The configuration with the folder that weights are read from; None: the model's own.
    Raises RequestError: there is no such folder."""
    if path is None:
        return config
    if not os.path.isdir(path):
        raise RequestError(f"weights_path={path!r} is no folder on the engine's machine", param="weights_path")
    return config.reading_from(path)


def check_reload(model: CausalLM, config: EngineConfig) -> None:
    """Compare a folder's headers with the model before anything changes. Raises RequestError: its weights do not fit."""
    decoder = updatable(model, config)
    if config.load.load_format == "dummy":
        return
    before = decoder.modules, decoder.sources
    try:
        check_checkpoint(decoder, open_weights(config).infos)
    except ConfigError as error:
        raise RequestError(f"{config.model.path}: {error}", param="weights_path") from None
    finally:
        decoder.modules, decoder.sources = before
