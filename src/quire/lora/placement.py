"""Where an adapter's updates belong in our model: from the checkpoint's names to segments of our modules, and this rank's part.

The same table that says what a checkpoint's matrices fill (`layers/weights.py`) says what their updates change. Knows names,
slices and number types; knows nothing of slots or devices.

Legend: R rank, K inputs, N outputs, S segments.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from quire.errors import ConfigError
from quire.kernels.adapters import TILE, AdapterPart
from quire.layers.modules import Module
from quire.layers.parallel import ParallelPlan
from quire.layers.weights import CheckpointTensor, RowSlice
from quire.lora.peft_folder import PeftAdapter, Update
from quire.models.spec import DecoderSpec


@dataclasses.dataclass(frozen=True)
class Segment:
    """One matrix of a checkpoint within a module: its number, its rows there, and where this rank has which of them.

    Attributes:
        rows: of the checkpoint's matrix.
        columns: this rank's inputs.
    """

    module: Module
    number: int
    rows: int
    blocks: tuple[RowSlice, ...]
    columns: slice


class Places:
    """What of a model can be adapted.

    Args:
        sources: what of a checkpoint fills the model, on this rank.
        has_whole_head: each rank computes all logits, where the embedding serves as the head.

    Attributes:
        modules: by name, how many segments each has.
        shapes: by name, this rank's (outputs, inputs); tokens are an embedding's inputs.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        sources: Mapping[str, CheckpointTensor],
        plan: ParallelPlan,
        *,
        has_whole_head: bool = True,
    ) -> None:
        self._spec = spec
        self._segments: dict[str, Segment] = {}
        self.modules: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, int]] = {}
        by_module: dict[str, dict[str, CheckpointTensor]] = {}
        for source in sources.values():
            if (source.module.kind == "linear" or source.module.name == "embedding") and source.suffix != "bias":
                by_module.setdefault(source.module.name, {}).setdefault(source.source, source)
        for name, matrices in by_module.items():
            self.modules[name] = len(matrices)
            for number, (matrix, source) in enumerate(matrices.items()):
                columns = source.columns or slice(0, source.module.columns)
                rows, width = source.module.local_shape(plan)[0], columns.stop - columns.start
                self.shapes[name] = (rows, width) if source.module.kind == "linear" else (width, rows)
                self._segments[matrix] = Segment(source.module, number, source.rows, source.blocks, columns)
        if spec.tied_embeddings and "embedding" in self.modules:
            (embedding,) = (each for each in self._segments.values() if each.module.name == "embedding")
            rows = slice(0, spec.vocab) if has_whole_head else plan.vocabulary(spec.vocab)
            head = dataclasses.replace(embedding.module, name="lm_head", kind="linear")
            self._segments["lm_head"] = Segment(head, 0, spec.vocab, (RowSlice(rows, 0),), embedding.columns)
            self.modules["lm_head"], self.shapes["lm_head"] = 1, (rows.stop - rows.start, head.columns)

    def segments(self) -> dict[str, Segment]:
        """By the checkpoint's names, without a prefix."""
        return dict(self._segments)

    @property
    def prefix(self) -> str:
        """Before the names of a checkpoint's matrices."""
        return self._spec.weights.prefixes[0]

    def tiles(self, module: str) -> torch.Tensor:
        """int32 [X, 3]: (segment, first output, outputs), as `AdapterTable.tiles_X3`."""
        stretches = [
            (segment.number, block.at, block.at + _length(segment, block))
            for segment in self._segments.values()
            if segment.module.name == module
            for block in segment.blocks
        ]
        if module == "embedding":
            stretches = [(0, 0, self.shapes[module][0])]
        tiles = [
            (segment, first, min(TILE, last - first))
            for segment, begin, last in stretches
            for first in range(begin, last, TILE)
        ]
        return torch.tensor(sorted(tiles, key=lambda tile: tile[1]), dtype=torch.int32)

    def find(self, name: str) -> Segment | None:
        """The segment that a matrix of the checkpoint, as an adapter names it, fills."""
        return next((self._segments[each] for each in self._spellings(name) if each in self._segments), None)

    def _spellings(self, name: str) -> Iterator[str]:
        weights = self._spec.weights
        for prefix in sorted(weights.prefixes, key=len, reverse=True):
            if name.startswith(prefix):
                yield name.removeprefix(prefix)
        yield name
        for prefix in weights.prefixes:  # the head usually has no prefix, but not always
            yield name.removeprefix(prefix.removesuffix("model."))
        for theirs, ours in weights.aliases.items():
            if theirs in name:
                yield from self._spellings(name.replace(theirs, ours))

    def place(self, adapter: PeftAdapter, dtype: torch.dtype) -> dict[str, AdapterPart]:
        """This rank's parts of an adapter, by module.

        Raises:
            ConfigError: a target is not in the model, cannot be adapted, or has another shape; lists all of them.
        """
        found: dict[str, list[tuple[Segment, Update]]] = {}
        wrong: list[str] = []
        for name, update in adapter.updates.items():
            segment = self.find(name)
            problem = "is not a matrix of this model" if segment is None else _problem(segment, update)
            if problem:
                wrong.append(f"{name} {problem}")
            elif segment is not None:
                found.setdefault(segment.module.name, []).append((segment, update))
        if wrong:
            more = f" … and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise ConfigError(
                f"{adapter.path} does not fit the model ({len(wrong)} targets): {'; '.join(wrong[:10])}{more}",
                setting="lora_path",
            )
        return {module: self._join(module, updates, dtype) for module, updates in found.items()}

    def _join(self, module: str, updates: Sequence[tuple[Segment, Update]], dtype: torch.dtype) -> AdapterPart:
        """One part of the updates of a module's segments."""
        num_segments, (outputs, inputs) = self.modules[module], self.shapes[module]
        rank, bits = max(update.rank for _, update in updates), 0
        is_embedding = updates[0][0].module.kind == "embedding"
        up_RN = torch.zeros(rank, outputs)
        down = torch.zeros((inputs, rank) if is_embedding else (num_segments * rank, inputs))
        for segment, update in updates:
            assert update.down is not None and update.up is not None
            bits |= 1 << segment.number
            if is_embedding:
                down[:, : update.rank] = update.down.float().T
                up_RN[: update.rank] = update.scale * update.up.float().T
                continue
            first = segment.number * rank
            down[first : first + update.rank] = update.down[:, segment.columns]
            for block in segment.blocks:
                rows = update.scale * update.up[block.rows].float().T
                up_RN[: update.rank, block.at : block.at + rows.shape[1]] = rows
        return AdapterPart(down.to(dtype), up_RN.to(dtype), bits)


def _length(segment: Segment, block: RowSlice) -> int:
    return len(range(segment.rows)[block.rows])


def _problem(segment: Segment, update: Update) -> str:
    """Why an update cannot be used for a matrix; empty: it can."""
    module = segment.module
    if module.plain:
        return "is a router, or stays apart from the other matrices: it cannot be adapted"
    if update.down is None or update.up is None:
        return "has a whole matrix or a bias: only low-rank updates can be served"
    if update.magnitude is not None or update.bias is not None:
        return "has a magnitude or a bias: only low-rank updates can be served"
    is_embedding = module.kind == "embedding"
    inputs, outputs = (segment.rows, module.columns) if is_embedding else (module.columns, segment.rows)
    if (update.down.shape[1], update.up.shape[0]) != (inputs, outputs):
        theirs = f"[{update.up.shape[0]}, {update.down.shape[1]}]"
        return f"is [{outputs}, {inputs}] in the model, and {theirs} in the adapter"
    return ""
