"""What a model is put together from: its decoder, and the encoders beside it.

Knows configuration and specs. Reads no weights.
"""

import dataclasses
from collections.abc import Iterator

import torch

from quire.attention.selector import select_backend
from quire.config import EngineConfig
from quire.config.borrowed_sight import sees_through_transformers
from quire.distributed.communicator import SingleRank
from quire.layers.decoder import Decoder, attention_requests
from quire.layers.encoder.cross_decoder import CrossDecoder
from quire.layers.encoder.encoder import Encoder
from quire.layers.interface import ModelContext
from quire.layers.linear import BoundedLinear, UnquantizedLinear
from quire.layers.parallel import ParallelPlan
from quire.layers.stages import cannot_part
from quire.layers.tower import Tower, TowerDecoder
from quire.layers.vision.borrowed_tower import BorrowedTower
from quire.layers.vision.tower import VisionTower
from quire.media import AUDIO, IMAGE
from quire.models.spec import DecoderSpec
from quire.platforms.interface import Platform

HEARD_TOGETHER = 4
"""The longest sounds that an encoder reads in one step."""


def build_decoder(
    config: EngineConfig, spec: DecoderSpec, context: ModelContext, platform: Platform, slots: torch.dtype
) -> Decoder:
    """The decoder, with what reads besides text, or beside the prompt."""
    if spec.encoder is not None and config.multimodal is not None:
        own = _beside(context, spec.encoder.trunk, platform, config.multimodal.encoder_budget)
        return CrossDecoder(spec, context, Encoder(spec.encoder, own, slots))
    towers = dict(_build_towers(config, spec, context, platform, slots))
    return TowerDecoder(spec, context, towers) if towers else Decoder(spec, context)


def _beside(context: ModelContext, trunk: DecoderSpec, platform: Platform, max_tokens: int) -> ModelContext:
    """What an encoder beside a decoder is made from: whole on every rank, in plain numbers."""
    requests = attention_requests(trunk, context.dtype, context.block_size, deterministic=context.deterministic)
    return dataclasses.replace(
        context,
        kv_dtype=context.dtype,
        max_tokens=max_tokens,
        max_logits=1,
        max_positions=0,
        backend=select_backend(requests, platform.attention_backends()).backend(),
        linear_method=BoundedLinear() if trunk.bounded else UnquantizedLinear(),
        plan=ParallelPlan(),
        communicator=SingleRank(),
    )


def _build_towers(
    config: EngineConfig, spec: DecoderSpec, context: ModelContext, platform: Platform, slots: torch.dtype
) -> Iterator[tuple[str, Tower]]:
    """The model's eyes and ears, by modality."""
    settings = config.multimodal
    if settings is not None and spec.vision is not None and spec.vision.trunk.patches is not None:
        patches = spec.vision.trunk.patches
        # An image may be one patch, with a class token beside it.
        max_tokens = settings.encoder_budget * (patches.merge**2 + patches.class_token)
        if spec.vision.grouped:  # a square has more patches than embeddings
            max_tokens = max(max_tokens, spec.vision.trunk.max_positions)
        yield IMAGE, VisionTower(spec.vision, _beside(context, spec.vision.trunk, platform, max_tokens), slots)
    elif spec.vision is None:
        yield from borrow_towers(config, context)
    if settings is not None and spec.hearing is not None:
        hearing = spec.hearing
        own = _beside(context, hearing.trunk, platform, HEARD_TOGETHER * hearing.length)
        yield AUDIO, Encoder(hearing, own, slots)


def borrow_towers(config: EngineConfig, context: ModelContext) -> Iterator[tuple[str, Tower]]:
    """Transformers' eyes and ears, of a model that Quire has no description of."""
    model = config.model
    is_borrowed = bool(model.modalities) and sees_through_transformers(model.architecture, model.hf_config)
    if config.multimodal is not None and is_borrowed:
        if context.stage.count > 1:
            raise cannot_part("pictures and sounds are read beside the first layers")
        is_random, sees = config.load.load_format == "dummy", IMAGE in model.modalities
        tower = BorrowedTower(context, is_random=is_random, sees=sees)
        yield from ((modality, tower) for modality in model.modalities)
