"""How many tokens a page has where layers keep states: as many as make pages of attention and states cost alike.

Knows specs and what attention backends say. The number goes into the model, whose KV specs pass it on.
"""

import dataclasses
from collections.abc import Callable

import msgspec
import torch

from quire.attention.selector import Selection
from quire.config.kv_spec import describe_memory, suitable_block_size
from quire.distributed.communicator import SingleRank
from quire.layers.decoder import Decoder
from quire.layers.interface import ModelContext
from quire.layers.mixers import kind_of
from quire.layers.mixers.interface import StateLayer
from quire.layers.parallel import StagePlan
from quire.logger import init_logger
from quire.models.spec import DecoderSpec

logger = init_logger(__name__)


def choose_block_size(
    spec: DecoderSpec, context: ModelContext, select: Callable[[int], Selection], *, is_given: bool
) -> int:
    """Tokens a page.

    Args:
        context: with the size that the configuration has; on whichever device, nothing is allocated there.
        select: the attention backend for a size.
        is_given: the user named the size; it is kept, even where that wastes memory.
    """
    mixers = (mixer for layer in range(spec.layers) for mixer in spec.mixers_of(layer))
    if not any(issubclass(kind_of(mixer), StateLayer) for mixer in mixers):
        return context.block_size
    shapes = dataclasses.replace(context, device=torch.device("meta"), communicator=SingleRank(), stage=StagePlan())
    specs = Decoder(spec, shapes).kv_cache_specs()
    wanted = suitable_block_size(specs) or context.block_size
    if is_given:
        if wanted > context.block_size:
            logger.info("block_size=%d: %s", context.block_size, describe_memory(specs)["block_size_reason"])
        return context.block_size
    size = max(wanted, context.block_size)
    usual = select(context.block_size).backend
    if select(size).backend is not usual:  # It may want a power of two.
        power = 1 << (size - 1).bit_length()
        size = power if select(power).backend is usual else size
    specs = [msgspec.structs.replace(each, block_size=size) for each in specs]
    logger.info("Pages of %d tokens: %s", size, describe_memory(specs)["block_size_reason"])
    return size
