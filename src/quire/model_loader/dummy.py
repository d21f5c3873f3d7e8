"""Random weights from a seed, for benchmarks and tests without a checkpoint. The same seed gives the same weights.

One block of noise is drawn and every tensor is cut from it at an own offset, since drawing half a billion numbers takes
longer than the rest of the start (0.6 B bf16 parameters on 2 cores: drawing about 6 s, cutting about 0.5 s).
"""

import hashlib
import math
from collections.abc import Iterable, Iterator

import torch

from quire.models.spec import DecoderSpec
from quire.models.weights import Source

BLOCK_VALUES = (1 << 20) + 7
"""A prime number of values: rows of any length start at different places of the block, so that none is equal to another."""
LOGITS_STD = 2.5
NORM_NOISE = 0.1


def dummy_weights(
    sources: Iterable[Source], spec: DecoderSpec, seed: int, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) for every source. Activations keep unit variance through the layers, and logits a standard
    deviation of about 2.5: neither NaN, nor ties, nor certainties."""
    # An embedding that is scaled up and is the head too would have each token predict itself.
    gain = 1.0 if spec.tied_embeddings and spec.embedding_scale > 1 else LOGITS_STD
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(BLOCK_VALUES, generator=generator)
    blocks: dict[float, torch.Tensor] = {}
    for source in sources:
        std, mean = _scale(source, gain)
        if len(source.shape) == 1:
            yield source.name, _cut(noise, source, seed) * std + mean
            continue
        if std not in blocks:
            blocks[std] = (noise * std).to(dtype)
        yield source.name, _cut(blocks[std], source, seed)


def _scale(source: Source, logits_std: float) -> tuple[float, float]:
    """(standard deviation, mean) of a tensor."""
    module = source.module
    if source.suffix == "bias":
        return NORM_NOISE, 0.0
    if module.kind == "norm":
        return NORM_NOISE, 1.0 - module.weight_offset
    if module.kind == "vector":
        return 1.0, 0.0
    gain = logits_std if module.kind == "embedding" or module.name == "lm_head" else 1.0
    return gain / math.sqrt(module.columns), 0.0


def _cut(block: torch.Tensor, source: Source, seed: int) -> torch.Tensor:
    """A tensor's values: the block, read round and round from a place that depends on the tensor's name."""
    digest = hashlib.blake2b(f"{seed}:{source.name}".encode(), digest_size=8).digest()
    count, size = math.prod(source.shape), block.shape[0]
    start = int.from_bytes(digest, "little") % size
    values = torch.empty(count, dtype=block.dtype)
    at = 0
    while at < count:
        length = min(count - at, size - start)
        values[at : at + length] = block[start : start + length]
        at, start = at + length, 0
    return values.view(source.shape)
