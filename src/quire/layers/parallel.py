"""Which slice of each weight a rank owns, and which layers a stage has.

Knows sizes and ranks; knows nothing of tensors, processes or communication.
"""

import dataclasses

from quire.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ParallelPlan:
    """Tensor parallelism: `size` ranks share every layer.

    Column-parallel weights (qkv, gate and up) are split by rows, in whole groups (a head's rows stay together);
    row-parallel ones (attention out, down) by columns, and their outputs are summed over ranks.

    Attributes:
        expert_parallel: experts are not split: each rank has some of them whole.
        redundant: places for experts beyond one for each, on all ranks together; None: whole experts stay where they are.
        context: so many neighbours that have the same KV head share its contexts, each with a part of the tokens.
        copies: of the model, whose ranks all share the experts that are not split. `copy`: this rank's.
    """

    size: int = 1
    rank: int = 0
    expert_parallel: bool = False
    context: int = 1
    redundant: int | None = None
    copies: int = 1
    copy: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}")

    @property
    def num_owners(self) -> int:
        """Ranks that share the experts that are not split. `owner`: which of them this one is."""
        return self.copies * self.size

    @property
    def owner(self) -> int:
        return self.copy * self.size + self.rank

    def groups(self, count: int, what: str) -> slice:
        """This rank's share of `count` groups. Fewer groups than ranks are shared: consecutive ranks own the same one.

        Raises:
            ConfigError: the share would not be even.
        """
        if count % self.size == 0:
            share = count // self.size
            return slice(self.rank * share, (self.rank + 1) * share)
        if self.size % count == 0:
            group = self.rank * count // self.size
            return slice(group, group + 1)
        raise ConfigError(
            f"tensor_parallel_size={self.size} does not fit {what}: {count} is neither a multiple nor a divisor of it",
            setting="tensor_parallel_size",
        )

    def share(self, count: int, what: str) -> int:
        """How many of `count` groups this rank has; raises as `groups`."""
        mine = self.groups(count, what)
        return mine.stop - mine.start

    def rows(self, count: int, groups: int, what: str) -> slice:
        """This rank's rows (or columns) of `count`, in whole groups."""
        share, size = self.groups(groups, what), count // groups
        return slice(share.start * size, share.stop * size)

    def columns(self, count: int, groups: int, what: str) -> slice:
        """As `rows`, for a matrix whose outputs are summed over ranks: nothing may be shared, or it would count twice.

        Raises:
            ConfigError: fewer groups than ranks, or the share would not be even.
        """
        if groups < self.size:
            raise ConfigError(
                f"tensor_parallel_size={self.size} does not fit {what}: it has {groups} parts, and each rank needs one of its "
                "own",
                setting="tensor_parallel_size",
            )
        return self.rows(count, groups, what)

    def experts(self, count: int) -> slice:
        """The experts of which this rank has a part, or which it has whole: then shares differ by one at most.

        Raises:
            ConfigError: fewer experts than ranks that share them.
        """
        if not self.expert_parallel:
            return slice(0, count)
        if count < self.num_owners:
            copies = f" and data_parallel_size={self.copies}" if self.copies > 1 else ""
            raise ConfigError(
                f"enable_expert_parallel: {count} experts for tensor_parallel_size={self.size}{copies}; each rank needs one",
                setting="enable_expert_parallel",
            )
        return _share(count, self.owner, self.num_owners)

    def owners(self, count: int) -> list[int]:
        """Of each of `count` experts that are not split, the rank that has it."""
        shares = (_share(count, owner, self.num_owners) for owner in range(self.num_owners))
        return [owner for owner, share in enumerate(shares) for _ in range(share.start, share.stop)]

    def places(self, count: int) -> int:
        """Places for `count` experts on all ranks. Raises ConfigError: ranks would not have the same number."""
        places = count + (self.redundant or 0)
        if places % self.num_owners:
            what = f"{count} experts and num_redundant_experts={self.redundant}"
            text = f"{what} cannot be divided among {self.num_owners} ranks."
            raise ConfigError.of("eplb_config", text)
        return places

    def tokens(self, count: int) -> slice:
        """The tokens of a step of `count` that this rank brings to an exchange: shares that differ by one at most, and may be
        empty."""
        return _share(count, self.rank, self.size)

    def vocabulary(self, count: int) -> slice:
        """This rank's tokens: equal shares, the last one shorter where the vocabulary does not divide."""
        share = -(-count // self.size)
        return slice(min(self.rank * share, count), min((self.rank + 1) * share, count))


def _share(count: int, number: int, of: int) -> slice:
    """Shares that differ by one at most."""
    return slice(count * number // of, count * (number + 1) // of)


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """Pipeline parallelism: `count` stages compute the layers one after another, each some of them.

    Attributes:
        split: how many layers each stage has; empty: as even as can be, the first stages one more.
    """

    number: int = 0
    count: int = 1
    split: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage gives logits."""
        return self.number == self.count - 1

    def layers(self, count: int, together: int = 1) -> range:
        """This stage's layers of `count`, of which `together` must not be parted.

        Raises:
            ConfigError: the split is not of so many layers, or there are too few.
        """
        units, rest = divmod(count // together, self.count)
        sizes = self.split or tuple((units + (stage < rest)) * together for stage in range(self.count))
        is_whole = not any(size % together for size in sizes)
        if len(sizes) != self.count or sum(sizes) != count or min(sizes) < min(1, count) or not is_whole:
            what = f"QUIRE_PP_LAYER_PARTITION={','.join(map(str, sizes))}" if self.split else "too few layers"
            raise ConfigError(
                f"pipeline_parallel_size={self.count} does not fit this model ({what}): it has {count} layers, of which each "
                f"stage needs at least one{f', in whole groups of {together}' if together > 1 else ''}",
                setting="pipeline_parallel_size",
            )
        start = sum(sizes[: self.number])
        return range(start, start + sizes[self.number])
