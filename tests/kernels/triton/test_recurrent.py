"""Triton's convolutions, scans and gates against their references, over requests that are cut into steps at random."""

import pytest
import torch
from tests.kernels.test_recurrent import check_cuts, whole
from tests.oracles.drawn_cases import Operation, implementation

from quire.conformance.cases.states import OPERATIONS, Pages
from quire.kernels import triton
from quire.kernels.recurrent import GATES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # noqa: TID251
triton.register()


@pytest.mark.parametrize(("seed", "block_size"), [(0, 8), (1, 16), (2, 2), (3, 16)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_steps_of_any_cut_give_what_the_reference_gives_in_one(name, seed, block_size):
    check_cuts(Operation(name, seed, DEVICE), block_size, (1, 7, 33), "cuda", seed)


@pytest.mark.parametrize("name", OPERATIONS)
def test_requests_beyond_the_steps_own_do_nothing(name):
    """As in a captured graph: more requests than there are, which begin and end behind the last token."""
    operation = Operation(name, 4, DEVICE)
    pages, rows = Pages(8, device=DEVICE), operation.draw(20, 1)
    metadata, states = pages.fill([(1, 0, 20)]), pages.allocate(*operation.state)
    metadata.num_requests, metadata.query_start[1:], metadata.seq_lens[1:] = 4, 20, 0
    got = operation.run("cuda", rows, states, metadata)
    torch.testing.assert_close(got, whole(operation, rows), rtol=2e-5, atol=2e-5)


def test_inputs_may_have_sixteen_bits():
    operation = Operation("causal_conv", 1, DEVICE)
    pages, rows = Pages(8, device=DEVICE), operation.draw(20, 1)
    got = operation.run("cuda", rows.bfloat16(), pages.allocate(*operation.state), pages.fill([(0, 0, 20)]))
    torch.testing.assert_close(got, whole(operation, rows.bfloat16().float()), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "group"), [(12, 12), (40, 5), (96, 32)])
def test_gates_norms_and_scales_equal_the_reference(channels, group, dtype):
    wide, weight = (torch.randn(3, 2 * channels + 1) * 3).to(DEVICE, dtype), torch.randn(channels, device=DEVICE)
    x, by = wide[:, :channels], wide[:, channels : 2 * channels]
    calls = [("gate", (x, by[:, : channels // each], kind)) for kind in GATES for each in (1, 4)]
    calls += [("gated_norm", (x, gate, weight, 1e-5, group, first)) for gate in (by, None) for first in (True, False)]
    calls += [("scale_columns", (x, scale)) for scale in (weight, None)]
    for op, arguments in calls:
        outs = [torch.zeros(3, channels, device=DEVICE, dtype=dtype) for _ in range(2)]
        for out, platform in zip(outs, ("cuda", "any"), strict=True):
            implementation(op, platform)(*arguments, out)
        bound = 1e-5 if dtype is torch.float32 else 5e-2
        torch.testing.assert_close(outs[0], outs[1], rtol=bound, atol=bound, msg=lambda text, op=op: f"{op}: {text}")
