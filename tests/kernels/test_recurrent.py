"""Operations with states in pages: what a request gets does not depend on how its tokens are cut into steps, on page sizes or
on its neighbours; and native kernels equal the references.

Legend as in `kernels/recurrent.py`.
"""

import random

import pytest
import torch
from tests.oracles.drawn_cases import Operation, implementation
from torch import Tensor

from quire.conformance.cases.states import OPERATIONS, Pages
from quire.kernels import cpu, ops
from quire.kernels.cpu import recording

cpu.register()
ops.select("cpu")

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
