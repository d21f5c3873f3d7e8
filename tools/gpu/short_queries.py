"""Check and time short queries behind long contexts on a GPU: split over their keys, beside the prefill kernel.

PYTHONPATH=src:. python3 tools/gpu/short_queries.py [--json FILE]
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packed import microseconds
from tests.oracles.operations import attention as plain
from tools.gpu.prefill import Batch, make_batch

from quire.kernels.triton.attention.decode import short_query_attention
from quire.kernels.triton.attention.prefill import prefill_attention

reference = plain.paged_attention

HEADS = ((32, 8), (16, 8), (32, 32))
"""Query heads and KV heads, of 128."""
CONTEXTS = (2048, 4096, 8192, 32768, 100_000)
TOKENS = (16, 32, 64, 128, 256, 512)


def runs(batch: Batch, short_tokens: int) -> tuple[Callable[[], None], Callable[[], None], torch.Tensor]:
    """The split kernel and the prefill kernel on a batch, and what they write."""
    out = batch.out()
    split = dataclasses.replace(batch.metadata, short_tokens=short_tokens)
    whole = dataclasses.replace(batch.metadata, short_tokens=0)
    arguments = batch.qkv, batch.kv_cache
    return (
        lambda: short_query_attention(*arguments, split, batch.params, out),
        lambda: prefill_attention(*arguments, whole, batch.params, out),
        out,
    )


def check(num_heads: int, num_kv_heads: int) -> float:
    """The largest difference from the reference, of a step that both kernels share."""
    batch = make_batch([(40, 5000), (3, 2100), (300, 2600), (20, 300)], num_heads, num_kv_heads)
    batch.metadata.short_tokens = 64
    out, expected = batch.out(), batch.out()
    short_query_attention(batch.qkv, batch.kv_cache, batch.metadata, batch.params, out)
    prefill_attention(batch.qkv, batch.kv_cache, batch.metadata, batch.params, out)
    reference(batch.qkv, batch.kv_cache, batch.metadata, batch.params, expected)
    return (out.float() - expected.float()).abs().max().item()


def measure() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for num_heads, num_kv_heads in HEADS:
        error = check(num_heads, num_kv_heads)
        assert error < 0.03, f"{num_heads} heads: off by {error}"
        for context in CONTEXTS:
            for tokens in TOKENS:
                for requests in (1, 8) if context <= 32768 and tokens <= 64 else (1,):
                    batch = make_batch([(tokens, context + tokens)] * requests, num_heads, num_kv_heads)
                    split, whole, _ = runs(batch, 1024)
                    row = {"heads": num_heads, "kv_heads": num_kv_heads, "context": context, "tokens": tokens}
                    row |= {
                        "requests": requests,
                        "prefill_us": round(microseconds(whole), 1),
                        "split_us": round(microseconds(split), 1),
                    }
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    rows = measure()
    if path is not None:
        path.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
