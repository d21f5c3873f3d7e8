"""Operations with states in pages: what a request gets does not depend on how its tokens are cut into steps, on page sizes or
on its neighbours; and native kernels equal the references.

Legend as in `kernels/recurrent.py`.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention.interface import AttentionMetadata
from quire.kernels import cpu, ops, registry
from quire.kernels.cpu import recording
from quire.kernels.types import DeltaWeights, LruWeights, SsdWeights

cpu.register()
ops.select("cpu")

PAGES_A_ROW = 24


def implementation(op: str, platform: str) -> Callable[..., None]:
    return next(k.function for k in registry.implementations(op) if k.platform == platform)


class Pages:
    """Tables of some rows and the metadata of a step over them; `allocate` gives states filled with noise, with a rest of
    other bytes behind each."""

    def __init__(self, block_size: int, rows: int = 4, seed: int = 0, device: str = "cpu") -> None:
        count = rows * PAGES_A_ROW + 1
        order = torch.randperm(count - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.count, self.block_size, self.device = count, block_size, device
        self.metadata = AttentionMetadata(
            block_size=block_size,
            query_start=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(rows, dtype=torch.int32, device=device),
            rows=torch.zeros(rows, dtype=torch.int32, device=device),
            block_table=order.view(rows, PAGES_A_ROW).int().to(device),
            slot_mapping=torch.zeros(1, dtype=torch.int64),
            positions=torch.zeros(1, dtype=torch.int32),
            shape=torch.zeros(4, dtype=torch.int64, device=device),
        )

    def allocate(self, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        page_bytes = (4 * size + 63) // 64 * 64 + 64
        raw = torch.full(
            (self.count, page_bytes), 255, dtype=torch.uint8, device=self.device
        )  # as float32: not a number
        return raw[:, : 4 * size].view(torch.float32).unflatten(1, shape)

    def fill(self, work: list[tuple[int, int, int]]) -> AttentionMetadata:
        """A step over (row, tokens computed before, tokens now)."""
        metadata, start = self.metadata, 0
        for b, (row, computed, count) in enumerate(work):
            start += count
            metadata.query_start[b + 1 :], metadata.seq_lens[b], metadata.rows[b] = start, computed + count, row
        metadata.num_tokens, metadata.num_requests = start, len(work)
        metadata.max_query_len = max(count for *_, count in work)
        metadata.shape[:2] = torch.tensor((start, len(work)))
        return metadata


class Operation:
    """One operation with random constants: `inputs` of a token (side by side in one row, at `columns`), the shape of a state
    and of an output, and how it is called.

    Args:
        sizes: heads, size of a head, size of a state; drawn where none are given, as are channels.
    """

    def __init__(
        self, name: str, seed: int, device: str = "cpu", *, sizes: tuple[int, int, int] | None = None, channels: int = 0
    ) -> None:
        draw, self.device = random.Random(seed), device
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.name = name
        self.arguments: Callable[..., tuple[Any, ...]]
        heads, size, state = sizes or draw.choice([(4, 8, 5), (2, 24, 16), (6, 70, 3)])
        shared = draw.choice([1, 2])
        channels = channels or draw.choice([5, 64, 150])
        if name == "causal_conv":
            width, gate = draw.choice([2, 3, 4, 7]), draw.choice(["identity", "silu"])
            weight, bias = normal(width, channels), draw.choice([None, normal(channels)])
            self.inputs = [(channels,)]
            self.state, self.out = (width - 1, channels), (channels,)
            self.arguments = lambda x, states, metadata, out: (x, weight, bias, gate, states, metadata, out)
        elif name == "selective_scan":
            a, d = -normal(state, channels).exp(), normal(channels)
            self.inputs = [(channels,), (channels,), (state,), (state,)]
            self.state, self.out = (state, channels), (channels,)
            self.arguments = lambda x, dt, b, c, states, metadata, out: (x, dt, b, c, a, d, states, metadata, out)
        elif name == "ssd_scan":
            limits = draw.choice([(0.0, float("inf")), (0.5, 1.0)])
            weights = SsdWeights(-normal(heads).exp(), normal(heads), normal(heads), *limits)
            self.inputs = [(heads, size), (heads,), (heads // shared, state), (heads // shared, state)]
            self.state, self.out = (heads, state, size), (heads, size)
            self.arguments = lambda x, dt, b, c, *rest: (x, dt, b, c, weights, *rest)
        elif name == "rg_lru":
            lru = LruWeights(-normal(channels).exp(), normal(channels), normal(channels))
            self.inputs = [(channels,)] * 3
            self.state, self.out = (1, channels), (channels,)
            self.arguments = lambda x, given, forget, *rest: (x, given, forget, lru, *rest)
        elif name == "wkv":
            decay, first = -normal(channels).exp(), normal(channels)
            self.inputs = [(channels,)] * 2
            self.state, self.out = (3, channels), (channels,)
            self.arguments = lambda k, v, *rest: (k, v, decay, first, *rest)
        else:
            decays = (heads, state) if name == "gated_delta_rule, by number" else (heads,)
            self.name, floor = "gated_delta_rule", draw.choice([0.0, -2.0])
            weights = DeltaWeights(-normal(heads).exp(), normal(*decays), draw.choice([1.0, 2.0]), floor)
            keys = (heads // shared, state)
            self.inputs = [keys, keys, (heads, size), decays, (heads,)]
            self.state, self.out = (heads, state, size), (heads, size)
            self.arguments = lambda q, k, v, a, b, *rest: (q, k, v, a, b, weights, *rest)
        self.widths = [torch.Size(shape).numel() for shape in self.inputs]

    def draw(self, tokens: int, seed: int) -> Tensor:
        return torch.randn(tokens, sum(self.widths) + 3, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def run(self, platform: str, rows: Tensor, states: Tensor, metadata: AttentionMetadata) -> Tensor:
        parts = rows[:, : sum(self.widths)].split(self.widths, dim=1)
        inputs = [part.unflatten(1, shape) for part, shape in zip(parts, self.inputs, strict=True)]
        out = torch.full((len(rows) + 1, *self.out), float("nan"), device=self.device)
        implementation(self.name, platform)(*self.arguments(*inputs, states, metadata, out[: len(rows)]))
        assert out[len(rows)].isnan().all(), "wrote beyond its rows"
        return out[: len(rows)]


OPERATIONS = (
    "causal_conv",
    "selective_scan",
    "ssd_scan",
    "gated_delta_rule",
    "gated_delta_rule, by number",
    "rg_lru",
    "wkv",
)
LENGTHS = (1, 7, 33, 40)


@pytest.fixture(params=["any", "cpu"])
def platform(request) -> str:
    if request.param == "cpu" and not cpu.library_status()[0]:
        pytest.skip(cpu.library_status()[2])
    return request.param


def whole(operation: Operation, rows: Tensor) -> Tensor:
    """The reference over one request at once, on one page."""
    pages = Pages(block_size=64, device=operation.device)
    return operation.run("any", rows, pages.allocate(*operation.state), pages.fill([(0, 0, len(rows))]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block_size", [1, 2, 8, 16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_steps_of_any_cut_give_what_one_step_gives(name, block_size, seed, platform):
    cpu.set_num_threads(1 + seed % 3)
    check_cuts(Operation(name, seed), block_size, LENGTHS if block_size > 1 else (1, 7, 23, 24), platform, seed)
    cpu.set_num_threads(2)


def check_cuts(operation: Operation, block_size: int, lengths: tuple[int, ...], platform: str, seed: int) -> None:
    """Requests of some lengths, in random steps of random parts of them."""
    draw, pages = random.Random(seed), Pages(block_size, seed=seed, device=operation.device)
    inputs = [operation.draw(length, seed + row) for row, length in enumerate(lengths)]
    states, computed = pages.allocate(*operation.state), [0] * len(lengths)
    outs: list[list[Tensor]] = [[] for _ in lengths]
    while left := [row for row, length in enumerate(lengths) if computed[row] < length]:
        chosen = draw.sample(left, draw.randint(1, len(left)))
        work = [(row, computed[row], min(draw.choice([1, 3, 20]), lengths[row] - computed[row])) for row in chosen]
        tokens = torch.cat([inputs[row][done : done + count] for row, done, count in work])
        got = operation.run(platform, tokens, states, pages.fill(work))
        for (row, _, count), part in zip(work, got.split([count for *_, count in work]), strict=True):
            outs[row].append(part)
            computed[row] += count
    for rows, parts in zip(inputs, outs, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole(operation, rows), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", OPERATIONS)
def test_native_results_do_not_depend_on_the_cut_to_the_bit(name):
    if not cpu.library_status()[0]:
        pytest.skip(cpu.library_status()[2])
    operation = Operation(name, seed=3)
    rows, outs = operation.draw(60, 1), []
    for block_size, counts in ((64, [60]), (16, [60]), (16, [1, 30, 2, 3, 17, 7]), (3, [1] * 60)):
        pages, done = Pages(block_size), 0
        states, parts = pages.allocate(*operation.state), []
        for count in counts:
            work = pages.fill([(0, done, count)])
            parts.append(operation.run("cpu", rows[done : done + count], states, work))
            done += count
        outs.append(torch.cat(parts))
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_page_holds_the_state_at_its_end_for_another_request(name, platform):
    operation = Operation(name, seed=5)
    pages = Pages(block_size=8)
    first, second = operation.draw(37, 1), operation.draw(30, 2)
    second[:24] = first[:24]
    states = pages.allocate(*operation.state)
    operation.run(platform, first[:11], states, pages.fill([(0, 0, 11)]))
    operation.run(platform, first[11:], states, pages.fill([(0, 11, 26)]))
    kept = states[pages.metadata.block_table[0, :4].long()].clone()
    pages.metadata.block_table[1, :3] = pages.metadata.block_table[0, :3]
    got = operation.run(platform, second[24:], states, pages.fill([(1, 24, 6)]))
    torch.testing.assert_close(got, whole(operation, second)[24:], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(states[pages.metadata.block_table[0, :4].long()], kept, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_recorded_step_follows_the_batch(name):
    if not cpu.library_status()[0]:
        pytest.skip(cpu.library_status()[2])
    operation, pages = Operation(name, seed=9), Pages(block_size=8)
    states, buffer = pages.allocate(*operation.state), operation.draw(12, 0)
    parts = buffer[:, : sum(operation.widths)].split(operation.widths, dim=1)
    inputs = [part.unflatten(1, shape) for part, shape in zip(parts, operation.inputs, strict=True)]
    out = torch.zeros(12, *operation.out)
    metadata = pages.fill([(0, 0, 12)])
    call = operation.arguments(*inputs, states, metadata, out)
    step = recording.record(lambda: implementation(operation.name, "cpu")(*call), 12, 1, runs=False)
    assert step is not None
    rows = operation.draw(20, 3)
    got: list[Tensor] = []
    for start, end in ((0, 9), (9, 10), (10, 20)):
        buffer[: end - start] = rows[start:end]
        pages.fill([(2, start, end - start)])
        step.replay(end - start, 0)
        got.append(out[: end - start].clone())
    torch.testing.assert_close(torch.cat(got), whole(operation, rows), rtol=2e-5, atol=2e-5)


# --- gates and norms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["identity", "silu", "sigmoid"])
@pytest.mark.parametrize("channels", [1, 16, 33, 2100])
def test_native_gates_equal_the_reference(kind, channels):
    wide = torch.randn(5, 2 * channels + 1) * 4
    x, by = wide[:, :channels], wide[:, channels : 2 * channels]
    out, expected = torch.empty(5, channels), torch.empty(5, channels)
    implementation("gate", "cpu")(x, by, kind, out)
    implementation("gate", "any")(x, by, kind, expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "size"), [(1, 5), (3, 16), (4, 700), (5, 33)])
def test_native_gates_of_heads_equal_the_reference(heads, size):
    wide = torch.randn(5, heads * size + heads) * 4
    x, by = wide.split((heads * size, heads), dim=1)
    out, expected = torch.empty(5, heads * size), torch.empty(5, heads * size)
    implementation("gate", "cpu")(x, by, "sigmoid", out)
    implementation("gate", "any")(x, by, "sigmoid", expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gated", ["norm first", "gate first", "no gate"])
@pytest.mark.parametrize(("channels", "group"), [(12, 12), (40, 5), (96, 32), (66, 33)])
def test_native_gated_norms_equal_the_reference(channels, group, gated):
    wide, weight = torch.randn(5, 2 * channels + 1) * 3, torch.randn(channels)
    x, by = wide[:, :channels], None if gated == "no gate" else wide[:, channels : 2 * channels]
    norm_first = gated == "norm first"
    out, expected = torch.empty(5, channels), torch.empty(5, channels)
    for kind in ("silu", "sigmoid"):
        implementation("gated_norm", "cpu")(x, by, weight, 1e-5, group, norm_first, out, kind)
        implementation("gated_norm", "any")(x, by, weight, 1e-5, group, norm_first, expected, kind)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [None, torch.linspace(-3, 3, 37)])
def test_native_scaled_columns_equal_the_reference(scale):
    x = torch.randn(4, 50)[:, 5:42]
    out, expected = torch.zeros(4, 40), torch.zeros(4, 40)
    implementation("scale_columns", "cpu")(x, scale, out[:, :37])
    implementation("scale_columns", "any")(x, scale, expected[:, :37])
    assert torch.equal(out, expected)


def test_columns_that_do_not_lie_side_by_side_are_refused_by_name():
    with pytest.raises(ValueError, match="gate must be a CPU tensor"):
        implementation("gate", "cpu")(torch.randn(4, 3), torch.randn(3, 4).t(), "silu", torch.empty(4, 3))
