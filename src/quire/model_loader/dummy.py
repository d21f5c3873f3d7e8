"""Random weights from a seed, for benchmarks and tests without a checkpoint. The same seed gives the same weights.

One block of noise is drawn and laid end to end until the largest tensor fits; every tensor is a view of it from an own
offset. Drawing half a billion numbers, or only touching as much fresh memory, takes longer than the rest of the start. A
device gets the block once and lays it out itself; there every tensor is a copy, so that no two share a cache's lines.
"""

import hashlib
import math
from collections.abc import Collection, Iterator

import torch

from quire.errors import ConfigError
from quire.layers.assembly import Sliceable
from quire.layers.weights import CheckpointTensor
from quire.model_loader.checkpoint import OwnMemory
from quire.models.spec import DecoderSpec

BLOCK_VALUES = (1 << 20) + 7
"""A prime number of values: rows of any length start at different places of the block, so that none is equal to another."""
LOGITS_STD = 2.5
NORM_NOISE = 0.1


CPU = torch.device("cpu")


def dummy_weights(
    sources: Collection[CheckpointTensor], spec: DecoderSpec, seed: int, dtype: torch.dtype, device: torch.device = CPU
) -> Iterator[tuple[str, Sliceable]]:
    """(name, whole tensor) for every source, with the same values on every device. Activations keep unit variance through
    the layers, and logits a standard deviation of about 2.5: neither NaN, nor ties, nor certainties."""
    # An embedding that is scaled up and is the head too would have each token predict itself.
    gain = 1.0 if spec.tied_embeddings and spec.embedding_scale > 1 else LOGITS_STD
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(BLOCK_VALUES, generator=generator)
    on_device = noise.to(device)
    for source in sources:
        if source.stored.dtypes not in (None, (torch.float8_e4m3fn,)) or source.stored.axes is None:
            raise ConfigError(
                f"load_format='dummy' makes no codes such as {source.name}; use a plain config.json with quantization='int4'",
                setting="load_format",
            )
    matrices = [source for source in sources if len(source.shape) > 1 and not _is_scale(source)]
    scales = {source.name: _scale(source, gain) for source in sources}
    largest: dict[float, int] = {}
    for source in matrices:
        std, _ = scales[source.name]
        largest[std] = max(largest.get(std, 0), math.prod(source.shape))
    blocks = {std: _lay_out((noise * std).to(dtype).to(device), count) for std, count in largest.items()}
    for source in sources:
        std, mean = scales[source.name]
        if _is_scale(source):
            yield source.name, torch.ones(source.shape, device=device)
        elif len(source.shape) == 1:
            yield source.name, _cut(on_device, source, seed) * std + mean
        elif device == CPU or len(source.module.sources) > 1:  # kernels pack it, or it is put together with others
            yield source.name, _cut(blocks[std], source, seed)
        else:
            yield source.name, OwnMemory(_cut(blocks[std], source, seed))


def _is_scale(source: CheckpointTensor) -> bool:
    return source.is_decoded and source.suffix != "weight"


def _scale(source: CheckpointTensor, logits_std: float) -> tuple[float, float]:
    """(standard deviation, mean) of a tensor."""
    module = source.module
    if source.suffix == "bias" or (module.kind == "experts" and not module.columns):
        return NORM_NOISE, 0.0
    if module.kind == "norm":
        return NORM_NOISE, 1.0 - module.weight_offset
    if module.kind == "vector":
        return 1.0, 0.0
    if module.kind == "table" and not module.columns:
        return NORM_NOISE, 1.0 if module.name.endswith(("norm", "_d")) else 0.0
    gain = logits_std if module.kind == "embedding" or module.name == "lm_head" else 1.0
    return gain / math.sqrt(module.columns), 0.0


def _lay_out(block: torch.Tensor, count: int) -> torch.Tensor:
    """The block, repeated until `count` values can be cut from any place of its first copy."""
    copies = -(-count // BLOCK_VALUES) + 1
    return block.repeat(copies)


def _cut(block: torch.Tensor, source: CheckpointTensor, seed: int) -> torch.Tensor:
    """A tensor's values: the block's from a place that depends on the tensor's name."""
    digest = hashlib.blake2b(f"{seed}:{source.name}".encode(), digest_size=8).digest()
    count = math.prod(source.shape)
    start = int.from_bytes(digest, "little") % min(BLOCK_VALUES, block.shape[0] - count)
    return block[start : start + count].view(source.shape)
