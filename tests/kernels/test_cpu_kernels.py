"""Every native CPU kernel against its plain PyTorch reference, on drawn shapes; recording, threads and batch invariance.

Legend: T tokens, D hidden, I intermediate, N query heads, K KV heads, H head size, V vocabulary, P pages.
"""

import dataclasses
import functools
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.oracles.operations import ASYNCHRONOUS, COMPOSED, PLAIN, QUANTIZED

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels import cpu, ops, registry
from quire.kernels.cpu import recording
from quire.kernels.norm import ACTIVATIONS
from quire.kernels.types import Rope

cpu.register()
pytestmark = pytest.mark.skipif(not cpu.library_status()[0], reason=f"no library: {cpu.library_status()[2]}")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
drawn = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def native(op: str):
    return next(k.function for k in registry.implementations(op) if k.platform == "cpu")


def reference(op: str):
    return next(k.function for k in registry.implementations(op) if k.platform == "any")


@functools.cache
def rounds_activations() -> bool:
    """Whether bfloat16 weights meet activations in bfloat16, as the dot-product instruction wants both."""
    out = torch.empty(1, 1)
    native("linear")(torch.full((1, 1), 1 + 2.0**-12), native("pack_linear")(torch.ones(1, 1).bfloat16()), out)
    return out.item() == 1.0


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    if dtype is torch.bfloat16 and rounds_activations():
        return {"atol": 3e-2, "rtol": 2e-2}
    return {"atol": 2e-4, "rtol": 2e-4}


@pytest.fixture(autouse=True)
def restore_threads(kept_selection):
    ops.select("cpu")  # other tests choose others
    yield
    cpu.set_num_threads(2)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, **tolerances: float) -> None:
    torch.testing.assert_close(actual, expected, **(tolerances or {"atol": 1e-5, "rtol": 1e-5}))


def test_every_operation_has_a_native_kernel_that_is_chosen():
    for op, choice in ops.choices().items():
        if op not in COMPOSED + PLAIN + ASYNCHRONOUS + QUANTIZED and not op.startswith("fp8_"):
            assert choice.chosen.platform == "cpu", op


# --- linear and embeddings -----------------------------------------------------------------------------------------


@drawn
@given(
    n=st.one_of(st.integers(1, 100), st.sampled_from([512, 1000])),
    k=st.one_of(st.integers(1, 130), st.sampled_from([384, 385, 770, 1025])),
    t=st.one_of(st.integers(1, 14), st.integers(15, 300)),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_linear_equals_the_reference(n, k, t, dtype, has_bias, threads, seed):
    cpu.set_num_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    weight_NK = torch.randn(n, k, generator=generator).to(dtype)
    bias_N = torch.randn(n, generator=generator) if has_bias else None
    x_TK = torch.randn(t, k, generator=generator)
    if rounds_activations() and dtype is torch.bfloat16:
        x_TK = x_TK.bfloat16().float()
    out_TN = torch.full((t + 1, n), float("nan"))
    expected_TN = torch.empty(t, n)
    native("linear")(x_TK, native("pack_linear")(weight_NK, bias_N), out_TN[:t])
    reference("linear")(x_TK, reference("pack_linear")(weight_NK.float(), bias_N), expected_TN)
    assert_close(out_TN[:t], expected_TN, atol=1e-5 * k**0.5 * 4, rtol=1e-4)
    assert out_TN[t].isnan().all(), "wrote beyond its rows"


@pytest.mark.parametrize("t", [1, 5, 40])
@pytest.mark.parametrize("k", [1000, 8192])
def test_a_long_sum_is_rounded_in_short_chains(k, t):
    x_TK, weight_NK, out_TN = torch.randn(t, k), torch.randn(100, k) / k**0.5, torch.empty(t, 100)
    native("linear")(x_TK, native("pack_linear")(weight_NK), out_TN)
    error = (out_TN - x_TK.double() @ weight_NK.double().T).square().mean().sqrt().item()
    assert error < 4.5e-7  # in one chain about 2e-8 sqrt(k): 6e-7 and 1.8e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_linear_does_not_depend_on_the_batch_or_the_threads(dtype):
    weight = native("pack_linear")(torch.randn(200, 1000).to(dtype))
    x_TK = torch.randn(64, 1000)
    whole_TN = torch.empty(64, 200)
    native("linear")(x_TK, weight, whole_TN)
    for threads, rows in itertools.product((1, 2, 3), (1, 2, 3, 5, 6, 7, 13, 31)):
        cpu.set_num_threads(threads)
        part_TN = torch.empty(rows, 200)
        native("linear")(x_TK[:rows], weight, part_TN)
        assert torch.equal(part_TN, whole_TN[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 7), (100, 64), (1000, 130)])
def test_embeddings_read_the_packed_weight_exactly(dtype, n, k):
    weight_NK = torch.randn(n, k).to(dtype)
    packed, plain = native("pack_linear")(weight_NK), reference("pack_linear")(weight_NK)
    for t, threads in ((1, 3), (2, 3), (50, 2)):
        cpu.set_num_threads(threads)
        ids_T = torch.randint(0, n, (t,), dtype=torch.int32)
        out_TD, expected_TD = torch.randn(t, k), torch.empty(t, k)
        native("embedding")(ids_T, packed, out_TD, 1.5)
        reference("embedding")(ids_T, plain, expected_TD, 1.5)
        assert torch.equal(out_TD, expected_TD)
        native("add_embedding")(ids_T, packed, out_TD)
        reference("add_embedding")(ids_T, plain, expected_TD)
        assert torch.equal(out_TD, expected_TD)


def test_packing_takes_slices_and_drops_the_original():
    weight_NK = torch.randn(40, 90)[3:30, 5:60]
    packed = native("pack_linear")(weight_NK)
    assert packed.data is None
    out_TD = torch.empty(27, 55)
    native("embedding")(torch.arange(27, dtype=torch.int32), packed, out_TD)
    assert torch.equal(out_TD, weight_NK)


@pytest.mark.parametrize(("x", "out"), [((3, 8), (3, 4)), ((3, 8), (2, 5)), ((3, 7), (3, 5)), ((3, 9), (3, 5))])
def test_a_product_that_does_not_fit_is_refused_with_the_shapes(x, out):
    weight = native("pack_linear")(torch.randn(5, 8))
    with pytest.raises(ValueError, match=r"must be \[3, 8\] and \[3, 5\]"):
        native("linear")(torch.zeros(x), weight, torch.zeros(out))


def test_wrong_types_are_refused_with_the_name_of_the_tensor():
    weight = native("pack_linear")(torch.randn(16, 16))
    with pytest.raises(ValueError, match=r"x must be a contiguous CPU tensor of torch\.float32"):
        native("linear")(torch.randn(2, 16).bfloat16(), weight, torch.empty(2, 16))
    with pytest.raises(ValueError, match=r"a weight has type torch\.int8"):
        native("pack_linear")(torch.zeros(4, 4, dtype=torch.int8))
    with pytest.raises(ValueError, match="activation 'swish' is unknown"):
        native("activation")(torch.randn(2, 16), "swish")


# --- elementwise ---------------------------------------------------------------------------------------------------

shapes = st.tuples(st.integers(1, 9), st.one_of(st.integers(1, 70), st.sampled_from([1000, 2049])))


@drawn
@given(shape=shapes, residual=st.booleans(), bias=st.booleans(), threads=st.integers(1, 4))
def test_norms_equal_the_reference(shape, residual, bias, threads):
    cpu.set_num_threads(threads)
    t, d = shape
    x_TD, weight_D, bias_D = torch.randn(t, d) * 3, torch.randn(d), torch.randn(d) if bias else None
    for op in ("rms_norm", "layer_norm"):
        outs, residuals = [], []
        for implementation in (native(op), reference(op)):
            out_TD = torch.empty(t, d)
            residual_TD = torch.arange(t * d).reshape(t, d) / (t * d) if residual else None
            extra = (bias_D,) if op == "layer_norm" else ()
            implementation(x_TD, weight_D, *extra, 1e-5, out_TD, residual_TD)
            outs.append(out_TD)
            residuals.append(residual_TD)
        assert_close(outs[0], outs[1], atol=2e-5 if d > 1 else 1e-2, rtol=2e-5 if d > 1 else 1e-2)
        assert residuals[0] is None or torch.equal(residuals[0], residuals[1])


def test_a_norm_may_write_over_its_input():
    x_TD, weight_D = torch.randn(3, 65), torch.randn(65)
    expected_TD = torch.empty(3, 65)
    reference("rms_norm")(x_TD, weight_D, 1e-6, expected_TD)
    native("rms_norm")(x_TD, weight_D, 1e-6, x_TD)
    assert_close(x_TD, expected_TD)


@drawn
@given(shape=shapes, kind=st.sampled_from(sorted(ACTIVATIONS)), threads=st.integers(1, 4))
def test_activations_equal_the_reference(shape, kind, threads):
    cpu.set_num_threads(threads)
    t, d = shape
    x_T2I = torch.randn(t, 2 * d) * 10
    if kind != "relu2":
        outs = [torch.empty(t, d), torch.empty(t, d)]
        native("gated_activation")(x_T2I, kind, outs[0])
        reference("gated_activation")(x_T2I, kind, outs[1])
        assert_close(*outs, atol=5e-5, rtol=1e-5)
    actual_T2I, expected_T2I = x_T2I.clone(), x_T2I.clone()
    native("activation")(actual_T2I, kind)
    reference("activation")(expected_T2I, kind)
    assert_close(actual_T2I, expected_T2I, atol=1e-5, rtol=1e-5)


def test_activations_of_extreme_values_are_finite():
    extremes = torch.tensor([[-1e30, -1e4, -100.0, -0.0, 0.0, 1e-30, 100.0, 1e4, 1e18]])
    for kind in (kind for kind in ACTIVATIONS if kind != "relu2"):
        actual, expected = extremes.clone(), extremes.clone()
        native("activation")(actual, kind)
        reference("activation")(expected, kind)
        assert_close(actual, expected)


@drawn
@given(shape=shapes, scale=st.sampled_from([1.0, 0.3]), cap=st.sampled_from([0.0, 30.0]), threads=st.integers(1, 4))
def test_add_scale_and_gather_equal_the_reference(shape, scale, cap, threads):
    cpu.set_num_threads(threads)
    t, d = shape
    x_TD = torch.randn(t, d) * 50
    actual_TD, expected_TD = torch.ones(t, d), torch.ones(t, d)
    native("add")(x_TD, actual_TD, scale)
    reference("add")(x_TD, expected_TD, scale)
    assert_close(actual_TD, expected_TD)
    native("scale_and_cap")(actual_TD, scale, cap)
    reference("scale_and_cap")(expected_TD, scale, cap)
    assert_close(actual_TD, expected_TD, atol=1e-4, rtol=1e-5)
    index_S = torch.randint(0, t, (2 * t,), dtype=torch.int32)
    actual_SD, expected_SD = torch.empty(2 * t, d), torch.empty(2 * t, d)
    native("gather_rows")(x_TD, index_S, actual_SD)
    reference("gather_rows")(x_TD, index_S, expected_SD)
    assert torch.equal(actual_SD, expected_SD)


# --- sampling ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    """A step over pages: what the kernels get, and how many tokens each request computes."""

    metadata: AttentionMetadata
    num_tokens: int
    num_pages: int


def make_batch(lengths: list[tuple[int, int]], block_size: int, spare: int = 0) -> Batch:
    """Requests as (new tokens, context length including them), over shuffled pages; page 0 belongs to nobody."""
    pages_needed = [(length + block_size - 1) // block_size for _, length in lengths]
    order = torch.randperm(sum(pages_needed)).int() + 1
    rows = torch.randperm(len(lengths) + 2).int()[: len(lengths)]
    table = torch.zeros(len(lengths) + 2, max([*pages_needed, 1]) + 1, dtype=torch.int32)
    positions, slots, start = [], [], [0]
    taken = 0
    for b, (new, length) in enumerate(lengths):
        pages = order[taken : taken + pages_needed[b]]
        taken += pages_needed[b]
        table[rows[b], : pages_needed[b]] = pages
        at = torch.arange(length - new, length)
        positions.append(at)
        slots.append(pages[at // block_size].long() * block_size + at % block_size)
        start.append(start[-1] + new)
    tokens = start[-1]
    shape = [tokens, len(lengths), max(new for new, _ in lengths), max(length for _, length in lengths)]

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat((tensor, torch.full((spare,), -1, dtype=tensor.dtype)))

    metadata = AttentionMetadata(
        block_size,
        padded(torch.tensor(start, dtype=torch.int32)),
        padded(torch.tensor([length for _, length in lengths], dtype=torch.int32)),
        padded(rows),
        table,
        padded(torch.cat(slots)),
        padded(torch.cat(positions).int()),
        torch.tensor(shape),
        *shape,
    )
    return Batch(metadata, tokens, sum(pages_needed) + 1)


def make_rope(rotary_dim: int, interleaved: bool) -> Rope:
    angles = torch.rand(512, rotary_dim // 2) * 6.28
    return Rope(torch.cat((angles.cos(), angles.sin()), dim=-1), rotary_dim, interleaved)


@drawn
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (8, 1), (6, 3)]),
    head_dim=st.sampled_from([6, 32, 48, 64, 80, 128]),
    rotary=st.sampled_from(["none", "half", "whole", "interleaved"]),
    normed=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 4),
)
def test_rope_and_cache_equals_the_reference(lengths, heads, head_dim, rotary, normed, dtype, threads):
    cpu.set_num_threads(threads)
    batch = make_batch([(new, before + new) for new, before in lengths], 16)
    t, (n, k) = batch.num_tokens, heads
    rope = None
    if rotary != "none":
        rope = make_rope(head_dim // 2 // 2 * 2 if rotary == "half" else head_dim, rotary == "interleaved")
    norms = (torch.randn(head_dim), torch.randn(head_dim)) if normed else (None, None)
    batch.metadata.slot_mapping[::3] = -1
    results = []
    original_TC = torch.randn(t, (n + 2 * k) * head_dim)
    for implementation in (native("rope_and_cache"), reference("rope_and_cache")):
        qkv_TC = original_TC.clone()
        cache = torch.zeros(2, batch.num_pages, k, 16, head_dim, dtype=dtype)
        implementation(qkv_TC, cache, batch.metadata, n, k, head_dim, rope, *norms, 1e-6)
        results.append((qkv_TC, cache.float()))
    assert_close(results[0][0], results[1][0])
    ulp = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert_close(results[0][1], results[1][1], atol=ulp, rtol=ulp)


def attend(implementation, batch: Batch, qkv_TC, cache, params: AttentionParams) -> torch.Tensor:
    out_TNH = torch.full((qkv_TC.shape[0], params.num_heads * params.head_dim), float("nan"))
    implementation(qkv_TC, cache, batch.metadata, params, out_TNH)
    return out_TNH


def make_inputs(batch: Batch, n: int, k: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, and a cache whose unused page and unused tails hold garbage that must not matter."""
    qkv_TC = torch.randn(batch.num_tokens, (n + 2 * k) * head_dim) * 2
    cache = torch.randn(2, batch.num_pages, k, batch.metadata.block_size, head_dim).to(dtype)
    cache[:, 0] = float("nan")
    for b in range(batch.metadata.num_requests):
        length, size = int(batch.metadata.seq_lens[b]), batch.metadata.block_size
        if length % size:
            cache[:, batch.metadata.block_table[int(batch.metadata.rows[b]), length // size], :, length % size :] = (
                float("nan")
            )
    return qkv_TC, cache


@settings(drawn, max_examples=60)
@given(
    lengths=st.lists(
        st.one_of(
            st.tuples(st.integers(0, 3), st.integers(0, 200)),
            st.tuples(st.integers(1, 300), st.sampled_from([0, 7, 64])),
        ),
        min_size=1,
        max_size=5,
    ),
    heads=st.sampled_from([(1, 1), (4, 2), (8, 1), (6, 2), (7, 1), (5, 5)]),
    head_dim=st.sampled_from([6, 32, 48, 64, 80, 96, 128]),
    block_size=st.sampled_from([8, 16, 32]),
    window=st.sampled_from([0, 0, 1, 20, 70]),
    cap=st.sampled_from([0.0, 0.0, 5.0]),
    extra=st.sampled_from(["", "", "sinks", "alibi"]),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 4),
)
def test_attention_equals_the_reference(lengths, heads, head_dim, block_size, window, cap, extra, dtype, threads):
    cpu.set_num_threads(threads)
    batch = make_batch([(new, before + new) for new, before in lengths], block_size)
    if batch.num_tokens == 0:
        return
    n, k = heads
    params = AttentionParams(
        n,
        k,
        head_dim,
        head_dim**-0.5,
        window,
        cap,
        torch.randn(n) if extra == "sinks" else None,
        torch.rand(n) / 10 if extra == "alibi" else None,
    )
    qkv_TC, cache = make_inputs(batch, n, k, head_dim, dtype)
    clean = torch.nan_to_num(cache)
    actual_TNH = attend(native("paged_attention"), batch, qkv_TC, cache, params)
    expected_TNH = attend(reference("paged_attention"), batch, qkv_TC, clean, params)
    assert_close(actual_TNH, expected_TNH, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 700])
def test_attention_over_long_contexts_equals_the_reference_for_all_thread_counts(dtype, window):
    batch = make_batch([(1, 2500), (3, 1025), (40, 1100)], 16)
    params = AttentionParams(4, 2, 32, 32**-0.5, window)
    qkv_TC, cache = make_inputs(batch, 4, 2, 32, dtype)
    expected_TNH = attend(reference("paged_attention"), batch, qkv_TC, torch.nan_to_num(cache), params)
    results = []
    for threads in (1, 2, 4):
        cpu.set_num_threads(threads)
        results.append(attend(native("paged_attention"), batch, qkv_TC, cache, params))
        assert_close(results[-1], expected_TNH, **tolerance(dtype))
    assert all(torch.equal(result, results[0]) for result in results), "threads changed the result"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 100])
def test_a_query_gets_the_same_bits_alone_in_a_chunk_and_as_decode(dtype, window):
    n, k, head_dim, length = 4, 2, 64, 1300
    params = AttentionParams(n, k, head_dim, head_dim**-0.5, window)
    whole = make_batch([(length, length)], 16)
    qkv_TC, cache = make_inputs(whole, n, k, head_dim, dtype)
    expected_TNH = attend(native("paged_attention"), whole, qkv_TC, cache, params)
    for new, context in ((1, 1300), (1, 1025), (1, 64), (77, 1200), (33, 130), (5, 1027)):
        for threads in (1, 4):
            cpu.set_num_threads(threads)
            metadata = dataclasses.replace(
                whole.metadata,
                query_start=torch.tensor([0, new], dtype=torch.int32),
                seq_lens=torch.tensor([context], dtype=torch.int32),
                shape=torch.tensor([new, 1, new, context]),
            )
            part = attend(
                native("paged_attention"),
                dataclasses.replace(whole, metadata=metadata),
                qkv_TC[context - new : context].contiguous(),
                cache,
                params,
            )
            assert torch.equal(part, expected_TNH[context - new : context])


def test_pages_freed_behind_a_window_may_hold_garbage():
    params = AttentionParams(4, 2, 64, 0.125, window=40)
    batch = make_batch([(1, 200), (50, 150)], 16)
    qkv_TC, cache = make_inputs(batch, 4, 2, 64, torch.bfloat16)
    expected_TNH = attend(native("paged_attention"), batch, qkv_TC, cache, params)
    for b, first_visible in ((0, 160), (1, 61)):
        row = int(batch.metadata.rows[b])
        batch.metadata.block_table[row, : first_visible // 16] = 0  # the null page, full of NaN
    assert torch.equal(attend(native("paged_attention"), batch, qkv_TC, cache, params), expected_TNH)


# --- recording -----------------------------------------------------------------------------------------------------


class TinyModel:
    """Two layers' worth of every operation over persistent buffers, as a model runs them."""

    def __init__(self, max_tokens: int, max_logits: int, dtype: torch.dtype) -> None:
        self.n, self.k, self.h, self.d, self.v = 4, 2, 16, 64, 99
        c = (self.n + 2 * self.k) * self.h
        t, s = max_tokens, max_logits
        self.ids, self.index = torch.zeros(t, dtype=torch.int32), torch.zeros(s, dtype=torch.int32)
        self.x, self.normed, self.residual = torch.zeros(t, 64), torch.zeros(t, 64), torch.zeros(t, 64)
        self.qkv, self.attended, self.gate_up = torch.zeros(t, c), torch.zeros(t, 64), torch.zeros(t, 160)
        self.inner, self.last, self.logits = torch.zeros(t, 80), torch.zeros(s, 64), torch.zeros(s, self.v)
        self.tokens = torch.zeros(s, dtype=torch.int32)
        pack = native("pack_linear")
        self.embed = pack(torch.randn(self.v, 64).to(dtype))
        self.layers = [
            [
                pack((torch.randn(rows, columns) / columns**0.5).to(dtype))
                for rows, columns in ((c, 64), (64, 64), (160, 64), (64, 80))
            ]
            for _ in range(2)
        ]
        self.weight, self.rope = torch.rand(64), make_rope(16, False)
        self.params = AttentionParams(self.n, self.k, self.h, 0.25)

    def run(self, metadata: AttentionMetadata, caches: list[torch.Tensor], tokens: int, logits: int) -> None:
        t, s = slice(0, tokens), slice(0, logits)
        ops.embedding(self.ids[t], self.embed, self.residual[t])
        ops.rms_norm(self.residual[t], self.weight, 1e-6, self.normed[t])
        for (qkv, out, gate_up, down), cache in zip(self.layers, caches, strict=True):
            ops.linear(self.normed[t], qkv, self.qkv[t])
            ops.rope_and_cache(self.qkv[t], cache, metadata, self.n, self.k, self.h, self.rope)
            ops.paged_attention(self.qkv[t], cache, metadata, self.params, self.attended[t])
            ops.linear(self.attended[t], out, self.x[t])
            ops.rms_norm(self.x[t], self.weight, 1e-6, self.normed[t], self.residual[t])
            ops.linear(self.normed[t], gate_up, self.gate_up[t])
            ops.gated_activation(self.gate_up[t], "silu", self.inner[t])
            ops.linear(self.inner[t], down, self.x[t])
            ops.rms_norm(self.x[t], self.weight, 1e-6, self.normed[t], self.residual[t])
        ops.gather_rows(self.normed[t], self.index[s], self.last[s])
        ops.linear(self.last[s], self.embed, self.logits[s])
        ops.scale_and_cap(self.logits[s], 0.5, 30.0)
        ops.argmax(self.logits[s], self.tokens[s])


def fill(to: AttentionMetadata, batch: AttentionMetadata) -> None:
    """What input preparation does: new values in the same memory."""
    for field in ("query_start", "seq_lens", "rows", "slot_mapping", "positions", "shape"):
        source = getattr(batch, field)
        getattr(to, field)[: len(source)].copy_(source)
    to.block_table[: batch.block_table.shape[0], : batch.block_table.shape[1]].copy_(batch.block_table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_replay_equals_the_eager_step_for_other_batches_than_recorded(dtype, threads):
    cpu.set_num_threads(threads)
    model = TinyModel(64, 8, dtype)
    persistent = AttentionMetadata(
        16,
        *(torch.zeros(16, dtype=torch.int32) for _ in range(3)),
        torch.zeros(16, 32, dtype=torch.int32),
        torch.zeros(64, dtype=torch.int64),
        torch.zeros(64, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int64),
    )
    caches = [torch.zeros(2, 64, 2, 16, 16, dtype=dtype) for _ in range(2)]
    fill(persistent, make_batch([(8, 8)] * 8, 16).metadata)
    step = recording.record(lambda: model.run(persistent, caches, 64, 8), 64, 8)
    assert step is not None and step.num_operations > 20
    for lengths in ([(1, 30)], [(1, 5), (1, 100), (20, 25)], [(3, 3)] * 5, [(64, 64)]):
        batch = make_batch(lengths, 16)
        fill(persistent, batch.metadata)
        model.ids[: batch.num_tokens] = torch.randint(0, 99, (batch.num_tokens,), dtype=torch.int32)
        model.index[: len(lengths)] = batch.metadata.query_start[1:] - 1
        start = [torch.randn_like(cache) for cache in caches]
        results = []
        for run in (model.run, lambda m, c, t, s: step.replay(t, s)):
            for cache, values in zip(caches, start, strict=True):
                cache.copy_(values)
            model.tokens.fill_(-7)
            run(persistent, caches, batch.num_tokens, len(lengths))
            results.append((model.logits[: len(lengths)].clone(), model.tokens.clone(), [c.clone() for c in caches]))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert all(torch.equal(a, b) for a, b in zip(results[0][2], results[1][2], strict=True))
        assert (model.tokens[len(lengths) :] == -7).all()


def test_a_step_with_a_pytorch_operation_is_not_recorded_but_runs():
    x_TD = torch.ones(3, 8)

    def step() -> None:
        native("add")(x_TD, x_TD)
        x_TD.mul_(2)

    assert recording.record(step, 3, 1) is None
    assert (x_TD == 4).all()


def test_views_and_allocations_do_not_prevent_a_recording():
    x_TD, out_TD = torch.ones(4, 8), torch.zeros(4, 8)
    step = recording.record(lambda: native("add")(x_TD[1:].view(-1, 8), out_TD[:3]), 3, 1)
    assert step is not None
    step.replay(2, 1)
    assert out_TD[:, 0].tolist() == [2, 2, 1, 0]


def test_a_replay_beyond_the_recorded_size_is_refused():
    x_TD = torch.ones(4, 8)
    step = recording.record(lambda: native("activation")(x_TD, "relu"), 4, 1)
    assert step is not None
    with pytest.raises(ValueError, match="replay of 5 tokens"):
        step.replay(5, 1)
    with pytest.raises(ValueError, match="could not be told apart"):
        recording.record(lambda: None, 4, 4)


def test_a_recorded_step_keeps_its_memory_alive():
    out_TD = torch.zeros(2, 1 << 16)
    step = recording.record(lambda: native("add")(torch.empty(2, 1 << 16).view(2, -1), out_TD), 2, 1)
    assert step is not None
    step.replay(2, 1)
