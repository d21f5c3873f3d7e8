"""Parts of matrices that are several of one shape: a mixture's experts, and the heads of latent attention in its absorbed form.

Knows rows and shapes; knows nothing of files or slots.
Legend: E experts, F heads, R rank, K inputs, N outputs, L values of the latent, U and V rows of a head that make keys and values.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from quire.kernels.adapters import AdapterPart
from quire.layers.modules import Module
from quire.layers.parallel import ParallelPlan
from quire.layers.weights import RowSlice, blocks_of
from quire.lora.peft_folder import Update


@dataclasses.dataclass(frozen=True)
class Segment:
    """One matrix of a checkpoint within a module: its number, its rows there, and where this rank has which of them.

    Attributes:
        rows: of the checkpoint's matrix; where it holds all experts', of all of them.
        columns: this rank's inputs.
        fixed: why it cannot be adapted; empty: it can.
    """

    module: Module
    number: int
    rows: int
    blocks: tuple[RowSlice, ...]
    columns: slice
    fixed: str = ""

    def length(self, block: RowSlice) -> int:
        """Rows of a block."""
        return len(range(self.rows)[block.rows])


@dataclasses.dataclass(frozen=True)
class Several:
    """Matrices of one shape that one table has.

    Attributes:
        count: on this rank. segments: of each.
        shape: (outputs, inputs) of each on this rank.
        is_apart: each is multiplied by itself, for rows that the host knows.
    """

    count: int
    segments: int
    shape: tuple[int, int]
    is_apart: bool = False


HEADS = ("to latent", "to values")
"""What stands behind the name of an absorbed matrix for each of its two tables."""


def vector_part(gain_N: torch.Tensor, shift_N: torch.Tensor) -> AdapterPart:
    """A part that multiplies by one vector and adds another, without an update."""
    return AdapterPart(torch.zeros(0, 1), torch.zeros(0, len(gain_N)), 0, gain_N.float(), shift_N.float())


def experts_of(module: Module, plan: ParallelPlan) -> Several:
    """A mixture's matrices."""
    mine, (rows, columns) = plan.experts(module.experts), module.local_shape(plan)
    count = mine.stop - mine.start
    return Several(count, len(module.parts) // module.experts, (rows // count, columns), is_apart=True)


def heads_of(module: Module, plan: ParallelPlan) -> dict[str, Several]:
    """The matrices of an absorbed one, by the names of their tables."""
    keys, values = module.absorbed or (0, 0)
    heads = module.local_shape(plan)[0] // (keys + values)
    shapes = ((module.columns, keys), (values, module.columns))
    return {f"{module.name} {which}": Several(heads, 1, shape) for which, shape in zip(HEADS, shapes, strict=True)}


def expert_segments(module: Module, plan: ParallelPlan, fixed: str) -> Iterator[tuple[str, Segment]]:
    """By the names of a checkpoint: each expert's own matrices, and those of all experts in one."""
    variants = [module, module.from_stacks()] if module.stacked and not module.is_stacked else [module]
    container = re.sub(r"(\.\d+)?\.[^.]*(\.weight)?$", "", module.sources[0])
    whole = dataclasses.replace(module, stacked=(f"{container} {module.name}",), layouts=()).from_stacks()
    for variant in (*variants, whole):
        columns = variant.local_columns(plan)
        for name, (rows, blocks) in zip(variant.sources, blocks_of(variant, plan), strict=True):
            yield name, Segment(module, 0, rows, blocks, columns, fixed)


def stack_names(segments: Mapping[str, Segment]) -> dict[str, list[str]]:
    """By what experts' matrices are in, the names of those that hold all experts' as Transformers has them."""
    found: dict[str, list[str]] = {}
    for name in segments:
        container, _, module = name.partition(" ")
        if module:
            found.setdefault(container, []).append(name)
    return found


def by_layer(names: Iterable[str], *, has_end: bool = True) -> dict[tuple[str, str], list[str]]:
    """Names of matrices by the number of their layer and their last part, or by the number alone."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        layer, end = _layer_and_end(name)
        if layer and " " not in name:
            found.setdefault((layer, end if has_end else ""), []).append(name)
    return found


def nearest(name: str, known: Mapping[tuple[str, str], list[str]]) -> str | None:
    """The matrix of the same layer that ends like a name more than any other does: a checkpoint may call what is around a matrix
    otherwise than Transformers. None: there is none, or there are two."""
    layer, end = _layer_and_end(name)

    def alike(other: str) -> int:
        pairs = zip(reversed(name.split(".")), reversed(other.split(".")), strict=False)
        return next((number for number, (one, two) in enumerate(pairs) if one != two), 99)

    candidates = sorted(known.get((layer, end)) or known.get((layer, "")) or [], key=alike)
    if not layer or not candidates or (len(candidates) > 1 and alike(candidates[-1]) == alike(candidates[-2])):
        return None
    return candidates[-1]


def _layer_and_end(name: str) -> tuple[str, str]:
    number = re.search(r"\.(\d+)\.", name)
    return ("" if number is None else number[1]), name.rpartition(".")[2]


def find_stack(update: Update, stacks: Mapping[str, Segment], is_apart: bool) -> tuple[str, Update]:
    """Which of the matrices of all experts an update of a bare parameter is for, by its shape, and the update with `down` as
    [E, R, K] and `up` as [E * N, R].

    PEFT has [E * R, K] and [N, R * E]; before 0.18 inputs and outputs were exchanged.

    Args:
        is_apart: Transformers has gate and up in parameters of their own, which have one shape: an adapter's file does not say
            which of them it is for.

    Raises:
        ValueError: none has its shape, or two have.
    """
    assert update.down is not None and update.up is not None
    theirs, experts = (update.up.shape[0], update.down.shape[1]), next(iter(stacks.values())).module.experts
    shapes = {name: (segment.rows // experts, segment.module.columns) for name, segment in stacks.items()}
    exact = [name for name, shape in shapes.items() if shape == theirs]
    exchanged = [name for name, shape in shapes.items() if shape[::-1] == theirs and not is_apart]
    if update.down.shape[0] % experts or len(exact or exchanged) != 1:
        raise ValueError(
            f"has updates [{theirs[0]}, {theirs[1]}] for each expert, and the model has {[*shapes.values()]}"
        )
    down_ERK, up_ENR = update.down.unflatten(0, (experts, -1)), update.up.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if not exact:
        down_ERK, up_ENR = up_ENR.transpose(1, 2), down_ERK.transpose(1, 2)
    return (exact or exchanged)[0], dataclasses.replace(update, down=down_ERK, up=up_ENR.flatten(0, 1))


def join_experts(several: Several, updates: Sequence[tuple[Segment, Update]]) -> AdapterPart:
    """The part of a mixture's matrices on this rank."""
    (outputs, inputs), ranks = (
        several.shape,
        [update.down.shape[-2] for _, update in updates if update.down is not None],
    )
    rank = max(ranks)
    part = AdapterPart(
        torch.zeros(several.count, several.segments * rank, inputs), torch.zeros(several.count, rank, outputs), 0
    )
    for segment, update in updates:
        down, up, each = update.down, update.up, segment.rows // segment.module.experts
        assert down is not None and up is not None
        for block in segment.blocks:
            expert, first = divmod(block.at, outputs)
            number, last = first * several.segments // outputs, first + segment.length(block)
            own_RK = (down if down.ndim == 2 else down[block.rows.start // each])[:, segment.columns]
            part.segments |= 1 << number
            part.down[expert, number * rank : number * rank + len(own_RK)] = own_RK
            part.up[expert, : len(own_RK), first:last] = update.scale * up[block.rows].float().T
    return part


def join_heads(segment: Segment, update: Update) -> dict[str, AdapterPart]:
    """The parts of both tables of an absorbed matrix, whose update has down [R, L] and up [F * (U + V), R]."""
    assert segment.module.absorbed is not None and update.down is not None and update.up is not None
    local_NR = torch.cat([update.up[block.rows] for block in segment.blocks]).float() * update.scale
    down_RL, rank = update.down.float(), update.rank
    keys_FUR, values_FVR = local_NR.unflatten(0, (-1, sum(segment.module.absorbed))).split(
        segment.module.absorbed, dim=1
    )
    to_latent = AdapterPart(keys_FUR.transpose(1, 2).contiguous(), down_RL, 1)
    to_values = AdapterPart(down_RL, values_FVR.transpose(1, 2).contiguous(), 1)
    assert to_latent.rank == to_values.rank == rank
    return {f"{segment.module.name} {which}": part for which, part in zip(HEADS, (to_latent, to_values), strict=True)}
