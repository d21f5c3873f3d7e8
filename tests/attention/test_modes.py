"""What a token sees (all, a window, its chunk, both sides), slopes, sinks and caps, over pages of any memory layout: every
backend against attention without pages."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from tests.kernels.triton.conftest import repaired_interpreter  # noqa: F401
from tests.oracles.dense_attention import Step, draw_step
from tests.oracles.interpreter import cuda_kernels

import quire.kernels.ops  # noqa: F401
from quire.attention.interface import AttentionParams
from quire.attention.triton import TritonBackend
from quire.kernels import cpu, registry
from quire.kernels.triton.attention.paged_attention import paged_attention as triton
from quire.kernels.triton.launch import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="tensors are on the host")

MODES = st.one_of(
    st.builds(lambda window: {"window": window}, st.sampled_from([0, 1, 20, 70])),
    st.builds(lambda window: {"causal": False, "window": window}, st.sampled_from([0, 1, 2, 9, 40])),
    st.builds(
        lambda chunk, window: {"chunk": chunk, "window": window},
        st.sampled_from([1, 7, 24, 64]),
        st.sampled_from([0, 10]),
    ),
    st.builds(lambda window: {"sees_items": True, "window": window}, st.sampled_from([0, 0, 3, 20])),
)
LENGTHS = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.integers(1, 90)),
        st.integers(1, 60).flatmap(lambda new: st.tuples(st.just(new), st.integers(new, 90))),
    ),
    min_size=1,
    max_size=3,
)
drawn = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


def implementation(platform: str):
    cpu.register()
    if platform == "cpu" and not cpu.library_status()[0]:
        pytest.skip("the native kernels are not built here")
    entry = next(e for e in registry.implementations("paged_attention") if e.platform == platform)
    return entry.function


def make_params(heads: tuple[int, int], head_dim: int, mode: dict[str, int], cap: float, extra: str) -> AttentionParams:
    generator = torch.Generator().manual_seed(heads[0])
    params = AttentionParams(*heads, head_dim, head_dim**-0.5, soft_cap=cap, **mode)
    if "sinks" in extra:
        params = dataclasses.replace(params, sinks=torch.randn(heads[0], generator=generator))
    if "alibi" in extra:
        params = dataclasses.replace(params, alibi_slopes=torch.rand(heads[0], generator=generator) / 4)
    return params


def check(step: Step, run) -> None:
    out_TC = step.new_out()
    run(step.qkv_TC, step.kv_cache, step.metadata, step.params, out_TC)
    torch.testing.assert_close(out_TC, step.expected(), atol=3e-5, rtol=3e-5)


@drawn
@given(
    platform=st.sampled_from(["any", "cpu"]),
    lengths=LENGTHS,
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (5, 5)]),
    head_dim=st.sampled_from([6, 16, 40]),
    mode=MODES,
    cap=st.sampled_from([0.0, 0.0, 2.0]),
    extra=st.sampled_from(["", "sinks", "alibi", "sinks and alibi"]),
    layout=st.sampled_from(["planes", "shared", "latent"]),
    page=st.sampled_from([8, 16]),
    seed=st.integers(0, 99),
)
def test_kernels_of_the_host_agree_with_dense_attention(
    platform, lengths, heads, head_dim, mode, cap, extra, layout, page, seed
):
    step = draw_step(lengths, make_params(heads, head_dim, mode, cap, extra), page=page, layout=layout, seed=seed)
    check(step, implementation(platform))


@settings(drawn, max_examples=14)
@given(
    lengths=LENGTHS,
    heads=st.sampled_from([(4, 2), (6, 1), (2, 2)]),
    head_dim=st.sampled_from([16, 24]),
    mode=MODES,
    extra=st.sampled_from(["", "sinks", "alibi", "sinks and alibi"]),
    layout=st.sampled_from(["planes", "shared", "latent"]),
    deterministic=st.booleans(),
    seed=st.integers(0, 99),
)
def test_triton_kernels_agree_with_dense_attention(lengths, heads, head_dim, mode, extra, layout, deterministic, seed):
    params = dataclasses.replace(make_params(heads, head_dim, mode, 0.0, extra), deterministic=deterministic)
    check(draw_step(lengths, params, layout=layout, seed=seed), triton)


@settings(drawn, max_examples=8)
@given(
    lengths=st.lists(st.tuples(st.just(1), st.integers(1, 90)), min_size=1, max_size=3),
    mode=MODES,
    extra=st.sampled_from(["", "sinks", "alibi"]),
    layout=st.sampled_from(["planes", "shared"]),
)
def test_a_decode_step_in_one_triton_kernel_agrees_with_dense_attention(lengths, mode, extra, layout):
    step = draw_step(lengths, make_params((4, 2), 16, mode, 0.0, extra), layout=layout, writes=True)
    with cuda_kernels():
        check(step, lambda *arguments: TritonBackend().attend(*arguments, None))


@pytest.mark.parametrize("mode", [{"causal": False}, {"causal": False, "window": 600}, {"chunk": 1100}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_agree_for_all_thread_counts(mode, dtype):
    """Longer than one split of the keys, so that threads share a request."""
    params = make_params((2, 1), 16, mode, 0.0, "alibi")
    step = draw_step([(3, 2300), (1, 1200)], params, layout="shared", dtype=dtype)
    step.qkv_TC = step.qkv_TC.float()
    results = []
    for threads in (1, 4):
        cpu.set_num_threads(threads)
        results.append(step.new_out())
        implementation("cpu")(step.qkv_TC, step.kv_cache, step.metadata, params, results[-1])
    assert torch.equal(*results)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(results[0], step.expected(), atol=tolerance, rtol=tolerance)
