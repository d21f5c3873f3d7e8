"""The native kernels of mixtures against their references, on drawn shapes; rows and threads change nothing.

Legend: T tokens, E experts, K experts a token, D hidden, I intermediate.
"""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.test_cpu_kernels import DTYPES, drawn, native, reference, tolerance

from quire.kernels import cpu
from quire.kernels.cpu import recording
from quire.kernels.norm import ACTIVATIONS
from quire.kernels.types import ClampedSwiglu, ExpertScratch, ExpertWeights, Routing

pytestmark = pytest.mark.skipif(not cpu.library_status()[0], reason=f"no library: {cpu.library_status()[2]}")

ROUTINGS = [
    Routing(1, 1),
    Routing(12, 3),
    Routing(12, 12, renormalize=False),
    Routing(130, 8, scale=2.5),
    Routing(16, 4, "sigmoid"),
    Routing(16, 3, "sigmoid", groups=4, top_groups=2),
    Routing(15, 3, groups=5, top_groups=3, renormalize=False),
    Routing(9, 2, "sparsemixer", jitter=0.1),
]


def draw_tensor(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def draw_experts(count: int, hidden: int, intermediate: int, dtype: torch.dtype, seed: int = 0) -> ExpertWeights:
    return ExpertWeights(
        draw_tensor(count, 2 * intermediate, hidden, seed=seed, scale=hidden**-0.5).to(dtype),
        draw_tensor(count, hidden, intermediate, seed=seed + 1, scale=intermediate**-0.5).to(dtype),
    )


def scratch_for(tokens: int, experts: ExpertWeights, top_k: int, num_experts: int) -> ExpertScratch:
    hidden = experts.down_EDI.shape[1]
    return ExpertScratch(
        capacity=tokens, num_experts=num_experts, top_k=top_k, hidden=hidden, intermediate=experts.intermediate,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


def run_experts(op, x_TD, ids_TK, weights_TK, experts: ExpertWeights, kind: str = "silu") -> torch.Tensor:
    out_TD, tokens = torch.full_like(x_TD, float("nan")), torch.tensor([len(x_TD)])
    scratch = scratch_for(len(x_TD), experts, ids_TK.shape[1], 1)
    op("moe_experts")(x_TD, ids_TK, weights_TK, op("pack_experts")(experts), kind, tokens, out_TD, scratch)
    return out_TD


def draw_choice(tokens: int, num_experts: int, top_k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = draw_tensor(tokens, num_experts, seed=seed)
    return scores.topk(top_k).indices.int(), draw_tensor(tokens, top_k, seed=seed + 1).softmax(-1)


@drawn
@given(
    routing=st.sampled_from(ROUTINGS),
    tokens=st.integers(1, 40),
    has_bias=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_tokens_choose_as_in_the_reference(routing, tokens, has_bias, threads, seed):
    cpu.set_num_threads(threads)
    logits_TE = draw_tensor(tokens, routing.num_experts, seed=seed, scale=2.0)
    bias_E = draw_tensor(routing.num_experts, seed=seed + 1, scale=0.2) if has_bias else None
    bias_E = None if routing.scoring == "sparsemixer" else bias_E
    found = []
    for op in (native, reference):
        ids_TK = torch.full((tokens, routing.top_k), -1, dtype=torch.int32)
        weights_TK = torch.full((tokens, routing.top_k), float("nan"))
        op("moe_route")(logits_TE, routing, torch.tensor([tokens]), ids_TK, weights_TK, bias_E)
        found.append((ids_TK, weights_TK))
    assert found[0][0].tolist() == found[1][0].tolist()
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-6, rtol=1e-4)


def test_of_equal_experts_and_groups_the_first_are_chosen():
    routing = Routing(12, 4, "sigmoid", groups=4, top_groups=2)
    for bias_E in (None, torch.zeros(12)):
        ids_TK, weights_TK = torch.empty(2, 4, dtype=torch.int32), torch.empty(2, 4)
        native("moe_route")(torch.zeros(2, 12), routing, torch.tensor([2]), ids_TK, weights_TK, bias_E)
        assert ids_TK.tolist() == [[0, 1, 2, 3]] * 2
        assert weights_TK.tolist() == [[0.25] * 4] * 2


@drawn
@given(
    tokens=st.one_of(st.integers(1, 9), st.integers(10, 150)),
    hidden=st.sampled_from([1, 16, 33, 64, 130]),
    intermediate=st.sampled_from([1, 15, 40, 48, 97]),
    choice=st.sampled_from([(1, 1), (5, 2), (6, 6), (40, 3)]),
    kind=st.sampled_from(sorted(ACTIVATIONS)),
    dtype=st.sampled_from(DTYPES),
    extras=st.sampled_from(["", "clamp", "bare clamp", "biases", "input", "biases clamp input", "no gate"]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_experts_give_what_the_reference_gives(
    tokens, hidden, intermediate, choice, kind, dtype, extras, threads, seed
):
    cpu.set_num_threads(threads)
    num_experts, top_k = choice
    experts = draw_experts(num_experts, hidden, intermediate, dtype, seed)
    if extras == "no gate" and intermediate > 1:
        experts = dataclasses.replace(experts, gate_up_E2ID=experts.gate_up_E2ID[:, :intermediate].contiguous())
    if "biases" in extras:
        biases = draw_tensor(num_experts, 2 * intermediate, seed=seed), draw_tensor(num_experts, hidden, seed=seed + 1)
        experts = dataclasses.replace(experts, gate_up_bias_E2I=biases[0], down_bias_ED=biases[1])
    clamp = ClampedSwiglu(1.702, 1.0, offset=int("bare" not in extras)) if "clamp" in extras else None
    experts = dataclasses.replace(experts, clamp=clamp, scales_input="input" in extras)
    ids_TK, weights_TK = draw_choice(tokens, num_experts, top_k, seed)
    x_TD = draw_tensor(tokens, hidden, seed=seed + 2)
    expected = run_experts(reference, x_TD, ids_TK, weights_TK, dataclasses.replace(
        experts, gate_up_E2ID=experts.gate_up_E2ID.float(), down_EDI=experts.down_EDI.float()
    ), kind)  # fmt: skip
    out_TD = run_experts(native, x_TD, ids_TK, weights_TK, experts, kind)
    # Activations between the products are of size one to a few: half precision errs in proportion to them.
    torch.testing.assert_close(out_TD, expected, **tolerance(dtype))


def test_experts_of_several_ranks_add_up_to_all():
    experts, (ids_TK, weights_TK) = draw_experts(7, 32, 24, torch.float32), draw_choice(21, 7, 3, 0)
    x_TD = draw_tensor(21, 32, seed=3)
    parts = [slice(0, 3), slice(3, 7)]
    for op in (native, reference):
        whole = run_experts(op, x_TD, ids_TK, weights_TK, experts)
        shares = [
            run_experts(
                op, x_TD, ids_TK, weights_TK,
                ExpertWeights(experts.gate_up_E2ID[part], experts.down_EDI[part], first=part.start),
            )
            for part in parts
        ]  # fmt: skip
        torch.testing.assert_close(shares[0] + shares[1], whole, atol=1e-6, rtol=1e-5)
        assert shares[0].abs().max() > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_bits_depend_neither_on_the_others_nor_on_threads(dtype):
    experts, (ids_TK, weights_TK) = draw_experts(6, 70, 50, dtype), draw_choice(120, 6, 2, 0)
    x_TD = draw_tensor(120, 70, seed=3)
    cpu.set_num_threads(1)
    alone = [
        run_experts(native, x_TD[t : t + 1], ids_TK[t : t + 1], weights_TK[t : t + 1], experts) for t in range(120)
    ]
    cpu.set_num_threads(3)
    assert torch.equal(run_experts(native, x_TD, ids_TK, weights_TK, experts), torch.cat(alone))


def test_more_tokens_than_fit_the_buffers_are_computed_in_pieces():
    """The buffers hold 128 MiB: about 4,000 pairs of this width."""
    experts, (ids_TK, weights_TK) = draw_experts(2, 4, 4000, torch.bfloat16), draw_choice(5000, 2, 1, 0)
    x_TD = draw_tensor(5000, 4, seed=3)
    out_TD = run_experts(native, x_TD, ids_TK, weights_TK, experts)
    for rows in (slice(0, 8), slice(2496, 2504), slice(4992, 5000)):
        few = run_experts(native, x_TD[rows], ids_TK[rows], weights_TK[rows], experts)
        assert torch.equal(out_TD[rows], few)


def test_a_recorded_mixture_is_replayed_for_other_tokens():
    routing, experts = Routing(6, 2), native("pack_experts")(draw_experts(6, 32, 24, torch.float32))
    x_TD, logits_TE, out_TD = torch.zeros(20, 32), torch.zeros(20, 6), torch.zeros(20, 32)
    gate_T1 = draw_tensor(20, 1, seed=9)
    ids_TK, weights_TK = torch.zeros(20, 2, dtype=torch.int32), torch.zeros(20, 2)
    scratch, count = scratch_for(20, experts, 2, 6), torch.tensor([20])

    def mixture():
        native("moe_route")(logits_TE, routing, count, ids_TK, weights_TK)
        native("moe_experts")(x_TD, ids_TK, weights_TK, experts, "silu", count, out_TD, scratch)
        native("sigmoid_gate")(out_TD, gate_T1)

    step = recording.record(mixture, 20, 3, runs=False)
    assert step is not None
    x_TD.copy_(draw_tensor(20, 32, seed=1))
    logits_TE.copy_(draw_tensor(20, 6, seed=2))
    mixture()
    expected = out_TD.clone()
    for tokens in (1, 7, 20):
        out_TD.fill_(5.0)
        step.replay(tokens, 1)
        assert torch.equal(out_TD[:tokens], expected[:tokens])
        assert bool((out_TD[tokens:] == 5.0).all())
    reference("sigmoid_gate")(expected, -gate_T1)
    torch.testing.assert_close(expected, out_TD * (-gate_T1).sigmoid(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("intermediate", [24, 33])
def test_one_experts_matrices_are_had_apart_without_a_copy(intermediate: int):
    experts = draw_experts(5, 40, intermediate, torch.float32)
    packed, x_TD = native("pack_experts")(experts), draw_tensor(3, 40, seed=9)
    for number in range(5):
        wide, down = native("expert_matrices")(packed, number)
        products = [torch.empty(3, matrix.out_features) for matrix in wide]
        for matrix, out in zip(wide, products, strict=True):
            native("linear")(x_TD, matrix, out)
        torch.testing.assert_close(torch.cat(products, 1), x_TD @ experts.gate_up_E2ID[number].T)
        inside_TI, out_TD = products[0], torch.empty(3, 40)
        native("linear")(inside_TI, down, out_TD)
        torch.testing.assert_close(out_TD, inside_TI @ experts.down_EDI[number].T)
        assert (
            packed.packed_down.data_ptr()
            <= down.packed.data_ptr()
            < packed.packed_down.data_ptr() + packed.packed_down.nbytes
        )
