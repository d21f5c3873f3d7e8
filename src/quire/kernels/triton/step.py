"""Around a step: its packet unpacked into the buffers that the model reads, its tokens kept for the next one.

Legend: see `kernels/step.py`.
"""

import torch
import triton

from quire.kernels.registry import kernel
from quire.kernels.step import HEADER, StepBuffers
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, tl

BLOCK = 256


@triton.jit(do_not_specialize=["max_tokens", "max_requests"])
def _unpack(
    packet,
    input_ids,
    positions,
    slots,
    query_start,
    seq_lens,
    rows,
    shape,
    logits_index,
    sample_start,
    sample_shape,
    sample_rows,
    sample_positions,
    inverse_temperature,
    seed,
    top_k,
    top_p,
    min_p,
    tables,
    last_token,
    max_tokens,
    max_requests,
    max_rows,
    slots_stride,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    part = tl.program_id(0)
    tokens = tl.load(packet)
    requests = tl.load(packet + 1)
    logits = tl.load(packet + 2)
    updates = tl.load(packet + 5)
    at_samples = packet + HEAD + 3 * requests
    at_tokens = at_samples + 9 * logits
    at_updates = at_tokens + (2 + GROUPS) * tokens
    offset = part * BLOCK + tl.arange(0, BLOCK)

    is_token = offset < tokens
    kept = offset < max_tokens
    ids = tl.load(at_tokens + offset, is_token, other=0)
    last = tl.load(last_token + (-1 - ids), is_token & (ids < 0), other=0)
    tl.store(input_ids + offset, tl.where(ids < 0, last, ids), kept)
    tl.store(positions + offset, tl.load(at_tokens + tokens + offset, is_token, other=0), kept)
    for group in tl.static_range(GROUPS):
        slot = tl.load(at_tokens + (2 + group) * tokens + offset, is_token, other=-1)
        tl.store(slots + group * slots_stride + offset, slot.to(tl.int64), kept)

    if part * BLOCK < max_requests:
        wanted = offset < max_requests
        is_request = offset < requests
        at = packet + HEAD
        tl.store(rows + offset, tl.load(at + offset, is_request, other=0), wanted)
        tl.store(seq_lens + offset, tl.load(at + requests + offset, is_request, other=0), wanted)
        end = tl.load(at + 2 * requests + offset, is_request, other=0)
        tl.store(query_start + 1 + offset, tl.where(is_request, end, tokens), wanted)
        is_sample = offset < logits
        at = at_samples + offset
        tl.store(logits_index + offset, tl.load(at, is_sample, other=0), wanted)
        tl.store(sample_start + 1 + offset, tl.minimum(offset + 1, logits), wanted)
        row = tl.load(at + logits, is_sample, other=0)
        tl.store(sample_rows + offset, tl.where(is_sample, row, max_rows), wanted)
        tl.store(sample_positions + offset, tl.load(at + 2 * logits, is_sample, other=0), wanted)
        inverse = tl.load(at + 3 * logits, is_sample, other=0x7F800000).to(tl.float32, bitcast=True)
        tl.store(inverse_temperature + offset, inverse, wanted)
        low = tl.load(at + 4 * logits, is_sample, other=0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(at + 5 * logits, is_sample, other=0).to(tl.int64)
        tl.store(seed + offset, low | (high << 32), wanted)
        tl.store(top_k + offset, tl.load(at + 6 * logits, is_sample, other=0), wanted)
        bits = tl.load(at + 7 * logits, is_sample, other=0x3F800000)
        tl.store(top_p + offset, bits.to(tl.float32, bitcast=True), wanted)
        tl.store(min_p + offset, tl.load(at + 8 * logits, is_sample, other=0).to(tl.float32, bitcast=True), wanted)
    if part == 0:
        tl.store(query_start, 0)
        tl.store(sample_start, 0)
        index = tl.arange(0, 4)
        counts = tl.where(index < 2, logits, tl.minimum(logits, 1))
        tl.store(sample_shape + index, tl.where(index < 3, counts, tl.load(packet + 4)).to(tl.int64))
        tl.store(shape + index, tl.load(packet + tl.where(index < 2, index, index + 1)).to(tl.int64))
    step = tl.num_programs(0) * BLOCK
    for first in range(part * BLOCK, updates, step):
        entry = first + tl.arange(0, BLOCK)
        is_update = entry < updates
        index = tl.load(at_updates + entry, is_update, other=0)
        tl.store(tables + index, tl.load(at_updates + updates + entry, is_update, other=0), is_update)


@kernel("unpack_step", platform="cuda", priority=10)
def unpack_step(buffers: StepBuffers, max_tokens: int, max_requests: int) -> None:
    columns = buffers.columns
    grid = (cdiv(max(max_tokens, max_requests), BLOCK),)
    _unpack[grid](
        buffers.packet,
        buffers.input_ids_T,
        buffers.positions_T,
        buffers.slots_GT,
        buffers.query_start_B,
        buffers.seq_lens_B,
        buffers.rows_B,
        buffers.shape,
        buffers.logits_index_S,
        buffers.sample_start_S,
        buffers.sample_shape,
        columns.rows_S,
        columns.positions_S,
        columns.inverse_temperature_S,
        columns.seed_S,
        columns.top_k_S,
        columns.top_p_S,
        columns.min_p_S,
        buffers.tables_GRP,
        buffers.last_token_R,
        max_tokens,
        max_requests,
        buffers.last_token_R.shape[0] - 1,
        buffers.slots_GT.stride(0),
        GROUPS=buffers.slots_GT.shape[0],
        HEAD=HEADER,
        BLOCK=BLOCK,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["count"])
def _keep(token_ids, rows, last_token, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = offset < count
    row = tl.load(rows + offset, kept, other=0)
    tl.store(last_token + row, tl.load(token_ids + offset, kept, other=0), kept)


@kernel("keep_tokens", platform="cuda", priority=10)
def keep_tokens(token_ids_S: torch.Tensor, rows_S: torch.Tensor, last_token_R: torch.Tensor) -> None:
    count = token_ids_S.shape[0]
    _keep[(cdiv(count, BLOCK),)](token_ids_S, rows_S, last_token_R, count, BLOCK=BLOCK, **launch_options())
