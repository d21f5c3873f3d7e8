"""Drawn cases of operations over pages: attention, keys and values or latents that are written, scans with states.

Legend: P pages; others as in `kernels/attention.py` and `kernels/recurrent.py`.
"""

import dataclasses
from typing import Any

import torch

from quire.attention.interface import AttentionMetadata
from quire.attention.reference import ReferenceBackend
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.conformance.cases.batches import Batch, make_batch, reference
from quire.conformance.cases.case import TOLERANCES, Case, Shapes, columns, draw, empty, moved, normal
from quire.conformance.cases.states import OPERATIONS, Operation, Pages
from quire.kernels.types import Rope

FP8 = torch.float8_e4m3fn


def _attention(rng: Shapes, dtype: torch.dtype, **more: Any) -> Batch:
    count = rng.randint(1, rng.of((7,), (3,)))
    seq_lens = [rng.of((1, 9, 16, 40, 100, 333), (1, 9, 40)) for _ in range(count)]
    query_lens = [rng.randint(1, n) if rng.chance(0.5) else 1 for n in seq_lens] if rng.chance(0.7) else None
    heads, kv_heads = rng.of(((4, 4), (8, 2), (14, 2), (16, 8)), ((2, 2), (4, 1)))
    mode = rng.choice(({}, {"window": 20}, {"chunk": 48}, {"causal": False}, {"causal": False, "window": 30}))
    batch = make_batch(
        seq_lens,
        query_lens,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=rng.of((64, 80, 128), (64,)),
        page=rng.choice((16, 32, 64)),
        dtype=dtype,
        rotary_dim=rng.choice((64, 32)),
        has_norm=rng.chance(0.5),
        interleaved=rng.chance(0.3),
        padding=rng.choice((0, 3)),
        seed=rng.randrange(10**6),
        soft_cap=rng.choice((0.0, 0.0, 20.0)),
        has_sinks=rng.chance(0.3),
        has_alibi=rng.chance(0.2),
        **mode,
        **more,
    )
    if rng.chance(0.3):
        batch.kv_cache = _page_by_page(batch.kv_cache)
    return batch


def _page_by_page(kv_cache: torch.Tensor) -> torch.Tensor:
    """The same pages where a page's keys and values lie side by side, with a rest behind them."""
    _, pages, kv_heads, size, head_dim = kv_cache.shape
    plane = kv_heads * size * head_dim
    raw = torch.zeros(pages, 2 * plane + 64, dtype=kv_cache.dtype)
    apart = raw.as_strided(kv_cache.shape, (plane, raw.shape[1], size * head_dim, head_dim, 1))
    return apart.copy_(kv_cache)


def _latents(rng: Shapes, dtype: torch.dtype) -> Batch:
    """A batch whose pages hold latents, those of the step's own tokens too, with a rest behind each page."""
    lengths: list[tuple[int, int]] = []
    for _ in range(rng.randint(1, rng.of((5,), (2,)))):
        n = rng.of((1, 9, 16, 40, 333, 900), (1, 9, 40))
        lengths.append((rng.choice((1, 1, min(n, 40), n)), n))
    heads, rank, tail = rng.of(((16, 512, 64), (128, 512, 64), (40, 256, 32), (5, 64, 8)), ((5, 64, 8),))
    batch = make_batch(
        [n for _, n in lengths],
        [new for new, _ in lengths],
        num_heads=heads,
        num_kv_heads=1,
        head_dim=rank + tail,
        page=rng.choice((16, 64)),
        dtype=dtype,
        seed=rng.randrange(10**6),
        latent=rank,
        deterministic=rng.chance(0.2),
    )
    page, (_, count, *_) = batch.metadata.block_size, batch.kv_cache.shape
    spec = KVCacheSpec(
        KVKind.MLA, page, (rank + tail) * dtype.itemsize, 1, rank + tail, str(dtype).removeprefix("torch.")
    )
    raw = torch.zeros(count, (spec.page_bytes + 63) // 64 * 64 + 128, dtype=torch.uint8)
    pages, slots = ReferenceBackend().view(raw, spec), batch.metadata.slot_mapping
    pages[0] = batch.kv_cache[0]
    pages[0][slots // page, :, slots % page] = normal(len(slots), 1, rank + tail, dtype=dtype)
    return dataclasses.replace(batch, kv_cache=pages)


@draw("paged_attention")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    batch = _attention(rng, dtype)
    tokens = int(batch.metadata.shape[0])
    batch = batch.prepared()
    arguments = [batch.qkv_TC, batch.kv_cache, batch.metadata, batch.params, batch.new_out()]
    return Case(arguments, (4,), dtype, pages=(1,), rows=tokens)


@draw("paged_attention, float8")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    batch = _attention(rng, dtype, kv_dtype=FP8, k_scale=rng.choice((1.0, 0.5)), v_scale=rng.choice((1.0, 2.0)))
    tokens = int(batch.metadata.shape[0])
    batch = batch.prepared()
    others = [batch.metadata, batch.params, batch.new_out()]
    return Case(
        [batch.qkv_TC, batch.kv_cache, *others],
        (4,),
        dtype,
        plain=[batch.qkv_TC, batch.plain_pages(), *others],
        rows=tokens,
        tolerance=max(TOLERANCES[dtype], 5e-3),
        why="products with float8 pages are float16's",
    )


@draw("paged_attention, latents")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    step = _latents(rng, dtype)
    params = step.params
    out = empty(step.metadata.num_tokens, params.num_heads * params.latent, dtype=dtype)
    return Case([step.qkv_TC, step.kv_cache, step.metadata, params, out], (4,), dtype, pages=(1,))


@draw("latent_and_cache")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    step = _latents(rng, dtype)
    params = step.params
    t, rank, e = step.metadata.num_tokens, params.latent, params.head_dim - params.latent
    rope = Rope(normal(1024, e), e, rng.chance(0.5))
    step.kv_cache[0].zero_()
    q, latent = normal(t, params.num_heads, e, dtype=dtype), normal(t, rank + e, dtype=dtype)
    arguments = [q, latent, normal(rank), 1e-6, rope, step.kv_cache, step.metadata, empty(*q.shape, dtype=dtype)]
    return Case(arguments, (5, 7), dtype, pages=(5,))


@draw("rope_and_cache")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    batch = _attention(rng, dtype)
    if rng.chance(0.2):
        batch.rope = None
    params = batch.params
    sizes = params.num_heads, params.num_kv_heads, params.head_dim
    norms = batch.q_norm_H, batch.k_norm_H, batch.eps
    return Case([batch.qkv_TC, batch.kv_cache, batch.metadata, *sizes, batch.rope, *norms], (0, 1), dtype, pages=(1,))


def _write_scaled(qkv_TC: torch.Tensor, kv_cache: torch.Tensor, *arguments: Any) -> None:
    """The reference for pages that hold values divided by their scales, here in float32."""
    *others, k_scale, v_scale = arguments
    scales = torch.tensor([k_scale, v_scale]).view(2, 1, 1, 1, 1)
    kv_cache *= scales
    reference("rope_and_cache")(qkv_TC, kv_cache, *others)
    kv_cache /= scales


@draw("rope_and_cache, float8")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    batch = _attention(rng, dtype, kv_dtype=FP8, k_scale=rng.choice((1.0, 0.5)), v_scale=rng.choice((1.0, 2.0)))
    params = batch.params
    sizes = params.num_heads, params.num_kv_heads, params.head_dim
    norms = batch.q_norm_H, batch.k_norm_H, batch.eps
    others = [batch.metadata, *sizes, batch.rope, *norms, params.k_scale, params.v_scale]
    plain = [batch.qkv_TC, moved(batch.kv_cache, "cpu", FP8), *others]
    return Case(
        [batch.qkv_TC, batch.kv_cache, *others],
        (0, 1),
        dtype,
        plain=plain,
        reference=_write_scaled,
        tolerance=0.04,
        why="the pages round to float8, by at most a sixteenth of a value",
    )


def _step(rng: Shapes, pages: Pages, states: torch.Tensor) -> AttentionMetadata:
    """A step of requests that begin, go on or decode; their pages hold a state then."""
    work, most = [], 24 * pages.block_size
    for row in range(rng.randint(1, 4)):
        computed = rng.choice((0, 1, pages.block_size, rng.randrange(most // 2)))
        count = min(rng.of((1, 1, 7, 40, 200), (1, 7, 33)), most - computed)
        work.append((row, computed, count))
        if computed:
            page = pages.metadata.block_table[row, (computed - 1) // pages.block_size]
            states[page] = normal(*states.shape[1:])
    return pages.fill(work)


def _recurrent(name: str) -> None:
    @draw(name)
    def _(rng: Shapes, dtype: torch.dtype) -> Case:
        usual = (
            ((1, 1, 16), (1, 1, 5))
            if name == "selective_scan"
            else ((8, 64, 128), (4, 128, 128), (6, 70, 3), (24, 64, 16))
        )
        sizes = rng.of(usual, ((4, 8, 5), (2, 24, 16)))
        operation = Operation(name, rng.randrange(10**6), sizes=sizes, channels=rng.of((5, 1536, 5120), (5, 150)))
        pages = Pages(rng.of((16, 64, 128), (8, 64)), seed=rng.randrange(10**6))
        states = pages.allocate(*operation.state)
        metadata = _step(rng, pages, states)
        parts = columns(rng, metadata.num_tokens, *operation.widths, dtype=dtype)
        inputs = [part.unflatten(1, shape) for part, shape in zip(parts, operation.inputs, strict=True)]
        out = empty(metadata.num_tokens, *operation.out, dtype=dtype)
        arguments = [*operation.arguments(*inputs, states, metadata, out)]
        return Case(arguments, (len(arguments) - 1, len(arguments) - 3), dtype)


for _name in OPERATIONS:
    _recurrent(_name)
