"""Decode attention and rotary embedding on a GPU: correctness on drawn shapes, then times of variants, cold in L2.

`python3 tools/gpu/decode.py` in the repository's root, with PYTHONPATH=src. Writes $OUT/decode.json.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import time

sys.path.insert(0, os.getcwd())
START = time.time()
BUDGET = float(os.environ.get("DECODE_SECONDS", "44"))
COMPILERS = 16

import torch  # noqa: E402
from packed import microseconds  # noqa: E402

from quire.attention.interface import AttentionMetadata, AttentionParams  # noqa: E402
from quire.kernels.triton.attention import decode as decode_attention  # noqa: E402
from quire.kernels.triton.attention import rope as rope_module  # noqa: E402
from quire.kernels.types import Rope  # noqa: E402

COLD_BYTES = 300 << 20


@dataclasses.dataclass(frozen=True)
class Work:
    """A batch of one model's layer."""

    name: str
    group: int
    requests: int
    shortest: int
    longest: int
    page: int = 16
    fp8: bool = False
    kv_heads: int = 8
    head_dim: int = 128
    has_norm: bool = True

    def tokens(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.shortest, self.longest + 1, (self.requests,), generator=generator)

    def num_bytes(self) -> int:
        return int(self.tokens().sum()) * self.kv_heads * self.head_dim * 2 * (1 if self.fp8 else 2)


class Layers:
    """Enough layers of a work that none finds its keys in L2."""

    def __init__(self, work: Work, cold_bytes: int = COLD_BYTES) -> None:
        self.work = work
        lens = work.tokens()
        counts = (lens + work.page - 1) // work.page
        total = int(counts.sum())
        self.count = max(2, min(48, -(-cold_bytes // work.num_bytes())))
        dtype = torch.float8_e4m3fn if work.fp8 else torch.bfloat16
        num_pages = total * self.count + 1
        shape = (2, num_pages, work.kv_heads, work.page, work.head_dim)
        self.cache = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().to(dtype)
        ids = torch.randperm(num_pages - 1) + 1
        n = work.kv_heads * work.group
        self.params = AttentionParams(n, work.kv_heads, work.head_dim, work.head_dim**-0.5)
        self.qkv = torch.randn(work.requests, (n + 2 * work.kv_heads) * work.head_dim, device="cuda").bfloat16()
        self.out = torch.empty(work.requests, n * work.head_dim, device="cuda", dtype=torch.bfloat16)
        self.rope = Rope(torch.randn(int(lens.max()) + 1, work.head_dim, device="cuda"), work.head_dim)
        self.norm = torch.ones(work.head_dim, device="cuda") if work.has_norm else None
        count_up = torch.arange(work.requests + 1, dtype=torch.int32)
        self.metadata = []
        for layer in range(self.count):
            table = torch.zeros(work.requests, int(counts.max()) + 1, dtype=torch.int32)
            at = layer * total
            slots = torch.zeros(work.requests, dtype=torch.int64)
            for b, c in enumerate(counts.tolist()):
                table[b, :c] = ids[at : at + c]
                at += c
                last = int(lens[b]) - 1
                slots[b] = int(table[b, last // work.page]) * work.page + last % work.page
            self.metadata.append(
                AttentionMetadata(
                    block_size=work.page,
                    query_start=count_up.cuda(),
                    seq_lens=lens.int().cuda(),
                    rows=count_up[:-1].cuda(),
                    block_table=table.cuda(),
                    slot_mapping=slots.cuda(),
                    positions=(lens - 1).int().cuda(),
                    shape=torch.tensor([work.requests, work.requests, 1, int(lens.max())]).cuda(),
                    num_tokens=work.requests,
                    num_requests=work.requests,
                    max_query_len=1,
                    max_seq_len=int(lens.max()),
                )
            )

    def run_deterministic(self) -> None:
        from quire.kernels.triton.attention.paged_attention import paged_attention

        params = dataclasses.replace(self.params, deterministic=True)
        for metadata in self.metadata:
            paged_attention(self.qkv, self.cache, metadata, params, self.out)

    def run(self, fused: bool = True, separate: bool = False, **choices) -> None:
        heads = (self.params.num_heads, self.params.num_kv_heads, self.params.head_dim)
        for metadata in self.metadata:
            if separate:
                rope_module.rope_and_cache(
                    self.qkv, self.cache, metadata, *heads, self.rope, self.norm, self.norm, 1e-6
                )
            extra = (self.rope, self.norm, self.norm, 1e-6) if fused else (None, None, None, 0.0)
            decode_attention._launch(self.qkv, self.cache, metadata, self.params, self.out, fused, *extra, **choices)


def variants(tiles=(32,), warps=(2,), stages=(3,), programs=(4,), registers=(None,), early=(64,), min_share=(1,)):
    for t, w, s, p, r, e, m in itertools.product(tiles, warps, stages, programs, registers, early, min_share):
        shape = decode_attention.Shape(t, w, s, p, r)
        yield {"shape": shape, "early_keys": e, "min_share": m}


def plan() -> list[tuple[Work, list[dict]]]:
    """What is timed, most wanted first."""
    few = [
        *variants(programs=(2, 4), early=(0, 64, 256), min_share=(1, 2, 4, 8)),
        *variants((64,), (4,), (3,), (2,), (None,), (0,), (1, 4)),
    ]
    many = [*variants(programs=(4, 5), min_share=(1, 8)), *variants((64,), (4,), (2,), (4,), (128,))]
    fp8 = [*variants((32, 64), (2,), (3,), (4, 5)), *variants((64,), (4,), (3,), (4,), (128,))]
    big = Work("0.6B 256x256-1024", 2, 256, 256, 1024)
    eight = Work("8B 256x256-1024", 4, 256, 256, 1024, has_norm=False)
    return [
        (dataclasses.replace(big, name="0.6B 32x256", requests=32, longest=256), few),
        (dataclasses.replace(big, name="0.6B 1x256", requests=1, longest=256), few),
        (big, many),
        (dataclasses.replace(big, name="0.6B 256x256", longest=256), many),
        (dataclasses.replace(big, name="0.6B 256x128-160", shortest=128, longest=160), many),
        (dataclasses.replace(eight, name="8B fp8 256x256-1024", fp8=True), fp8),
        (eight, many),
        (dataclasses.replace(big, name="0.6B 1x30000", requests=1, shortest=30000, longest=30000), many),
        (dataclasses.replace(eight, name="8B 32x256", requests=32, longest=256), few),
        *[(dataclasses.replace(big, name=f"0.6B page {p}", page=p), many[:1]) for p in (32, 64, 128)],
    ]


def compile_share(index: int) -> None:
    """One of several processes that fill Triton's cache."""
    seen = set()
    jobs = []
    for work, choices in plan():
        for choice in choices:
            key = (work.group, work.page, work.fp8, work.has_norm, decode_attention.requests_padded(work.requests))
            shape = choice["shape"]
            key += (
                work.head_dim,
                shape.tile,
                shape.num_warps,
                shape.num_stages,
                shape.max_registers,
                choice["early_keys"],
            )
            if key not in seen:
                seen.add(key)
                jobs.append((work, choice))
    for work, choice in jobs[index::COMPILERS]:
        requests = work.requests
        small = dataclasses.replace(work, shortest=32, longest=32, requests=requests)
        try:
            Layers(small, 1).run(**choice)
        except Exception as error:
            print("compile", choice, repr(error)[:100])


def flat(choice: dict) -> dict:
    """A choice as one level of names."""
    return {**dataclasses.asdict(choice["shape"]), **{k: v for k, v in choice.items() if k != "shape"}}


class Lines(list[str]):
    """What is told, at once: who is stopped has told what he knew."""

    def append(self, line: str) -> None:
        super().append(line)
        print(line, flush=True)


def copy_speed() -> float:
    """GB/s of reading and writing 1 GiB each."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / microseconds(lambda: y.copy_(x), 1) / 1e3


def check() -> list[str]:
    """Differences from the reference on drawn shapes; empty if there are none."""
    from tests.oracles.drawn_cases import expected

    from quire.conformance.cases.batches import make_batch

    failures = []

    def to(x, device):
        return x.to(device) if isinstance(x, torch.Tensor) else x

    def moved(data, device):
        return dataclasses.replace(
            data, **{f.name: to(getattr(data, f.name), device) for f in dataclasses.fields(data)}
        )

    cases = [
        {"head_dim": 128, "num_heads": 16, "num_kv_heads": 8, "rotary_dim": 128, "has_norm": True},
        {"head_dim": 128, "num_heads": 32, "num_kv_heads": 8, "rotary_dim": 128, "window": 100, "soft_cap": 10.0},
        {
            "head_dim": 64,
            "num_heads": 16,
            "num_kv_heads": 2,
            "rotary_dim": 32,
            "interleaved": True,
            "has_sinks": True,
            "window": 7,
        },
        {"head_dim": 80, "num_heads": 4, "num_kv_heads": 4, "has_alibi": True, "page": 32},
        {"head_dim": 256, "num_heads": 4, "num_kv_heads": 1, "rotary_dim": 64, "has_norm": True, "page": 64},
        {"head_dim": 96, "num_heads": 17, "num_kv_heads": 1, "rotary_dim": 96, "page": 128},
        {
            "head_dim": 128,
            "num_heads": 32,
            "num_kv_heads": 8,
            "rotary_dim": 128,
            "kv_dtype": torch.float8_e4m3fn,
            "k_scale": 0.5,
            "v_scale": 2.0,
        },
    ]
    generator = torch.Generator().manual_seed(1)
    for number, case in enumerate(cases):
        for dtype in (torch.bfloat16, torch.float16, torch.float32) if number < 2 else (torch.bfloat16,):
            for fused in (True, False):
                lens = torch.randint(1, 500, (12,), generator=generator).tolist()
                batch = make_batch(lens, dtype=dtype, padding=3, seed=number, **case)
                try:
                    want = expected(batch.prepared())[:12]
                    gpu = moved(batch, "cuda")
                    gpu.metadata = moved(batch.metadata, "cuda")
                    gpu.params = moved(batch.params, "cuda")
                    if batch.rope is not None:
                        gpu.rope = moved(batch.rope, "cuda")
                    norms = (gpu.q_norm_H, gpu.k_norm_H, gpu.eps)
                    out = gpu.new_out().cuda()
                    args = (gpu.qkv_TC, gpu.kv_cache, gpu.metadata, gpu.params, out)
                    if fused:
                        decode_attention.fused_decode_attention(*args, gpu.rope, *norms)
                    else:
                        p = gpu.params
                        rope_module.rope_and_cache(
                            gpu.qkv_TC, gpu.kv_cache, gpu.metadata, p.num_heads, p.num_kv_heads, p.head_dim,
                            gpu.rope, *norms, p.k_scale, p.v_scale,
                        )  # fmt: skip
                        decode_attention.decode_attention(*args)
                    worst = (out[:12].float().cpu() - want).abs().max().item()
                    pages = moved(gpu, "cpu")
                    pages.params = batch.params
                    kept = (pages.plain_pages() - batch.prepared().plain_pages()).nan_to_num().abs().max().item()
                    bound = 1e-4 if dtype == torch.float32 else 0.07
                    is_fp8 = "kv_dtype" in case
                    if not (worst < (0.15 if is_fp8 else bound) and kept < (1.1 if is_fp8 else bound * 2)):
                        failures.append(f"case {number} {dtype} fused={fused}: {worst:.4g}, pages {kept:.4g}")
                except Exception as error:
                    failures.append(f"case {number} {dtype} fused={fused}: {error!r}"[:300])
    return failures


def main() -> None:
    compilers = [
        subprocess.Popen([sys.executable, __file__, "--compile", str(i)], env=os.environ) for i in range(COMPILERS)
    ]
    lines = Lines()
    record: dict = {"times": [], "rope": []}
    try:
        failures = check()
        for line in (f"correct: {not failures}", *failures[:12]):
            lines.append(line)
        for compiler in compilers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                compiler.wait(timeout=max(0.1, 40 - (time.time() - START)))
        lines.append(f"compiled after {time.time() - START:.0f} s")
        lines.append(f"copy {copy_speed():.0f} GB/s")
        for work, choices in plan():
            if time.time() - START > BUDGET:
                lines.append(f"no time for {work.name}")
                continue
            layers, results = Layers(work), []
            for choice in choices:
                if time.time() - START > BUDGET:
                    break
                try:
                    results.append((microseconds(functools.partial(layers.run, **choice), layers.count), choice))
                except Exception as error:
                    record["times"].append({"work": work.name, **flat(choice), "error": repr(error)[:200]})
            results.sort(key=lambda r: r[0])
            for micros, choice in results:
                record["times"].append({"work": work.name, "us": micros, **flat(choice)})
            gb = work.num_bytes() / 1e3
            shown = [f"{us:.2f}us {gb / us:.0f}GB/s {','.join(map(str, flat(c).values()))}" for us, c in results[:5]]
            plain = [
                f"{name} {microseconds(functools.partial(layers.run, **kw), layers.count):.2f}"
                for name, kw in (
                    ("default", {}),
                    ("unfused", {"fused": False}),
                    ("separate", {"fused": False, "separate": True}),
                )
            ]
            if work.name in ("0.6B 256x256-1024", "0.6B 1x256", "0.6B 1x30000"):
                try:
                    plain.append(f"deterministic {microseconds(layers.run_deterministic, layers.count):.2f}")
                except Exception as error:
                    plain.append(f"deterministic {error!r}"[:100])
            lines.append(f"{work.name}: " + " | ".join(shown + plain))
            del layers
            torch.cuda.empty_cache()
        for tokens in (16384, 256, 16) if time.time() - START < BUDGET else ():
            layers = Layers(Work("rope", 2, 1, 32, 32), 1)
            metadata = dataclasses.replace(
                layers.metadata[0],
                slot_mapping=torch.arange(tokens, device="cuda"),
                positions=torch.zeros(tokens, dtype=torch.int32, device="cuda"),
            )
            qkv = torch.randn(4, tokens, 4096, device="cuda").bfloat16()
            cache = torch.zeros(2, tokens // 16, 8, 16, 128, device="cuda").bfloat16()

            def run(q=qkv, c=cache, m=metadata, n=layers.norm, r=layers.rope):
                for i in range(4):
                    rope_module.rope_and_cache(q[i], c, m, 16, 8, 128, r, n, n, 1e-6)

            us = microseconds(run, 4)
            record["rope"].append({"tokens": tokens, "us": us})
            lines.append(f"rope T={tokens}: {us:.1f}us {tokens * 4096 * 4 / us / 1e3:.0f} GB/s")
    except Exception as error:
        lines.append(f"stopped: {error!r}"[:400])
    finally:
        for compiler in compilers:
            compiler.kill()
    with open(os.path.join(os.environ.get("OUT", "/tmp"), "decode.json"), "w") as file:
        json.dump(record, file)
    lines.append(f"took {time.time() - START:.0f} s")


if __name__ == "__main__":
    if "--compile" in sys.argv:
        compile_share(int(sys.argv[-1]))
    else:
        main()
