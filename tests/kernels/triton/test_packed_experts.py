"""Experts as codes in tiles: mixtures give what their values in plain matrices give, however the work is cut.

Legend: T tokens, E experts, K experts a token, D hidden, I intermediate.
"""

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.triton.test_packed_tiles import DEVICE, make
from tests.oracles.operations import experts as reference

from quire.kernels import packed
from quire.kernels.triton.experts import configs as moe_configs
from quire.kernels.triton.experts import mixture as moe
from quire.kernels.triton.experts import packed as packed_experts
from quire.kernels.triton.experts.packed import PackedConfig
from quire.kernels.types import ClampedSwiglu, ExpertCodes, ExpertScratch, ExpertWeights

E, K = 4, 2
SMALL = PackedConfig(16, 2, splits=True)
"""As for few rows; a block of 8 rows is not the interpreter's strength."""


def draw(kind, hidden, width, group, dtype=torch.float16, *, is_gated=True, extras=""):
    """(with codes, with values) of the same experts."""
    rows, codes, values = (2 if is_gated else 1) * width, [], []
    for shape in ((rows, hidden), (hidden, width)):
        # `make` draws by shape: scales tell the experts apart.
        each = [make(kind, *shape, min(group, shape[1]), dtype, has_bias=False) for _ in range(E)]
        for expert, weight in enumerate(each):
            weight.scale = weight.scale * 2.0 ** -(expert % 3 + (6 if kind.endswith("8") else 0))
            if "powers" in extras:
                weight.scale = torch.exp2(weight.scale.log2().round())
        values.append(torch.stack([packed.dequantize(weight) for weight in each]))
        stack = packed_experts.pack_expert_codes(each, is_gated=is_gated and shape[0] == rows)
        assert isinstance(stack, ExpertCodes) and not each
        codes.append(stack)
    more = {}
    generator = torch.Generator().manual_seed(3)
    if "biases" in extras:
        biases = torch.randn(E, rows, generator=generator), torch.randn(E, hidden, generator=generator)
        more = {"gate_up_bias_E2I": biases[0].to(DEVICE), "down_bias_ED": biases[1].to(DEVICE)}
    if "clamp" in extras:
        more["clamp"] = ClampedSwiglu(1.702, 0.8, offset=int("bare" not in extras))
    if "input" in extras:
        more["scales_input"] = True
    shapes = [stack.shape_only() for stack in codes]
    return (
        ExpertWeights(*shapes, gate_up_codes=codes[0], down_codes=codes[1], **more),
        ExpertWeights(*values, **more),
    )


def run(function, experts, x_TD, kind, num_experts=E, count=None):
    """The mixture of given tokens; ids and weights depend on their places alone."""
    generator = torch.Generator().manual_seed(1)
    ids_TK = torch.rand(64, num_experts, generator=generator).argsort(-1)[: len(x_TD), :K].int().contiguous()
    weights_TK = torch.rand(64, K, generator=generator)[: len(x_TD)].contiguous()
    scratch = ExpertScratch(
        capacity=len(x_TD), num_experts=num_experts, top_k=K, hidden=x_TD.shape[1], intermediate=experts.intermediate,
        dtype=x_TD.dtype, device=torch.device(DEVICE),
    )  # fmt: skip
    for buffer in (scratch.activated_PI, scratch.out_PD):
        buffer.fill_(float("nan"))
    out_TD = torch.full_like(x_TD, float("nan"))
    num_tokens = torch.tensor([len(x_TD) if count is None else count], device=DEVICE)
    function(x_TD, ids_TK.to(DEVICE), weights_TK.to(DEVICE), experts, kind, num_tokens, out_TD, scratch)
    assert not scratch.counts_E.any()
    return out_TD


def tokens(count, hidden, dtype=torch.float16):
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)


def assert_same(codes, values, x_TD, kind="silu", **how):
    expected_TD = run(reference.moe_experts, values, x_TD, kind, **how)
    count = how.get("count", len(x_TD))
    out_TD = run(moe.moe_experts, codes, x_TD, kind, **how)
    error = (out_TD - expected_TD)[:count].float().norm() / expected_TD[:count].float().norm()
    assert error < (2e-3 if x_TD.dtype == torch.float16 else 3e-2)  # the interpreter cuts bfloat16 off
    assert out_TD[count:].isnan().all()


CASES = {
    "int4, zeros": ("whole 4", 128, 96, 32, {}),
    "int4, one group a row": ("whole 4", 160, 64, 1 << 20, {}),
    "MXFP4 as gpt-oss has it": ("float 4", 96, 96, 32, {"extras": "powers biases clamp", "dtype": torch.bfloat16}),
    "4-bit floats, groups of 16": ("float 4", 80, 48, 16, {}),
    "int8": ("whole 8", 64, 96, 32, {}),
    "float8, no gates": ("float 8", 64, 64, 64, {"is_gated": False, "extras": "biases"}),
    "int4, weights on inputs": ("whole 4", 64, 64, 64, {"extras": "input biases"}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("config", [SMALL, PackedConfig(32, 2, scales_codes=True)], ids=["few", "many"])
def test_codes_give_what_their_values_give(name, config, monkeypatch):
    kind, hidden, width, group, how = CASES[name]
    monkeypatch.setattr(moe_configs, "choose", lambda *_: dataclasses.replace(moe_configs.INVARIANT, packed=config))
    codes, values = draw(kind, hidden, width, group, **how)
    x_TD = tokens(19, hidden, how.get("dtype", torch.float16))
    assert_same(codes, values, x_TD, "silu" if how.get("is_gated", True) else "relu2", count=18)


def test_few_and_many_tokens_and_padding():
    codes, values = draw("float 4", 64, 64, 32, extras="powers")
    for count, present in ((1, 1), (3, 2), (24, 24)):
        assert_same(codes, values, tokens(count, 64), count=present)
    assert run(moe.moe_experts, codes, tokens(5, 64), "silu", count=0).isnan().all()


def test_a_matrix_in_codes_and_one_in_values_go_together():
    codes, values = draw("whole 4", 64, 64, 32)
    down = dataclasses.replace(codes, gate_up_codes=None, gate_up_E2ID=values.gate_up_E2ID.half())
    assert_same(down, values, tokens(6, 64))


def test_experts_of_one_rank():
    codes, values = (dataclasses.replace(experts, first=3) for experts in draw("whole 4", 64, 64, 32))
    expected_TD = run(reference.moe_experts, values, tokens(12, 64), "silu", num_experts=10)
    out_TD = run(moe.moe_experts, codes, tokens(12, 64), "silu", num_experts=10)
    torch.testing.assert_close(out_TD, expected_TD, rtol=5e-3, atol=5e-2)


def test_in_the_invariant_way_a_row_does_not_depend_on_the_others():
    codes, _ = draw("float 4", 64, 64, 32, extras="powers")
    x_TD = tokens(40, 64)
    whole_TD = run(functools.partial(moe.moe_experts, is_invariant=True), codes, x_TD, "silu")
    for rows in (1, 7):
        assert torch.equal(
            run(functools.partial(moe.moe_experts, is_invariant=True), codes, x_TD[:rows], "silu"), whole_TD[:rows]
        )


def test_scales_take_as_few_bits_as_all_experts_allow():
    def stack(*scales):
        experts = [make("float 4", 16, 128, 32, has_bias=False) for _ in scales]
        for weight, scale in zip(experts, scales, strict=True):
            weight.scale = torch.full_like(weight.scale, scale)
        words = packed_experts.pack_expert_codes(experts, is_gated=False).scale
        return words.element_size() * words.shape[1]

    assert [stack(*scales) for scales in ((1.0, 2.0**-60), (1.0, 1.5), (1.0, 1 / 3), (1.5, 2.0**-60))] == [4, 8, 16, 16]


def test_experts_whose_codes_do_not_fit_are_left_as_they_are():
    def draw_two(**how):
        return [make("whole 4", 32, 128, 32, has_bias=False, **how) for _ in range(2)]

    fractions, permuted, other = draw_two(), draw_two(is_permuted=True), draw_two()
    fractions[1].zero = fractions[1].zero + 0.3
    other[1] = make("float 4", 32, 128, 32, has_bias=False)
    for experts in (fractions, permuted, other, draw_two(dtype=torch.float32)):
        assert packed_experts.pack_expert_codes(experts, is_gated=True) is None
        assert len(experts) == 2
