"""Triton's mixtures of experts against their references: routing, few tokens, many tokens, and one way for any number.

Legend: T tokens, E experts, K experts a token, D hidden, I intermediate.
"""

import dataclasses
import functools
import itertools

import pytest
import torch
from tests.oracles.operations import experts as reference
from tests.oracles.operations import norm

from quire.kernels import ops, triton
from quire.kernels.triton.experts import configs as moe_configs
from quire.kernels.triton.experts import grouped as moe_grouped
from quire.kernels.triton.experts import mixture as moe
from quire.kernels.triton.experts.configs import ManyConfig
from quire.kernels.triton.experts.grouped import GroupedConfig
from quire.kernels.triton.norm import activations
from quire.kernels.types import ClampedSwiglu, ExpertScratch, ExpertWeights, Routing

EPS = 1e-6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # noqa: TID251
ops.select("cuda")  # the cases below are made at import


@pytest.fixture(autouse=True)
def kernels(kept_selection):
    """What a mixture asks of other operations is Triton's too."""
    triton.register()
    ops.select("cuda")


@dataclasses.dataclass
class Case:
    """A drawn mixture with its tokens, of which `count` are the step's."""

    tokens: int
    count: int
    routing: Routing
    hidden: int = 64
    intermediate: int = 48
    kind: str = "silu"
    dtype: torch.dtype = torch.float32
    has_bias: bool = False
    extras: str = ""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.tokens * 131 + self.routing.num_experts)
        experts, hidden, width = self.routing.num_experts, self.hidden, self.intermediate

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE)

        self.x_TD = draw(self.tokens, hidden).to(self.dtype)
        self.norm_D = 1 + 0.1 * draw(hidden)
        self.router = ops.pack_linear((draw(experts, hidden) / hidden**0.5).to(self.dtype))
        self.bias_E = 0.3 * draw(experts) if self.has_bias else None
        self.experts = ExpertWeights(
            (draw(experts, 2 * width, hidden) / hidden**0.5).to(self.dtype),
            (draw(experts, hidden, width) / width**0.5).to(self.dtype),
        )
        if "no gate" in self.extras:
            up = self.experts.gate_up_E2ID[:, width:].contiguous()
            self.experts = dataclasses.replace(self.experts, gate_up_E2ID=up)
        if "biases" in self.extras:
            rows = self.experts.gate_up_E2ID.shape[1]
            biases = {"gate_up_bias_E2I": draw(experts, rows), "down_bias_ED": draw(experts, hidden)}
            self.experts = dataclasses.replace(self.experts, **biases)
        if "clamp" in self.extras:
            self.experts = dataclasses.replace(
                self.experts, clamp=ClampedSwiglu(1.702, 0.8, offset=int("bare" not in self.extras))
            )
        if "input" in self.extras:
            self.experts = dataclasses.replace(self.experts, scales_input=True)
        if "part" in self.extras:
            here = slice(experts // 3, experts // 3 + experts // 2)
            gate_up, down = self.experts.gate_up_E2ID[here].contiguous(), self.experts.down_EDI[here].contiguous()
            self.experts = dataclasses.replace(self.experts, gate_up_E2ID=gate_up, down_EDI=down, first=here.start)
        self.num_tokens = torch.tensor([self.count, 1, 1, 1], device=DEVICE)

    def scratch(self) -> ExpertScratch:
        """Room, with nothing usable in it but the counters."""
        scratch = ExpertScratch(
            capacity=self.tokens + 3,
            num_experts=self.routing.num_experts,
            top_k=self.routing.top_k,
            hidden=self.hidden,
            intermediate=self.intermediate,
            dtype=self.dtype,
            device=torch.device(DEVICE),
        )
        for buffer in (scratch.logits_TE, scratch.weights_TK, scratch.activated_PI, scratch.out_PD):
            buffer.fill_(float("nan"))
        scratch.ids_TK.fill_(1 << 30)
        scratch.lists_ET.fill_(1 << 30)
        return scratch

    def run(self, function, x_TD: torch.Tensor, scratch: ExpertScratch) -> torch.Tensor:
        """The whole mixture added to a copy of x."""
        x_TD = x_TD.clone()
        normed_TD = torch.full_like(x_TD, float("nan"))
        num_tokens = self.num_tokens.clamp(max=len(x_TD))
        function(
            x_TD, self.norm_D, EPS, self.router, self.routing, self.experts, self.kind, num_tokens, normed_TD, scratch,
            self.bias_E,
        )  # fmt: skip
        assert not scratch.counts_E.any()
        return x_TD


SOFTMAX = Routing(12, 3)
CASES = {
    "one token": Case(1, 1, SOFTMAX),
    "a few tokens, one of them padding": Case(4, 3, SOFTMAX, kind="gelu_tanh"),
    "many tokens": Case(37, 37, SOFTMAX),
    "many tokens, most of them padding": Case(40, 7, SOFTMAX),
    "only padding": Case(20, 0, SOFTMAX),
    "all tokens on the same experts": Case(21, 21, Routing(4, 4)),
    "one expert": Case(9, 9, Routing(1, 1)),
    "weights as they are": Case(18, 18, Routing(10, 2, renormalize=False)),
    "a few tokens, weights as they are": Case(3, 3, Routing(10, 2, renormalize=False)),
    "sigmoid, bias, scale": Case(19, 19, Routing(16, 4, scoring="sigmoid", scale=2.5), has_bias=True),
    "a few tokens, sigmoid, bias, scale": Case(2, 2, Routing(16, 4, scoring="sigmoid", scale=2.5), has_bias=True),
    "softmax with bias": Case(6, 6, Routing(20, 5), has_bias=True),
    "groups": Case(9, 8, Routing(16, 3, scoring="sigmoid", groups=4, top_groups=2), has_bias=True),
    "groups that do not fill a power of two": Case(7, 7, Routing(15, 4, groups=5, top_groups=3, renormalize=False)),
    "groups, a few tokens": Case(2, 2, Routing(16, 3, groups=4, top_groups=2)),
    "odd sizes": Case(11, 11, SOFTMAX, hidden=72, intermediate=20),
    "odd sizes, a few tokens": Case(2, 2, SOFTMAX, hidden=72, intermediate=20),
    "sizes that no vector fits, a few tokens": Case(2, 2, SOFTMAX, hidden=30, intermediate=22),
    "one choice after the other": Case(9, 8, Routing(9, 2, "sparsemixer", renormalize=False, jitter=0.1)),
    "biases": Case(13, 12, SOFTMAX, extras="biases"),
    "biases and a clamp, a few tokens, odd sizes": Case(
        3, 3, SOFTMAX, hidden=72, intermediate=20, extras="biases clamp"
    ),
    "a clamp without an offset": Case(13, 12, SOFTMAX, extras="bare clamp"),
    "weights on inputs": Case(14, 14, Routing(6, 2, "sigmoid", renormalize=False), extras="input"),
    "weights on inputs, biases, bfloat16": Case(35, 35, SOFTMAX, dtype=torch.bfloat16, extras="input biases clamp"),
    "no gates, relu2": Case(15, 14, SOFTMAX, kind="relu2", extras="no gate"),
    "no gates, a few tokens, biases": Case(3, 3, SOFTMAX, kind="relu", extras="no gate biases"),
    "some of the experts": Case(17, 16, SOFTMAX, extras="part"),
    "some of the experts, a few tokens, groups": Case(2, 2, Routing(16, 3, groups=4, top_groups=2), extras="part"),
    "bfloat16": Case(33, 33, SOFTMAX, dtype=torch.bfloat16),
    "bfloat16, a few tokens": Case(3, 3, SOFTMAX, dtype=torch.bfloat16),
    "float16, a few tokens": Case(4, 4, SOFTMAX, dtype=torch.float16),
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-4 if actual.dtype == torch.float32 else 4e-2
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("function", [moe.norm_moe, functools.partial(moe.norm_moe, is_invariant=True)])
def test_a_normed_mixture_equals_the_reference_and_leaves_padding_alone(name, function):
    case = CASES[name]
    scratch = case.scratch()
    expected_TD = case.run(reference.norm_moe, case.x_TD, case.scratch())
    for _ in range(2):  # the second finds what the first left behind
        actual_TD = case.run(function, case.x_TD, scratch)
        assert_close(actual_TD[: case.count], expected_TD[: case.count])
        assert torch.equal(actual_TD[case.count :], case.x_TD[case.count :])


@pytest.mark.parametrize(
    "name", ["one token", "a few tokens, one of them padding", "many tokens, most of them padding", "bfloat16"]
)
@pytest.mark.parametrize("function", [moe.moe_experts, functools.partial(moe.moe_experts, is_invariant=True)])
def test_experts_by_given_ids_equal_the_reference(name, function):
    case = CASES[name]
    generator = torch.Generator().manual_seed(1)
    shape = case.tokens, case.routing.num_experts
    ids_TK = torch.rand(shape, generator=generator).argsort(-1)[:, : case.routing.top_k].int().contiguous()
    ids_TK, weights_TK = ids_TK.to(DEVICE), torch.rand(ids_TK.shape, generator=generator).to(DEVICE)
    expected_TD, actual_TD = (torch.full_like(case.x_TD, float("nan")) for _ in range(2))
    arguments = case.x_TD, ids_TK, weights_TK, case.experts, case.kind, case.num_tokens
    reference.moe_experts(*arguments, expected_TD, case.scratch())
    scratch = case.scratch()
    function(*arguments, actual_TD, scratch)
    assert_close(actual_TD[: case.count], expected_TD[: case.count])
    assert actual_TD[case.count :].isnan().all()
    assert not scratch.counts_E.any()


@pytest.mark.parametrize("name", CASES)
def test_routing_equals_the_reference(name):
    case = CASES[name]
    logits_TE = torch.randn(case.tokens, case.routing.num_experts, generator=torch.Generator().manual_seed(3))
    logits_TE = logits_TE.to(DEVICE)
    logits_TE[: case.tokens // 2] = logits_TE[: case.tokens // 2].round()  # equals: the first is taken
    shape = case.tokens, case.routing.top_k
    ids, expected_ids = (torch.full(shape, -1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    weights, expected_weights = (torch.full(shape, float("nan"), device=DEVICE) for _ in range(2))
    moe.moe_route(logits_TE, case.routing, case.num_tokens, ids, weights, case.bias_E)
    reference.moe_route(logits_TE, case.routing, case.num_tokens, expected_ids, expected_weights, case.bias_E)
    assert torch.equal(ids[: case.count], expected_ids[: case.count])
    torch.testing.assert_close(weights[: case.count], expected_weights[: case.count])


CUTS = list(itertools.product([True, False], repeat=3))


@pytest.mark.parametrize(
    ("swap", "walk", "bulk"),
    [*CUTS[::5], *(pytest.param(*cut, marks=pytest.mark.exhaustive) for cut in CUTS if cut not in CUTS[::5])],
)
def test_every_way_to_cut_the_work_gives_the_same(swap, walk, bulk, monkeypatch):
    case = Case(50, 45, Routing(6, 2), hidden=96, intermediate=40)
    expected_TD = case.run(reference.norm_moe, case.x_TD, case.scratch())
    grouped = GroupedConfig(swap, walk, 16, 32, 32, 2, 4, bulk)
    config = ManyConfig(grouped, grouped)
    monkeypatch.setattr(moe_configs, "choose", lambda *_: config)
    assert_close(case.run(moe.norm_moe, case.x_TD, case.scratch())[:45], expected_TD[:45])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_the_invariant_way_a_row_does_not_depend_on_the_others(dtype):
    ops.select("cuda", deterministic=True)  # norms and logits are other operations' work
    case = Case(40, 40, Routing(6, 2), dtype=dtype)
    whole_TD = case.run(functools.partial(moe.norm_moe, is_invariant=True), case.x_TD, case.scratch())
    for first, last in ((0, 1), (3, 7), (20, 40)):
        part_TD = case.run(functools.partial(moe.norm_moe, is_invariant=True), case.x_TD[first:last], case.scratch())
        assert torch.equal(part_TD, whole_TD[first:last])


def test_deterministic_selection_takes_the_invariant_way():
    ops.select("cuda", deterministic=True)
    for op in ("norm_moe", "moe_experts"):
        chosen = ops.choices()[op].chosen
        assert chosen.invariant and chosen.function.__qualname__ == f"invariant_{op}"
        assert chosen.function.keywords == {"is_invariant": True}


@pytest.mark.parametrize("gates", [1, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sigmoid_gate_scales_each_row_or_each_value(dtype, gates):
    x_TI, gate_TG = torch.randn(5, 37).to(DEVICE, dtype), torch.randn(5, 50).to(DEVICE)[:, :gates]
    expected_TI = x_TI.clone()
    norm.sigmoid_gate(expected_TI, gate_TG)
    activations.sigmoid_gate(x_TI, gate_TG)
    torch.testing.assert_close(x_TI, expected_TI)


def test_a_smaller_device_has_fewer_tiles_in_flight():
    config = GroupedConfig(False, False, 128, 256, 64, 4, 8, True)
    hopper, ampere, ada = 227 << 10, 163 << 10, 99 << 10
    assert [moe_grouped._stages(config, 2, shared) for shared in (hopper, ampere, ada)] == [4, 3, 2]
