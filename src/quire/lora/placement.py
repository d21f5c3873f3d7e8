"""Where an adapter's updates belong in our model: from the checkpoint's names to segments of our modules, and this rank's part.

The same table that says what a checkpoint's matrices fill (`layers/weights.py`) says what their updates change. Knows names,
slices and number types; knows nothing of slots or devices.

Legend: R rank, K inputs, N outputs, S segments.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch

from quire.errors import ConfigError
from quire.kernels.adapters import TILE, AdapterPart
from quire.layers.decoder_layer import modules_of
from quire.layers.modules import Module
from quire.layers.parallel import ParallelPlan
from quire.layers.weights import CheckpointTensor, RowSlice, blocks_of
from quire.lora.magnitude import NONE
from quire.lora.method import INPUTS, RESIDUAL
from quire.lora.peft_folder import MAX_RANK, PeftAdapter, Update, complete_scale
from quire.lora.several import (
    Segment,
    Several,
    by_layer,
    expert_segments,
    experts_of,
    find_stack,
    heads_of,
    join_experts,
    join_heads,
    nearest,
    stack_names,
    vector_part,
)
from quire.lora.virtual import embedding_part, key_parts, key_tables
from quire.lora.vocabularies import OF_TOKENS, fill_up, tokens_of, too_many, with_rows
from quire.models.spec import DecoderSpec

MOST_FOUND = 1 << 16
"""Names whose places are remembered: adapters have them in common."""


class Places:
    """What of a model can be adapted.

    Args:
        sources: what of a checkpoint fills the model, on this rank.
        bias_of: a module's bias, on this rank.
        fixed: why a module cannot be adapted; empty: it can.
        has_whole_head: each rank computes all logits, where the embedding serves as the head.
        max_positions: that the model's tables of rotations are made for; 0: the spec's.

    Attributes:
        modules: by name, how many segments each has.
        shapes: by name, this rank's (outputs, inputs); tokens are an embedding's inputs.
        several: by the name of their table, matrices that one table has together.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        sources: Mapping[str, CheckpointTensor],
        plan: ParallelPlan,
        bias_of: Callable[[str], torch.Tensor | None],
        fixed: Callable[[Module], str] = lambda module: module.fixed,
        *,
        has_whole_head: bool = True,
        max_positions: int = 0,
    ) -> None:
        self._plan, self._bias_of = plan, bias_of
        self._spec, self._max_positions = spec, max_positions or spec.max_positions
        self._segments: dict[str, Segment] = {}
        self._found: dict[str, Segment | None] = {}
        self.modules: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, int]] = {}
        self.several: dict[str, Several] = {}
        by_module: dict[str, dict[str, CheckpointTensor]] = {}
        for source in sources.values():
            if (source.module.kind == "linear" or source.module.name == "embedding") and source.suffix != "bias":
                by_module.setdefault(source.module.name, {}).setdefault(source.source, source)
        for name, matrices in by_module.items():
            module = next(iter(matrices.values())).module
            if module.absorbed is not None:
                self.several.update(heads_of(module, plan))
            elif not fixed(module):
                self.modules[name] = len(matrices)
                if module.kind == "linear" and len(matrices) == 1:
                    columns = module.local_columns(plan)
                    self.several[name + INPUTS] = Several(1, 1, (columns.stop - columns.start, 0))
            for number, (matrix, source) in enumerate(matrices.items()):
                columns = source.columns or slice(0, source.module.columns)
                rows, width = source.module.local_shape(plan)[0], columns.stop - columns.start
                self.shapes[name] = (rows, width) if source.module.kind == "linear" else (width, rows)
                rows, blocks = source.rows, source.blocks
                if source.module.added_rows:
                    ((rows, blocks),) = blocks_of(dataclasses.replace(source.module, added_rows=0), plan)
                self._segments[matrix] = Segment(source.module, number, rows, blocks, columns, fixed(module))
        here = {source.module.name for source in sources.values()}
        for module in modules_of(spec):
            if module.kind == "experts" and module.columns and module.name in here:
                self.several[module.name] = experts_of(module, plan)
                self._segments.update(expert_segments(module, plan, fixed(module)))
        if spec.hyper is None:
            self.several |= {f"layers.{each}{RESIDUAL}": Several(1, 1, (spec.hidden, 0)) for each in range(spec.layers)}
        self.several.update(key_tables(spec, plan))
        self._stacks = stack_names(self._segments)
        self._by_end = by_layer(self._segments)
        self._by_layer = by_layer(self._stacks, has_end=False)
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
        if module in self.several:
            each, (outputs, _) = self.several[module], self.several[module].shape
            width = outputs // each.segments
            stretches = [(number, number * width, (number + 1) * width) for number in range(each.segments)]
            return _tiles(stretches)
        stretches = [
            (segment.number, block.at, block.at + segment.length(block))
            for segment in self._segments.values()
            if segment.module.name == module
            for block in segment.blocks
        ]
        if module == "embedding":
            stretches = [(0, 0, self.shapes[module][0])]
        return _tiles(stretches)

    def segment_of_outputs(self, module: str) -> torch.Tensor:
        """[N]: each output's segment."""
        segment_N = torch.zeros(self.shapes[module][0], dtype=torch.int32)
        for segment, first, count in self.tiles(module).tolist():
            segment_N[first : first + count] = segment
        return segment_N

    def num_bytes(self, rank: int, dtype: torch.dtype) -> int:
        """Memory of an adapter that updates every matrix of the layers, but for those that are several."""
        values = sum(
            rank * (num_segments * self.shapes[module][1] + self.shapes[module][0])
            for module, num_segments in self.modules.items()
            if module.startswith("layers.")
        )
        return values * dtype.itemsize

    def is_summed(self, module: str) -> bool:
        """Whether ranks share a matrix's inputs, and sum their outputs."""
        shard = next(each.module.shard for each in self._segments.values() if each.module.name == module)
        return shard == "columns" and self._plan.size > 1

    def find(self, name: str) -> Segment | None:
        """The segment that a matrix of the checkpoint, as an adapter names it, fills."""
        if name not in self._found:
            if len(self._found) >= MOST_FOUND:
                self._found.clear()
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> Segment | None:
        known = self._segments
        found = next((each for each in self._spellings(name) if each in known), None)
        others = (other for each in self._spellings(name) for other in other_spellings(each))
        found = found or next((other for other in others if other in known), None)
        found = found or nearest(name, self._by_end)
        return None if found is None else self._segments[found]

    def _find_stack(self, name: str, update: Update) -> tuple[Segment, Update]:
        """As `find`, for a bare parameter that holds all experts of a layer; raises ValueError: there is none."""
        while name.endswith(".base_layer"):
            name = name.removesuffix(".base_layer")
        container = next((each for each in self._spellings(name) if each in self._stacks), None)
        container = container or nearest(name, self._by_layer)
        if container is None:
            raise ValueError("has no parameters of all experts")
        is_apart = f"{container}.up_proj" in self._segments
        which, update = find_stack(update, {each: self._segments[each] for each in self._stacks[container]}, is_apart)
        return self._segments[which], update

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
        parts: dict[str, AdapterPart] = {}
        for name, update in self._with_rows(adapter).items():
            try:
                if update.input_gain is not None or name.endswith(RESIDUAL):
                    parts |= self._vector(name, update)
                    continue
                segment, update = self._place_one(adapter, name, update)
            except ValueError as problem:
                wrong.append(f"{name} {problem}")
            else:
                found.setdefault(segment.module.name, []).append((segment, update))
        if wrong:
            more = f" … and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise ConfigError(
                f"{adapter.path} does not fit the model ({len(wrong)} targets): {'; '.join(wrong[:10])}{more}",
                setting="lora_path",
            )
        if adapter.virtual is not None:
            parts |= {name: part.to(dtype) for name, part in self._place_virtual(adapter, adapter.virtual).items()}
        for module, updates in found.items():
            segment, update = updates[0]
            if segment.module.absorbed is not None:
                parts |= {name: part.to(dtype) for name, part in join_heads(segment, update).items()}
            elif module in self.several:
                parts[module] = join_experts(self.several[module], updates).to(dtype)
            else:
                parts[module] = self._join(module, updates, dtype)
        return parts

    @property
    def own_tokens(self) -> int:
        """The checkpoint's; those behind them are adapters'."""
        return self._spec.vocab - self._spec.added_tokens

    def num_tokens(self, adapter: PeftAdapter) -> int:
        """The tokens that rows with an adapter that was placed have."""
        found = ((self.find(name), update) for name, update in adapter.updates.items())
        updates = [(segment, update) for segment, update in found if segment is not None]
        return tokens_of(adapter, updates, self.own_tokens, is_tied=self._spec.tied_embeddings)

    def _with_rows(self, adapter: PeftAdapter) -> Mapping[str, Update]:
        """An adapter's updates, and its rows of new tokens where it has no other update for them. A head that is the embedding
        has its rows of tokens, too."""
        updates, rows = dict(adapter.updates), adapter.new_rows
        modules = {
            name: segment.module.name
            for name in [*updates, *adapter.copies]
            if (segment := self.find(name)) is not None
        }
        for name, copy in adapter.copies.items():
            if len(copy) > self.own_tokens:
                rows[modules.get(name, "")] = copy[self.own_tokens :]
        there = {modules.get(name) for name in updates}
        if self._spec.tied_embeddings and "lm_head" not in there:
            trained = [update for update in updates.values() if update.token_rows is not None]
            updates |= {"lm_head": trained[0]} if trained else {}
            whole = next((update.whole for name, update in updates.items() if modules.get(name) == "embedding"), None)
            if whole is not None and len(whole) > self.own_tokens:
                rows.setdefault("lm_head", whole[self.own_tokens :])
            rows |= {"lm_head": rows["embedding"]} if "embedding" in rows else {}
            there |= {"lm_head"} if trained else set()
        for name, segment in self._segments.items():
            if segment.module.name in rows.keys() - there:
                tokens = range(self.own_tokens, self.own_tokens + len(rows[segment.module.name]))
                updates[name] = Update(token_rows=rows[segment.module.name], tokens=tuple(tokens))
        return updates

    def _place_virtual(self, adapter: PeftAdapter, rows_VX: torch.Tensor) -> dict[str, AdapterPart]:
        """What virtual tokens have in the place of what is computed."""
        try:
            if adapter.is_keys:
                return key_parts(self._spec, self._plan, rows_VX, self._max_positions)
            return {"embedding": embedding_part(self._spec, rows_VX)}
        except ValueError as problem:
            raise ConfigError(f"{adapter.path} {problem}", setting="lora_path") from problem

    def _vector(self, name: str, update: Update) -> dict[str, AdapterPart]:
        """What multiplies a matrix' inputs, or is added behind a layer. Raises ValueError: there is none, or of another size."""
        if update.input_gain is None:
            gain = shift = update.scale * cast(torch.Tensor, update.bias)
            gain, expected = torch.ones_like(shift), self._spec.hidden
            if name not in self.several:
                raise ValueError(f"is not a layer of this model, which has {self._spec.layers} and one residual")
        else:
            gain, segment = update.input_gain, self.find(name)
            name = "" if segment is None else segment.module.name + INPUTS
            if segment is None or name not in self.several:
                raise ValueError("is not a matrix of this model" if segment is None else "shares its input with others")
            shift, expected = torch.zeros_like(gain), segment.module.columns
        if len(gain) != expected:
            raise ValueError(f"has a vector of {len(gain)}, and the model's is of {expected}")
        if update.input_gain is not None:
            gain, shift = (each[cast(Segment, segment).columns] for each in (gain, shift))
        return {name: vector_part(gain, shift)}

    def _place_one(self, adapter: PeftAdapter, name: str, update: Update) -> tuple[Segment, Update]:
        """Where an update belongs. Raises ValueError: nowhere, with the reason."""
        segment = self.find(name)
        if segment is None and update.is_bare:
            segment, update = self._find_stack(name, update)
            is_down, halves = segment.module.name.endswith("down"), self.several[segment.module.name].segments
            parameter = "down_proj" if is_down else "gate_up_proj" if halves == 2 else "up_proj"
            complete_scale(adapter, f"{name.removesuffix('.base_layer')}.{parameter}", update)
        elif segment is None:
            raise ValueError("is not a matrix of this model")
        elif update.is_bare:
            complete_scale(adapter, name, update)
        update = fill_up(segment, update)
        rows = adapter.new_rows.get(segment.module.name)
        if rows is not None:
            update = with_rows(segment, update, rows, self.own_tokens)
        problem = _problem(segment, update) or (self._problem_of_tokens(segment, update) if update.tokens else "")
        if problem:
            raise ValueError(problem)
        return segment, _of_rows(segment, update) if update.tokens else update

    def _problem_of_tokens(self, segment: Segment, update: Update) -> str:
        """Why rows of tokens cannot be used for a matrix; empty: they can."""
        module, rows_ND, last = segment.module, update.token_rows, max(update.tokens)
        is_other = rows_ND is None or rows_ND.ndim != 2 or rows_ND.shape[1] != module.columns
        reasons = {
            "has trained tokens, and is neither the embedding nor the head": module.name not in OF_TOKENS,
            "has trained tokens, and is a head with a bias": (
                module.name == "lm_head" and self._bias_of(module.name) is not None
            ),
            f"has rows of {module.columns} numbers in the model, and others in the adapter": is_other,
            f"{too_many(last + 1, segment.rows)} (the adapter trained token {last})": (
                min(update.tokens) < 0 or last >= segment.rows
            ),
            f"has {len(update.tokens)} trained tokens; at most {MAX_RANK} can be served": len(update.tokens) > MAX_RANK,
        }
        return next((why for why, is_so in reasons.items() if is_so), "")

    def _join(self, module: str, updates: Sequence[tuple[Segment, Update]], dtype: torch.dtype) -> AdapterPart:
        """One part of the updates of a module's segments."""
        num_segments, (outputs, inputs) = self.modules[module], self.shapes[module]
        if updates[0][0].module.kind == "embedding":
            return _embedding_part(updates[0][1], updates[0][0].rows, dtype)
        wholes = [update.whole is not None for _, update in updates]
        rank = inputs if any(wholes) else max(update.rank for _, update in updates)
        down, up = torch.zeros(num_segments * rank, inputs, dtype=dtype), torch.zeros(rank, outputs, dtype=dtype)
        part = AdapterPart(down, up, 0)
        if any(wholes) or any(_has_vectors(update) for _, update in updates):
            part.gain, part.shift = torch.ones(outputs), torch.zeros(outputs)
        if any(update.magnitude is not None for _, update in updates):
            part.magnitude = torch.full((outputs,), NONE)
        for segment, update in updates:
            self._fill(part, segment, update, rank)
        return part

    def _fill(self, part: AdapterPart, segment: Segment, update: Update, rank: int) -> None:
        """Put one segment's update in its place."""
        down, up = update.down, update.up
        if (
            update.whole is not None
        ):  # in the place of the matrix: its product is made nothing, and the update is all of it
            down, up = torch.eye(segment.module.columns), update.whole
        first = segment.number * rank
        if down is not None and up is not None:
            part.segments |= 1 << segment.number
            down = down[:, segment.columns]
            down = down[segment.columns] if update.whole is not None else down
            part.down[first : first + len(down)] = down
        for block in segment.blocks:
            place = slice(block.at, block.at + segment.length(block))
            if up is not None:
                rows = update.scale * up[block.rows].float().T
                rows = rows[segment.columns] if update.whole is not None else rows
                part.up[: len(rows), place] = rows
            if part.gain is not None and update.whole is not None:
                part.gain[place] = 0.0
            if part.gain is not None and update.gain is not None:
                part.gain[place] = update.gain[block.rows]
            if part.magnitude is not None and update.magnitude is not None:
                part.magnitude[place] = update.magnitude[block.rows].float()
            if part.shift is not None:
                part.shift[place] = self._shift(segment, update, block)

    def _shift(self, segment: Segment, update: Update, block: RowSlice) -> torch.Tensor:
        """What is added to a block's outputs. Ranks that share a matrix's inputs sum their outputs: the first one adds it."""
        base = self._bias_of(segment.module.name)
        place = slice(block.at, block.at + segment.length(block))
        base = torch.zeros(segment.length(block)) if base is None else base[place].float().cpu()
        if segment.module.shard == "columns" and self._plan.rank > 0:
            return torch.zeros_like(base)
        if update.whole is not None:
            return base if update.bias is None else update.bias[block.rows].float()
        if update.bias is None:
            return torch.zeros_like(base)
        given = update.bias[block.rows].float()
        return given - base if update.is_whole_bias else update.scale * given


def _has_vectors(update: Update) -> bool:
    return any(vector is not None for vector in (update.bias, update.magnitude, update.gain))


def _tiles(stretches: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Of outputs of one segment each: (segment, first, behind the last)."""
    tiles = [
        (segment, first, min(TILE, last - first))
        for segment, begin, last in stretches
        for first in range(begin, last, TILE)
    ]
    return torch.tensor(sorted(tiles, key=lambda tile: tile[1]), dtype=torch.int32)


def _problem(segment: Segment, update: Update) -> str:
    """Why an update cannot be used for a matrix; empty: it can."""
    module = segment.module
    if segment.fixed:
        return f"cannot be adapted: it {segment.fixed}"
    is_embedding, is_several = module.kind == "embedding", module.kind == "experts" or module.absorbed is not None
    if is_several and (update.down is None or update.bias is not None or update.magnitude is not None):
        return "is one of several matrices that are used apart: it can have an update, and nothing else"
    if update.down is not None and update.down.ndim == 3:
        return ""
    if is_embedding and (update.magnitude is not None or update.bias is not None):
        return "is an embedding with a magnitude or a bias, which cannot be served"
    inputs, outputs = (segment.rows, module.columns) if is_embedding else (module.columns, segment.rows)
    theirs: list[int] = [outputs, inputs]
    if update.gain is not None and (is_embedding or is_several):
        return "cannot have its outputs multiplied: they are not computed by themselves"
    if update.down is not None and update.up is not None:
        theirs = [update.up.shape[0], update.down.shape[1]]
    elif update.whole is not None:
        theirs = list(update.whole.shape[::-1] if is_embedding else update.whole.shape)
    if theirs != [outputs, inputs]:
        count, own = theirs[is_embedding], segment.rows
        hint = f"; it {too_many(count, own)}" if module.name in OF_TOKENS and count > own else ""
        return f"is [{outputs}, {inputs}] in the model, and {theirs} in the adapter{hint}"
    for name, vector in (("bias", update.bias), ("magnitude", update.magnitude), ("vector", update.gain)):
        if vector is not None and list(vector.shape) != [outputs]:
            return f"has {outputs} outputs, and a {name} of shape {list(vector.shape)}"
    return ""


def _of_rows(segment: Segment, update: Update) -> Update:
    """Rows of tokens as an update of a head, whose products of these tokens do not count; an embedding's stay as they are."""
    if segment.module.kind == "embedding":
        return update
    count = len(update.tokens)
    up_NR, gain_N = torch.zeros(segment.rows, count), torch.ones(segment.rows)
    up_NR[list(update.tokens), range(count)], gain_N[list(update.tokens)] = 1.0, 0.0
    return Update(down=update.token_rows, up=up_NR, gain=gain_N)


def _embedding_part(update: Update, vocab: int, dtype: torch.dtype) -> AdapterPart:
    """A table by token, and what its rows are multiplied by."""
    if update.token_rows is not None:
        tokens = torch.tensor(update.tokens, dtype=torch.int32)
        table = torch.zeros(vocab, len(tokens), dtype=dtype)
        table[tokens.long(), torch.arange(len(tokens))] = 1.0
        return AdapterPart(table, update.token_rows.to(dtype).contiguous(), 1, tokens=tokens)
    if update.whole is not None:
        width = update.whole.shape[1]
        part = AdapterPart(update.whole.to(dtype), torch.eye(width, dtype=dtype), 1)
        part.gain, part.shift = torch.zeros(width), torch.zeros(width)
        return part
    assert update.down is not None and update.up is not None
    up_RD = update.scale * update.up.float().T
    return AdapterPart(update.down.T.to(dtype).contiguous(), up_RD.to(dtype).contiguous(), 1)


_PAIRS = (
    (r"\.shared_experts\.", ".shared_mlp."),
    (r"\.gate_proj$", ".linear_gate"),
    (r"\.g_proj$", ".gate_proj"),
    (r"\.self_attn\.o_proj$", ".attention.dense"),
    (r"\.mlp\.router$", ".block_sparse_moe.gate"),
    (r"^embed_out$", "lm_head"),
    (r"^lm_head$", "head"),
    (r"\.self_attn\.(q_a|q_b|kv|o_a|o_b)_proj$", r".attn.w\1"),
    (r"\.self_attn\.compressor\.(gate|kv)_proj$", r".attn.compressor.w\1"),
    (r"\.self_attn\.compressor\.indexer\.(gate|kv)_proj$", r".attn.indexer.compressor.w\1"),
    (r"\.self_attn\.compressor\.indexer\.(q_b)_proj$", r".attn.indexer.w\1"),
    (r"\.mlp\.shared_experts\.gate_proj$", ".ffn.shared_experts.w1"),
    (r"\.mlp\.shared_experts\.down_proj$", ".ffn.shared_experts.w2"),
    (r"\.mlp\.shared_experts\.up_proj$", ".ffn.shared_experts.w3"),
)
"""Patterns of names, and what checkpoints have in their place."""


def other_spellings(name: str) -> Iterator[str]:
    """What a checkpoint may call the matrix that Transformers calls so."""
    for theirs, ours in _PAIRS:
        spelled, count = re.subn(theirs, ours, name)
        if count:
            yield spelled
