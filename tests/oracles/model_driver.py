"""Drives a model by hand, without scheduler or runner: pages drawn at random, metadata filled in plain Python.

Each *step* is a list of (sequence, number of its tokens to compute); whatever the chunking, the logprobs that come out for a
position must be the same.
"""

import dataclasses
import json
from collections.abc import Sequence as Many
from pathlib import Path

import torch

from quire.attention.interface import AttentionMetadata
from quire.attention.selector import BUILT_IN_BACKENDS, select_backend
from quire.config import HFConfig
from quire.config.kv_spec import KVCacheSpec, KVKind, group_layers
from quire.distributed.communicator import Communicator, SingleRank
from quire.distributed.token_exchange import TokenExchange
from quire.layers.decoder import Decoder, attention_requests
from quire.layers.interface import ModelContext, StepInputs
from quire.layers.parallel import ParallelPlan, StagePlan
from quire.model_loader.loader import check_checkpoint, open_backend
from quire.model_loader.safetensors_reader import SafetensorsReader
from quire.models.registry import ModelRegistry


@dataclasses.dataclass
class Sequence:
    """A request: its tokens, how many of them have keys and values, and its row."""

    token_ids: list[int]
    row: int
    computed: int = 0


class ModelDriver:
    """Owns pages and tables for a decoder, and runs steps over sequences."""

    def __init__(self, model: Decoder, max_rows: int = 8, pages_a_row: int = 24, seed: int = 0) -> None:
        self.model = model
        size, num_blocks = model.block_size, max_rows * pages_a_row + 1
        specs = model.kv_cache_specs()
        groups = group_layers(specs)
        group_of_layer = [next(g for g, group in enumerate(groups) if i in group.layers) for i in range(len(specs))]
        # Every group has pages of its own kind, and a page that nobody wrote must never be felt: fill them with noise.
        caches = [_noise(model, spec, num_blocks, seed) for spec in specs]
        model.bind_kv_cache(caches, group_of_layer)
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        table = order.view(max_rows, pages_a_row).int()
        max_tokens = model.workspace.max_tokens
        self.step_inputs = StepInputs(
            input_ids=torch.zeros(max_tokens, dtype=torch.int32),
            positions=torch.zeros(max_tokens, dtype=torch.int32),
            logits_index=torch.zeros(model.workspace.max_logits, dtype=torch.int32),
            attention=[],
        )
        shared = {
            "query_start": torch.zeros(max_rows + 1, dtype=torch.int32),
            "seq_lens": torch.zeros(max_rows, dtype=torch.int32),
            "rows": torch.zeros(max_rows, dtype=torch.int32),
            "positions": self.step_inputs.positions,
            "shape": torch.zeros(4, dtype=torch.int64),
        }
        for g in range(len(groups)):
            slots = torch.zeros(max_tokens, dtype=torch.int64)
            block_table = torch.roll(table, g, 0).contiguous()
            self.step_inputs.attention.append(
                AttentionMetadata(block_size=size, block_table=block_table, slot_mapping=slots, **shared)
            )

    @torch.no_grad()
    def step(self, work: Many[tuple[Sequence, int]]) -> list[torch.Tensor]:
        """Compute the next tokens of each sequence; returns float32 logprobs [tokens, V] a sequence, for every position."""
        inputs, start = self.step_inputs, 0
        metadata = inputs.attention[0]
        for b, (sequence, count) in enumerate(work):
            end, length = start + count, sequence.computed + count
            inputs.input_ids[start:end] = torch.tensor(sequence.token_ids[sequence.computed : length])
            inputs.positions[start:end] = torch.arange(sequence.computed, length)
            metadata.query_start[b + 1], metadata.seq_lens[b], metadata.rows[b] = end, length, sequence.row
            positions = torch.arange(sequence.computed, length)
            for group in inputs.attention:
                pages = group.block_table[sequence.row, positions // group.block_size].long()
                group.slot_mapping[start:end] = pages * group.block_size + positions % group.block_size
            sequence.computed, start = length, end
        counts = (start, len(work), max(count for _, count in work), max(s.computed for s, _ in work))
        metadata.shape.copy_(torch.tensor(counts))
        for group in inputs.attention:
            group.num_tokens, group.num_requests, group.max_query_len, group.max_seq_len = counts
        inputs.num_tokens = start
        for metadata in inputs.attention:
            self.model.attention_backend.begin_step(metadata)
        self.model.forward(inputs)
        logprobs = self._all_logprobs(start)
        return list(logprobs.split([count for _, count in work]))

    def _all_logprobs(self, num_tokens: int) -> torch.Tensor:
        """Logits in pieces of at most max_logits, in reverse order within a piece (an index must be obeyed)."""
        pieces: list[torch.Tensor] = []
        inputs, most = self.step_inputs, self.model.workspace.max_logits
        for first in range(0, num_tokens, most):
            index = torch.arange(first, min(first + most, num_tokens), dtype=torch.int32).flip(0)
            inputs.num_logits = len(index)
            inputs.logits_index[: len(index)] = index
            pieces.append(self.model.compute_logits(inputs).float().log_softmax(-1).flip(0))
        return torch.cat(pieces)

    def prefill(self, sequence: Sequence, chunk: int | None = None) -> torch.Tensor:
        """All outstanding tokens of one sequence, in chunks; logprobs of every position."""
        pieces: list[torch.Tensor] = []
        while (left := len(sequence.token_ids) - sequence.computed) > 0:
            pieces += self.step([(sequence, min(left, chunk or left))])
        return torch.cat(pieces)

    def generate(self, sequence: Sequence, count: int, chunk: int | None = None) -> list[int]:
        """Greedy continuation."""
        new: list[int] = []
        for _ in range(count):
            token = int(self.prefill(sequence, chunk)[-1].argmax())
            sequence.token_ids.append(token)
            new.append(token)
        return new


def _noise(model: Decoder, spec: KVCacheSpec, num_blocks: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if spec.kind is KVKind.RECURRENT:  # bytes, with a rest behind each page as where kinds of layers share the memory
        shape = (num_blocks, (spec.page_bytes + 63) // 64 * 64 + 64)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    cache = model.attention_backend.allocate(spec, num_blocks, model.device)
    for plane, noise in zip(cache, torch.randn(cache.shape, generator=generator) * 10, strict=True):
        plane.copy_(noise)  # one after the other: those of latents are the same memory
    return cache


def build_tiny(
    path: str | Path,
    *,
    dtype: str = "float32",
    block_size: int = 16,
    max_tokens: int = 128,
    max_logits: int = 16,
    max_positions: int | None = None,
    communicator: Communicator | None = None,
    expert_parallel: bool = False,
    exchange: TokenExchange | None = None,
    stage: StagePlan | None = None,
    plan: ParallelPlan | None = None,
) -> Decoder:
    """The checkpoint in a folder as a loaded decoder; kernels are those that `ops.select` chose. With a communicator: its
    rank's part of it, and with a stage that stage's."""
    plan = plan or ParallelPlan()
    if communicator is not None and plan.size == 1:
        plan = ParallelPlan(communicator.size, communicator.rank, expert_parallel)
    hf = HFConfig(json.loads((Path(path) / "config.json").read_bytes()))
    spec = ModelRegistry.resolve(hf.architectures).make_spec(hf)
    weight_type = getattr(torch, dtype)
    requests = attention_requests(spec, weight_type, block_size // plan.context, plan)
    backend = open_backend(select_backend(requests, BUILT_IN_BACKENDS), plan, communicator or SingleRank())
    context = ModelContext(
        dtype=weight_type,
        kv_dtype=weight_type,
        activation_dtype=torch.float32,
        block_size=block_size,
        max_tokens=max_tokens,
        max_logits=max_logits,
        max_positions=max_positions or 0,
        backend=backend,
        plan=plan,
        communicator=communicator or SingleRank(),
        exchange=exchange,
        stage=stage or StagePlan(),
    )
    model = Decoder(spec, context)
    reader = SafetensorsReader(path)
    check_checkpoint(model, reader.infos)
    model.load_weights(reader.stream())
    return model
