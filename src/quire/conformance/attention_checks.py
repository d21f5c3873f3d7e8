"""Every attention backend of a platform beside the reference backend on the CPU: the same requests, step by step.

Pages are written by a backend alone, so that its layout is its own. Prompts come in chunks beside requests that decode; one
request begins with pages of another.

Legend: T tokens, N query heads, K KV heads, H head size, R latent, E rotated part of a latent, C columns.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch

from quire.attention.interface import AttentionBackend, AttentionMetadata, AttentionParams, AttentionRequest
from quire.attention.reference import ReferenceBackend
from quire.attention.selector import load_backend
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.conformance.cases.batches import describe
from quire.conformance.cases.case import TOLERANCES, moved
from quire.conformance.contract import NotClaimed, Subject, check, expect, other_kernels, with_refusals
from quire.kernels import ops
from quire.kernels.types import Rope

HEADS, KV_HEADS, HEAD_DIM, PAGES_A_ROW, ROWS = 4, 2, 64, 6, 4
LATENT, TAIL = 64, 8
STEPS = (
    ((1, 1),),
    ((0, 13), (1, 30), (2, 5)),
    ((0, 1), (1, 1), (2, 40)),
    ((0, 1), (1, 1), (2, 1)),
    ((3, 9), (0, 1)),
    ((3, 1), (2, 3), (1, 1)),
)
"""(row, new tokens) of each step. The first one also has most of two pages of row 0; row 3 joins row 0 behind these two."""
SHARED_PAGES, ROW_0_LATER = 2, 12
UNUSED = 3
"""Rows of `slot_mapping` and `positions` behind those of the step: they are buffers of the largest size."""
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 11},
    "soft-cap": {"soft_cap": 5.0},
    "sinks": {"sinks": True},
    "slopes": {"alibi_slopes": True},
    "local-chunks": {"chunk": 24},
    "deterministic": {"deterministic": True},
    "one-kv-head-each": {"num_kv_heads": HEADS},
    "latents": {"latent": LATENT},
}


@dataclasses.dataclass
class Layer:
    """One layer's constants, on the CPU."""

    params: AttentionParams
    rope: Rope
    norms: list[torch.Tensor]
    dtype: torch.dtype
    page: int

    @property
    def spec(self) -> KVCacheSpec:
        """What it keeps."""
        params, name = self.params, str(self.dtype).removeprefix("torch.")
        kind, planes = (KVKind.MLA, 1) if params.latent else (KVKind.FULL, 2)
        size = planes * params.num_kv_heads * params.head_dim * self.dtype.itemsize
        return KVCacheSpec(kind, self.page, size, params.num_kv_heads, params.head_dim, name)

    @property
    def request(self) -> AttentionRequest:
        """What it needs of a backend."""
        params = self.params
        return AttentionRequest(
            params.num_heads,
            params.num_kv_heads,
            params.head_dim,
            self.dtype,
            self.page,
            window=params.window,
            soft_cap=params.soft_cap,
            has_sinks=params.sinks is not None,
            has_alibi=params.alibi_slopes is not None,
            kind="mla" if params.latent else "full",
            deterministic=params.deterministic,
            chunk=params.chunk,
            latent=params.latent,
        )


def make_layer(mode: str, dtype: torch.dtype, page: int, generator: torch.Generator) -> Layer:
    """The layer of a mode."""
    given = dict(MODES[mode])
    head_dim = LATENT + TAIL if "latent" in given else HEAD_DIM
    kv_heads = given.pop("num_kv_heads", 1 if "latent" in given else KV_HEADS)
    for name in ("sinks", "alibi_slopes"):
        if name in given:
            given[name] = torch.rand(HEADS, generator=generator)
    rotary = TAIL if "latent" in given else HEAD_DIM
    angles = torch.outer(torch.arange(page * PAGES_A_ROW), 0.7 ** torch.arange(rotary // 2))
    rope = Rope(torch.cat((angles.cos(), angles.sin()), dim=1).float(), rotary)
    norms = [torch.rand(given.get("latent", HEAD_DIM), generator=generator) + 0.5 for _ in range(2)]
    return Layer(AttentionParams(HEADS, kv_heads, head_dim, head_dim**-0.5, **given), rope, norms, dtype, page)


def make_steps(page: int, generator: torch.Generator) -> Iterator[AttentionMetadata]:
    """The description of each step, with page tables in shuffled order; on the CPU."""
    table = (torch.randperm(ROWS * PAGES_A_ROW, generator=generator) + 1).int().view(ROWS, PAGES_A_ROW)
    table[3, :SHARED_PAGES] = table[0, :SHARED_PAGES]
    computed = [0, 0, 0, SHARED_PAGES * page]
    first = ((0, SHARED_PAGES * page - ROW_0_LATER), *STEPS[0])
    for work in (first, *STEPS[1:]):
        metadata = describe(table, page, [(row, computed[row], count) for row, count in work])
        for row, count in work:
            computed[row] += count
        unused = torch.zeros(UNUSED, dtype=torch.int64)
        metadata.slot_mapping = torch.cat((metadata.slot_mapping, unused))
        metadata.positions = torch.cat((metadata.positions, unused.int()))
        yield metadata


class Run:
    """A backend's own pages, and what it computes over them."""

    def __init__(self, backend: AttentionBackend, layer: Layer, device: torch.device, rows: torch.dtype) -> None:
        self._backend, self._device, self._rows = backend, device, rows
        self._layer = moved(layer, str(device), None)
        self._cache = backend.allocate(layer.spec, ROWS * PAGES_A_ROW + 1, device)

    def step(self, metadata: AttentionMetadata, x_TC: torch.Tensor) -> torch.Tensor:
        """The outputs of a step, float32 on the CPU."""
        params: AttentionParams = self._layer.params
        metadata, x_TC = moved(metadata, str(self._device), None), x_TC.to(self._device, self._rows, copy=True)
        self._backend.begin_step(metadata)
        width = params.num_heads * params.value_dim
        out = torch.full((len(x_TC), width), float("nan"), dtype=self._rows, device=self._device)
        if params.latent:
            q_TC = self._write_latents(metadata, x_TC)
            self._backend.forward(q_TC, self._cache, metadata, params, out)
        else:
            q_norm, k_norm = self._layer.norms
            self._backend.attend(x_TC, self._cache, metadata, params, out, self._layer.rope, q_norm, k_norm, 1e-6)
        return out.float().cpu()

    def _write_latents(self, metadata: AttentionMetadata, x_TC: torch.Tensor) -> torch.Tensor:
        params: AttentionParams = self._layer.params
        tokens, width = len(x_TC), params.num_heads * params.head_dim
        q_TNH = x_TC[:, :width].reshape(tokens, params.num_heads, params.head_dim)
        turned_TNE = torch.empty_like(q_TNH[..., params.latent :].contiguous())
        latent_TC = x_TC[:, width : width + params.head_dim].contiguous()
        norm, rope = self._layer.norms[0], self._layer.rope
        ops.latent_and_cache(
            q_TNH[..., params.latent :].contiguous(), latent_TC, norm, 1e-6, rope, self._cache, metadata, turned_TNE
        )
        return torch.cat((q_TNH[..., : params.latent], turned_TNE), dim=2).flatten(1)


def check_mode(mode: str, subject: Subject) -> str:
    """Every backend that supports the mode, beside the reference."""
    dtype = getattr(torch, subject.dtype_name)
    activation = subject.capabilities.activation_dtype.value
    rows = dtype if activation == "model" else getattr(torch, activation)
    generator = torch.Generator().manual_seed(subject.seed)
    page = subject.page_size
    layer, steps = make_layer(mode, dtype, page, generator), list(make_steps(page, generator))
    columns = (HEADS + 2 * layer.params.num_kv_heads) * layer.params.head_dim
    inputs = [torch.randn(step.num_tokens, columns, generator=generator).to(dtype) for step in steps]
    with other_kernels():
        oracle = Run(ReferenceBackend(), layer, torch.device("cpu"), torch.float32)
        expected = [oracle.step(*pair) for pair in zip(steps, inputs, strict=True)]
    told, refusals, limit = list[str](), list[str](), TOLERANCES[dtype]
    with subject.kernels():
        for path in subject.platform.attention_backends():
            backend = load_backend(path)
            answer = backend.supports(layer.request)
            if not answer.yes:
                refusals.append(f"{backend.name}: {answer.why} ({layer.request})")
                continue
            run = Run(backend(), layer, subject.device, rows)
            got = [run.step(*pair) for pair in zip(steps, inputs, strict=True)]
            told.append(f"{backend.name} off by {_compare(backend.name, got, expected, limit):.0e}")
    if not told:
        raise NotClaimed(with_refusals("", refusals))
    return with_refusals(f"{', '.join(told)} (at most {limit:.0e}, {subject.dtype_name})", refusals)


def _compare(name: str, got: list[torch.Tensor], expected: list[torch.Tensor], limit: float) -> float:
    worst = 0.0
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        error = float((ours - theirs).norm() / theirs.norm())
        expect(
            error <= limit,
            f"backend {name!r} differs in step {number}",
            f"an error of at most {limit:.1e}",
            f"{error:.1e}",
        )
        worst = max(worst, error)
    return worst


for _mode in MODES:
    _about = f"attention ({_mode}): prompts in chunks, decodes and a shared prefix give what the reference gives"
    check(f"attention/{_mode}", _about)(functools.partial(check_mode, _mode))
