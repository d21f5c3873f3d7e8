"""A head that drafts, loaded beside its model: it takes over how the model is laid out, and what it does not have itself."""

import dataclasses
from collections.abc import Collection

from quire.attention.selector import Selection, select_backend
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.layers.decoder import Decoder, attention_requests
from quire.layers.draft_head import PLAIN_HEADS, DraftHead
from quire.layers.interface import CausalLM
from quire.model_loader.dummy import dummy_weights
from quire.model_loader.loader import LoadedModel, open_weights, with_progress
from quire.models.draft_heads import head_spec
from quire.platforms.interface import Platform
from quire.quantization.registry import linear_method


def load_head(
    config: EngineConfig, method: str, platform: Platform, target: CausalLM, max_tokens: int, max_logits: int
) -> LoadedModel:
    """Build a head and read its weights.

    Args:
        config: whose model is the head's checkpoint.
        method: the head's kind, as `speculative_config` calls it.
        target: the model that it drafts for.
        max_tokens, max_logits: the largest step.

    Raises:
        ConfigError: it does not fit the model.
    """
    target = _with_features(target, method)
    is_random = config.load.load_format == "dummy"
    reader = None if is_random else open_weights(config)
    names: Collection[str] = () if reader is None else reader.infos.keys()
    hf, old = config.model.hf_config, target.context
    spec = head_spec(method, hf, names, target.spec, config.model.architecture)
    requests = attention_requests(spec, old.kv_dtype, old.block_size, old.plan, old.deterministic)
    selection = select_backend(requests, platform.attention_backends(), config.attention.backend)
    context = dataclasses.replace(
        old,
        max_tokens=max_tokens,
        max_logits=max_logits,
        hf=hf,
        path=config.model.path,
        backend=selection.backend(),
        linear_method=linear_method(config.model.quantization, hf, platform.capabilities()),
    )
    model = DraftHead(spec, context)
    if reader is None:
        model.load_weights(dummy_weights(model.sources.values(), spec, config.model.seed, model.dtype, model.device))
    else:
        model.follow_names(names)
        model.load_weights(with_progress(reader))
    model.post_load()
    model.borrow(target)
    return LoadedModel(model, model.attention_backend, selection)


def load_plain_heads(config: EngineConfig, method: str, target: CausalLM, max_rows: int) -> LoadedModel:
    """Build heads without keys and values, and read their weights; takes what `load_head` takes."""
    target = _with_features(target, method)
    model = PLAIN_HEADS[method](config.model.hf_config.to_dict(), target, max_rows)
    if config.load.load_format == "dummy":
        model.load_dummy()
    else:
        model.load_weights(with_progress(open_weights(config)))
    backend = target.attention_backend
    return LoadedModel(model, backend, Selection(type(backend), {}))


def _with_features(target: CausalLM, method: str) -> Decoder:
    if not isinstance(target, Decoder):
        raise ConfigError(
            f"speculative_config.method={method!r} cannot be used: {type(target).__name__} gives no features of its layers",
            setting="speculative_config",
        )
    return target
