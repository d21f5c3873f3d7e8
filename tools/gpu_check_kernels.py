"""Every kernel of the GPU beside its plain PyTorch reference, on drawn shapes: the first section of `gpu_check.py`.

A case builds arguments on the CPU from a seed; the platform's implementations run on copies on the GPU, the reference on
float32 copies of the same numbers on the CPU (bit-exact operations get the same numbers). What each wrote is compared by
relative error. Legend: T rows, N outputs, K inputs, V vocabulary.
"""

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.attention.dense_attention import draw_step
from tests.kernels.triton.decode_batches import make_batch

from quire.attention.interface import AttentionParams
from quire.kernels import ops, registry
from quire.kernels.experts import ClampedSwiglu, ExpertScratch, ExpertWeights, Routing
from quire.kernels.latent import HeadWeight
from quire.kernels.packed import PackedWeight, dequantize
from quire.kernels.triton.packed_experts import pack_expert_codes
from quire.quantization.codes import E2M1

TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
"""Of ||ours - reference|| / ||reference||, by the type of the numbers."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass
class Case:
    """Arguments of an operation; `outputs` are those that it writes."""

    arguments: list[Any]
    outputs: tuple[int, ...]
    dtype: torch.dtype
    exact: bool = False
    """Results are integers, or the same to the bit."""
    plain: list[Any] | None = None
    """The reference's arguments, where those are in a kernel's own layout."""


Draw = Callable[[random.Random, torch.dtype], Case]
_draws: dict[str, Draw] = {}


def draw(op: str) -> Callable[[Draw], Draw]:
    """A function that draws arguments for an operation; behind its name may follow what they are."""

    def register(function: Draw) -> Draw:
        _draws[op] = function
        return function

    return register


def _normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def _rows(rng: random.Random) -> int:
    return rng.choice((1, 2, 3, 7, 8, 16, 17, 33, 64, 130, 256, 300, 700))


def _width(rng: random.Random) -> int:
    return rng.choice((64, 96, 512, 1024, 1000, 2048, 4096))


def _weight(n: int, k: int, dtype: torch.dtype, biased: bool) -> ops.LinearWeight:
    weight = _normal(n, k, dtype=dtype, scale=k**-0.5)
    bias = _normal(n) if biased else None
    return ops.LinearWeight(n, k, dtype, weight, None if bias is None else bias.to(dtype), bias)


@draw("linear")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t, n, k = _rows(rng), _width(rng) + rng.choice((0, 8)), _width(rng)
    out = rng.choice((dtype, torch.float32))
    return Case(
        [_normal(t, k, dtype=dtype), _weight(n, k, dtype, rng.random() < 0.5), _empty(t, n, dtype=out)], (2,), dtype
    )


@draw("norm_linear")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t, n, k = _rows(rng), _width(rng), _width(rng)
    arguments = [
        _normal(t, k, dtype=dtype, scale=3.0),
        torch.rand(k) + 0.5,
        1e-6,
        _weight(n, k, dtype, rng.random() < 0.3),
    ]
    return Case([*arguments, _empty(t, n, dtype=dtype), _empty(t, k, dtype=dtype)], (4,), dtype)


@draw("norm_linear_gated")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t, i, k = _rows(rng), _width(rng), _width(rng)
    kind = rng.choice(("silu", "gelu_tanh", "gelu"))
    arguments = [_normal(t, k, dtype=dtype), torch.rand(k) + 0.5, 1e-6, _weight(2 * i, k, dtype, False), kind]
    scratch = [_empty(t, k, dtype=dtype), _empty(t, 2 * i, dtype=dtype)]
    return Case([*arguments, _empty(t, i, dtype=dtype), *scratch], (5,), dtype)


@draw("linear_add")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t, n, k = _rows(rng), _width(rng), _width(rng)
    return Case(
        [_normal(t, k, dtype=dtype), _weight(n, k, dtype, rng.random() < 0.3), _normal(t, n, dtype=dtype)], (2,), dtype
    )


@draw("embedding")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t, v, d = _rows(rng), 999, _width(rng)
    ids = torch.randint(0, v, (t,), dtype=torch.int32)
    return Case([ids, _weight(v, d, dtype, False), _empty(t, d, dtype=dtype), rng.choice((1.0, 3.5))], (2,), dtype)


@draw("add_embedding")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t, v, d = _rows(rng), 999, _width(rng)
    ids = torch.randint(0, v, (t,), dtype=torch.int32)
    return Case([ids, _weight(v, d, dtype, False), _normal(t, d, dtype=dtype)], (2,), dtype)


@draw("rms_norm")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t, d = _rows(rng), _width(rng)
    residual = _normal(t, d, dtype=dtype) if rng.random() < 0.5 else None
    arguments = [_normal(t, d, dtype=dtype), torch.rand(d) + 0.5, 1e-5, _empty(t, d, dtype=dtype), residual]
    return Case(arguments, (3, 4) if residual is not None else (3,), dtype)


@draw("layer_norm")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t, d = _rows(rng), _width(rng)
    bias = _normal(d) if rng.random() < 0.5 else None
    return Case(
        [_normal(t, d, dtype=dtype), torch.rand(d) + 0.5, bias, 1e-5, _empty(t, d, dtype=dtype), None], (4,), dtype
    )


@draw("add")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t, d = _rows(rng), _width(rng)
    return Case([_normal(t, d, dtype=dtype), _normal(t, d, dtype=dtype), rng.choice((1.0, 0.3))], (1,), dtype)


@draw("gated_activation")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t, i = _rows(rng), _width(rng)
    return Case(
        [_normal(t, 2 * i, dtype=dtype), rng.choice(("silu", "gelu", "gelu_tanh", "relu")), _empty(t, i, dtype=dtype)],
        (2,),
        dtype,
    )


@draw("activation")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    kind = rng.choice(("silu", "gelu", "gelu_tanh", "relu", "relu2"))
    return Case([_normal(_rows(rng), _width(rng), dtype=dtype), kind], (0,), dtype)


@draw("sigmoid_gate")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t = _rows(rng)
    return Case([_normal(t, _width(rng), dtype=dtype), _normal(t, 1, dtype=dtype)], (0,), dtype)


@draw("gather_rows")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t, d, s = _rows(rng), _width(rng), rng.choice((1, 5, 40))
    return Case(
        [_normal(t, d, dtype=dtype), torch.randint(0, t, (s,), dtype=torch.int32), _empty(s, d, dtype=dtype)],
        (2,),
        dtype,
    )


@draw("scale_and_cap")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    return Case(
        [_normal(_rows(rng), 3000, scale=9.0), rng.choice((1.0, 0.25)), rng.choice((0.0, 30.0))], (0,), torch.float32
    )


def _logits(rng: random.Random) -> torch.Tensor:
    logits = _normal(rng.choice((1, 5, 33)), rng.choice((384, 5003, 151936)), scale=rng.choice((0.5, 3.0)))
    logits[:, rng.randrange(300)] = -torch.inf
    return logits


def _columns(s: int, rng: random.Random) -> list[torch.Tensor]:
    """Inverse temperatures, seeds, positions."""
    inverse = torch.rand(s) * 3 + 0.2
    inverse[:: rng.choice((2, 3))] = torch.inf
    return [inverse, torch.randint(-(2**62), 2**62, (s,)), torch.randint(0, 100000, (s,))]


@draw("argmax")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    logits = _logits(rng)
    return Case([logits, torch.zeros(len(logits), dtype=torch.int32)], (1,), torch.float32, exact=True)


@draw("gumbel_argmax")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    logits = _logits(rng)
    columns = _columns(len(logits), rng)
    return Case([logits, *columns, torch.zeros(len(logits), dtype=torch.int32)], (4,), torch.float32, exact=True)


@draw("filtered_gumbel_argmax")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    logits = _logits(rng)
    s = len(logits)
    inverse, seed, position = _columns(s, rng)
    top_k = torch.tensor([rng.choice((0, 1, 20, 300)) for _ in range(s)], dtype=torch.int32)
    top_p = torch.tensor([rng.choice((1.0, 0.9, 0.3)) for _ in range(s)])
    min_p = torch.tensor([rng.choice((0.0, 0.05)) for _ in range(s)])
    out = [torch.zeros(s), torch.zeros(s, dtype=torch.int32)]
    return Case([logits, inverse, top_k, top_p, min_p, seed, position, *out], (8,), torch.float32, exact=True)


@draw("token_logprobs")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    logits = _logits(rng)
    n, k = rng.choice((1, 4)), rng.choice((1, 6, 21))
    index = torch.randint(0, len(logits), (n,), dtype=torch.int32)
    tokens = torch.randint(300, logits.shape[1], (n,), dtype=torch.int32)
    out = [_empty(n, k, dtype=torch.float32), torch.zeros(n, k, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)]
    return Case([logits, index, tokens, True, *out], (4, 5, 6), torch.float32)


@draw("moe_route")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t, routing = _rows(rng), Routing(rng.choice((8, 64, 128)), rng.choice((2, 8)), renormalize=rng.random() < 0.5)
    out = [torch.zeros(t, routing.top_k, dtype=torch.int32), _empty(t, routing.top_k, dtype=torch.float32)]
    return Case([_normal(t, routing.num_experts), routing, torch.tensor([t]), *out, None], (3, 4), torch.float32)


@draw("moe_experts")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t, e, k, d, i = _rows(rng), 16, 4, rng.choice((64, 256)), rng.choice((48, 128))
    ids = torch.stack([torch.randperm(e)[:k] for _ in range(t)]).int()
    gate_up, down = _normal(e, 2 * i, d, dtype=dtype, scale=d**-0.5), _normal(e, d, i, dtype=dtype, scale=i**-0.5)
    scratch = ExpertScratch(
        capacity=t, num_experts=e, top_k=k, hidden=d, intermediate=i, dtype=dtype, device=torch.device("cpu")
    )
    experts = ExpertWeights(gate_up, down)
    x, out = _normal(t, d, dtype=dtype), _empty(t, d, dtype=dtype)
    return Case([x, ids, torch.rand(t, k), experts, "silu", torch.tensor([t]), out, scratch], (6,), dtype)


def _codes(kind: str, n: int, k: int, group: int, dtype: torch.dtype) -> PackedWeight:
    codes = torch.randint(0, 256, (n, k // 2)).to(torch.uint8)
    if kind == "int8":
        codes = torch.randint(-128, 128, (n, k)).to(torch.int8)
    scale = (torch.rand(n, k // group) + 0.5) * k**-0.5 / (64 if kind == "int8" else 4)
    zero = torch.randint(0, 16, scale.shape).float() if kind == "int4" else None
    if kind == "int4":
        scale = scale.half().float()
    if kind == "mxfp4":
        scale = torch.exp2(scale.log2().round())
    table = None if kind in ("int4", "int8") else E2M1
    return PackedWeight(n, k, dtype, codes, scale=scale, zero=zero, table=table)


@draw("moe_experts, codes")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    t, e, k, d, i = _rows(rng), 16, 4, rng.choice((64, 96, 256, 480)), rng.choice((96, 128, 288))
    kind = rng.choice(("int4", "int8", "mxfp4", "nvfp4"))
    is_gated, group = rng.random() < 0.7, 16 if kind == "nvfp4" else 32
    ids = torch.stack([torch.randperm(e)[:k] for _ in range(t)]).int()
    matrices = [
        [_codes(kind, *shape, group, dtype) for _ in range(e)] for shape in ((2 * i if is_gated else i, d), (d, i))
    ]
    more = {"clamp": ClampedSwiglu(1.702, 7.0)} if is_gated and rng.random() < 0.5 else {}
    if rng.random() < 0.5:
        more |= {"gate_up_bias_E2I": _normal(e, matrices[0][0].out_features), "down_bias_ED": _normal(e, d)}
    values = ExpertWeights(*(torch.stack([dequantize(weight) for weight in each]) for each in matrices), **more)
    stacks = [pack_expert_codes(each, is_gated=is_gated and not n) for n, each in enumerate(matrices)]
    shapes = (stack.shape_only() for stack in stacks if stack is not None)
    experts = ExpertWeights(*shapes, gate_up_codes=stacks[0], down_codes=stacks[1], **more)
    scratch = ExpertScratch(
        capacity=t, num_experts=e, top_k=k, hidden=d, intermediate=i, dtype=dtype, device=torch.device("cpu")
    )
    x, out = _normal(t, d, dtype=dtype), _empty(t, d, dtype=dtype)
    name = "silu" if is_gated else "relu2"
    arguments = [x, ids, torch.rand(t, k), experts, name, torch.tensor([t]), out, scratch]
    return Case(arguments, (6,), dtype, plain=[*arguments[:3], values, *arguments[4:]])


def _attention(rng: random.Random, dtype: torch.dtype) -> Any:
    count = rng.randint(1, 7)
    seq_lens = [rng.choice((1, 9, 16, 40, 100, 333)) for _ in range(count)]
    query_lens = [rng.randint(1, n) if rng.random() < 0.5 else 1 for n in seq_lens] if rng.random() < 0.7 else None
    heads, kv_heads = rng.choice(((4, 4), (8, 2), (14, 2), (16, 8)))
    mode = rng.choice(({}, {"window": 20}, {"chunk": 48}, {"causal": False}, {"causal": False, "window": 30}))
    batch = make_batch(
        seq_lens, query_lens, num_heads=heads, num_kv_heads=kv_heads, head_dim=rng.choice((64, 80, 128)),
        page=rng.choice((16, 32, 64)), dtype=dtype, rotary_dim=64, has_norm=rng.random() < 0.5,
        interleaved=rng.random() < 0.3, padding=rng.choice((0, 3)), seed=rng.randrange(10**6),
        soft_cap=rng.choice((0.0, 0.0, 20.0)), has_sinks=rng.random() < 0.3, has_alibi=rng.random() < 0.2, **mode,
    )  # fmt: skip
    if rng.random() < 0.3:
        batch.kv_cache = _page_by_page(batch.kv_cache)
    return batch


def _page_by_page(kv_cache: torch.Tensor) -> torch.Tensor:
    """The same pages where a page's keys and values lie side by side, with a rest behind them."""
    _, pages, kv_heads, size, head_dim = kv_cache.shape
    plane = kv_heads * size * head_dim
    raw = torch.zeros(pages, 2 * plane + 64, dtype=kv_cache.dtype)
    apart = raw.as_strided(kv_cache.shape, (plane, raw.shape[1], size * head_dim, head_dim, 1))
    return apart.copy_(kv_cache)


def _latents(rng: random.Random, dtype: torch.dtype) -> tuple[Any, AttentionParams]:
    count = rng.randint(1, 5)
    lengths = [
        (rng.choice((1, 1, min(n, 40), n)), n) for n in (rng.choice((1, 9, 16, 40, 333, 900)) for _ in range(count))
    ]
    heads, rank, tail = rng.choice(((16, 512, 64), (128, 512, 64), (40, 256, 32), (5, 64, 8)))
    params = AttentionParams(
        heads, 1, rank + tail, (rank + tail) ** -0.5, latent=rank, deterministic=rng.random() < 0.2
    )
    step = draw_step(
        lengths, params, page=rng.choice((16, 64)), layout="latent", dtype=dtype, seed=rng.randrange(10**6)
    )
    return step, params


@draw("paged_attention")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    if rng.random() < 0.3:
        step, params = _latents(rng, dtype)
        out = _empty(step.metadata.num_tokens, params.num_heads * params.latent, dtype=dtype)
        return Case([step.qkv_TC, step.kv_cache, step.metadata, params, out], (4,), dtype)
    batch = _attention(rng, dtype)
    tokens = int(batch.metadata.shape[0])
    batch = batch.prepared()
    arguments = [batch.qkv_TC, batch.kv_cache, batch.metadata, batch.params, batch.new_out()]
    case = Case(arguments, (4,), dtype)
    case.tokens = tokens  # type: ignore[attr-defined]
    return case


@draw("head_linear")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    t, n = _rows(rng), rng.choice((1, 5, 16, 128))
    m, k = rng.choice(((512, 128), (128, 512), (70, 24)))
    weight = HeadWeight(n, m, k, dtype, _normal(n, m, k, dtype=dtype, scale=k**-0.5))
    return Case([_normal(t, n, k, dtype=dtype), weight, _empty(t, n, m, dtype=dtype)], (2,), dtype)


@draw("latent_and_cache")
def _(rng: random.Random, dtype: torch.dtype) -> Case:
    step, params = _latents(rng, dtype)
    t, rank, e = step.metadata.num_tokens, params.latent, params.head_dim - params.latent
    rope = ops.Rope(_normal(1024, e), e, rng.random() < 0.5)
    step.kv_cache[0].zero_()
    q, latent = _normal(t, params.num_heads, e, dtype=dtype), _normal(t, rank + e, dtype=dtype)
    arguments = [q, latent, _normal(rank), 1e-6, rope, step.kv_cache, step.metadata, _empty(*q.shape, dtype=dtype)]
    return Case(arguments, (5, 7), dtype)


def _moved(value: Any, device: str, dtype: torch.dtype | None) -> Any:
    """A copy on a device, floats of `dtype` as float32 for the reference."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return value
        return _cloned(
            value.detach(), device, torch.float32 if dtype is not None and value.dtype == dtype else value.dtype
        )
    if isinstance(value, ExpertScratch):
        moved = copy.copy(value)
        vars(moved).update({name: _moved(part, device, dtype) for name, part in vars(value).items()})
        return moved
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not isinstance(value, Routing):
        parts = {field.name: _moved(getattr(value, field.name), device, dtype) for field in dataclasses.fields(value)}
        moved = dataclasses.replace(value, **parts)
        if isinstance(moved, ops.LinearWeight) and dtype is not None:
            moved.dtype = torch.float32
        return moved
    return value


def _cloned(value: torch.Tensor, device: str, dtype: torch.dtype) -> torch.Tensor:
    """A copy in memory of the same form: pages may have strides of their own, or planes that are one."""
    if value.dim() != 5 or value.is_contiguous():
        return value.to(device, dtype, copy=True)
    clone = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=device)
    for plane, source in zip(clone, value, strict=True):
        plane.copy_(source)
    return clone


def _error(case: Case, ours: torch.Tensor, expected: torch.Tensor) -> float:
    tokens = getattr(case, "tokens", None)
    ours, expected = ours.cpu()[:tokens], expected.cpu()[:tokens]
    if case.exact or not ours.dtype.is_floating_point:
        return float((ours != expected).sum())
    finite = torch.isfinite(expected)
    if not torch.isfinite(ours.float()[finite]).all():
        return float("inf")
    difference = (ours.double() - expected.double())[finite].norm()
    return float(difference / expected.double()[finite].norm().clamp(min=1e-9))


def _check_page_tables() -> tuple[str, bool, str]:
    """What attention libraries read in place of rows."""
    from quire.kernels.triton.page_tables import gather_tables

    metadata = _moved(make_batch([3000, 16, 17, 1, 900], padding=2).metadata, "cuda", None)
    tables_BP = torch.full((7, metadata.block_table.shape[1]), -7, dtype=torch.int32, device="cuda")
    lens_B = torch.zeros(7, dtype=torch.int32, device="cuda")
    gather_tables(metadata, tables_BP, lens_B)
    expected_BP = metadata.block_table[metadata.rows.long()]
    pages_P, counts_B = torch.arange(tables_BP.shape[1], device="cuda"), (lens_B + 15) // 16
    is_used_BP = pages_P < counts_B[:, None]
    passed = torch.equal(lens_B, metadata.seq_lens.clamp(min=1))
    passed &= bool((tables_BP == expected_BP)[is_used_BP].all() and (tables_BP == -7)[~is_used_BP].all())
    return "page tables by request", passed, "7 requests"


def check_kernels(rounds: int = 6, seed: int = 0) -> Iterator[tuple[str, bool, str]]:
    """(operation and kernel, verdict, detail) of every implementation that the cuda platform has. Each runs twice: what was
    launched before is launched another way (`direct_launch`)."""
    from quire.kernels.triton import driver
    from quire.platforms.cuda import CudaPlatform

    driver.install()
    CudaPlatform().select_kernels()
    yield _check_page_tables()
    for name, function in _draws.items():
        op = name.partition(",")[0]
        reference = next(entry.function for entry in registry.implementations(op) if entry.platform == "any")
        for entry in registry.implementations(op):
            if entry.platform != "cuda":
                continue
            rng, worst = random.Random(seed), (0.0, "")
            torch.manual_seed(seed)
            passed = True
            for number in range(rounds):
                case = function(rng, DTYPES[number % len(DTYPES)])
                plain = case.arguments if case.plain is None else case.plain
                expected = [_moved(a, "cpu", None if case.exact else case.dtype) for a in plain]
                reference(*expected)
                errors = []
                for _ in range(2):
                    ours = [_moved(a, "cuda", None) for a in case.arguments]
                    entry.function(*ours)
                    errors += [_error(case, ours[index], expected[index]) for index in case.outputs]
                limit = 0.0 if case.exact else TOLERANCES[case.dtype]
                passed &= max(errors) <= limit
                worst = max(worst, (max(errors), str(case.dtype).removeprefix("torch.")))
            label = f"{name} ({entry.function.__module__.rpartition('.')[2]}.{entry.function.__qualname__})"
            yield label, passed, f"worst {worst[0]:.1e} {worst[1]}, {rounds} cases"
