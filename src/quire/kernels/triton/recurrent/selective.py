"""Mamba's scan over prompts, in chunks whose tokens are computed side by side ("Mamba", Gu and Dao, 2023, section 3.3).

Every number of a state decays by itself, so there is nothing for tensor cores. A program takes a few channels of one request
from chunk to chunk. A thread has one channel and consecutive tokens of the chunk, a group: for each number of the state it
sums what its own tokens leave, learns what the groups before it leave (a decay over a group is the exponential of its summed
time steps), and goes through its tokens again from there. Exponentials, the dearest part, are taken once.

As compiled for an H200 a warp spends 176 instructions on 16 tokens of 32 channels and one number of their states (6 for each of
these numbers, 2 shuffles that bring b and c, the rest for the groups), and 50 a token beside that. Measured, 8,192 tokens of
5,120 channels with 16 numbers each: 0.87 ms for one request and 1.96 for four, token by token 12.6 and 14.7. Kernels that scan
chunks beside each other, pass states on and scan again would fill the device better for one request, but take every exponential
twice.

States go from chunk to chunk through the page of the chunk's last token, which this step writes anyway.

Legend: G groups of a chunk, C channels of a program, O groups whose sums are read by all others.
"""

import torch
import triton

from quire.attention.interface import AttentionMetadata
from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, num_processors, tl
from quire.kernels.triton.recurrent.chunks import FROM, Tiles, chunk_at, chunks_of, is_long
from quire.kernels.triton.recurrent.scan import find_tokens
from quire.kernels.triton.recurrent.scan import selective_scan as scan_by_token

WIDE, NARROW = Tiles(64, 32, num_warps=4, num_stages=1), Tiles(128, 16, num_warps=4, num_stages=1)
"""16 tokens a thread: fewer would share a group's costs, more need more registers. Narrow ones are twice as many programs: 171 µs
for 227 where one request of 2,048 tokens has the device, 286 for 261 where eight of 512 fill it (H200)."""
MAX_REGISTERS = 168
"""Three programs of four warps a multiprocessor; without a limit there were two."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus(x):
    """log(1 + e^x) to 3e-7 of itself: log(1 + u) / u is a polynomial, fitted to u from 0 to 1."""
    u = tl.exp2(-tl.abs(x) * LOG2_E)
    p = 0.0775160866 + u * (-0.0290740646 + u * 0.00512610212)
    p = -0.24835399 + u * (0.190768807 + u * (-0.136022476 + u * p))
    p = 0.999999966 + u * (-0.49999445 + u * (0.333181217 + u * p))
    return tl.maximum(x, 0.0) + u * p


@triton.jit
def give_all(x_GC, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Every group's numbers, for each group."""
    return tl.broadcast_to(x_GC[:, None, :], [GROUPS, GROUPS, BLOCK])


@triton.jit
def take_one(x_OGC, number, GROUPS: tl.constexpr):
    """Those of group `number`, which is known when this is compiled: sums of integers vanish then."""
    is_it = tl.arange(0, GROUPS)[:, None, None] == number
    return tl.sum(tl.where(is_it, x_OGC.to(tl.int32, bitcast=True), 0), 0).to(tl.float32, bitcast=True)


@triton.jit
def selective_chunks_kernel(
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    a_ptr,
    d_ptr,
    states_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    rows_ptr,
    table_ptr,
    channels,
    size,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    page_stride,
    out_stride,
    table_stride,
    page_size,
    fewest,
    STEPS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    CHUNK: tl.constexpr = STEPS * GROUPS
    await_previous(PDL)
    start, end, position, pages_ptr = find_tokens(query_start_ptr, seq_lens_ptr, rows_ptr, table_ptr, table_stride)
    if end - start < fewest:
        return
    group_G1, lane_1C = tl.arange(0, GROUPS)[:, None], tl.arange(0, BLOCK)[None, :]
    channel_1C = tl.program_id(1) * BLOCK + lane_1C
    channel_GC = channel_1C + group_G1 * 0
    is_channel_1C = channel_1C < channels
    zero_GC = tl.zeros([GROUPS, BLOCK], tl.int32)
    d_1C = tl.load(d_ptr + channel_1C, mask=is_channel_1C, other=0.0)
    first, behind = chunks_of(start, end, position, page_size, CHUNK)
    for number in range(first, behind):
        begin, stop = chunk_at(number, start, end, position, page_size, CHUNK)
        begin_G1 = begin + group_G1 * STEPS
        count_GC = tl.where(is_channel_1C, (stop - begin_G1).to(tl.int32), 0)
        x_at_GC, dt_at_GC = (x_ptr + begin_G1 * x_stride + channel_1C, dt_ptr + begin_G1 * dt_stride + channel_1C)
        times = ()  # of each token of the group: its time step, in units of log2(e)
        inputs = ()
        outputs = ()
        sum_GC = tl.zeros([GROUPS, BLOCK], tl.float32)
        for i in tl.static_range(STEPS):
            x_GC = tl.load(x_at_GC, mask=i < count_GC, other=0.0).to(tl.float32)
            dt_GC = softplus(tl.load(dt_at_GC, mask=i < count_GC, other=float("-inf")).to(tl.float32))
            x_at_GC += x_stride
            dt_at_GC += dt_stride
            inputs += (dt_GC * x_GC,)
            outputs += (d_1C * x_GC,)
            times += (dt_GC * LOG2_E,)
            sum_GC += dt_GC * LOG2_E
        sums_OGC = give_all(sum_GC, GROUPS, BLOCK)
        # A lane reads b and c of one token of its group, from where all take them. There is one number a thread: the hints only
        # say that lanes lie along tokens.
        token_GC = begin_G1 + lane_1C % STEPS
        is_token_GC = (lane_1C < STEPS) & (token_GC < stop)
        b_at_GC = tl.max_contiguous(b_ptr + token_GC * b_stride, [1, 2])
        c_at_GC = tl.max_contiguous(c_ptr + token_GC * c_stride, [1, 2])
        done, now_done = (position + begin - start).to(tl.int32), (position + stop - start).to(tl.int32)
        page = tl.load(pages_ptr + tl.maximum(done - 1, 0) // page_size).to(tl.int64)
        next_page = tl.load(pages_ptr + (now_done - 1) // page_size).to(tl.int64)
        state_at_GC = states_ptr + page * page_stride + channel_GC
        next_at_GC = states_ptr + next_page * page_stride + channel_GC
        for s in range(size):
            # All groups read the state here. One writes it below, behind the barrier with which groups exchange their ends.
            state_GC = tl.load(state_at_GC + s * channels, mask=is_channel_1C & (done > 0), other=0.0)
            a_GC = tl.load(a_ptr + s * channels + channel_GC, mask=is_channel_1C, other=0.0)
            b_GC = tl.load(b_at_GC + s, mask=is_token_GC, other=0.0).to(tl.float32)
            c_GC = tl.load(c_at_GC + s, mask=is_token_GC, other=0.0).to(tl.float32)
            lefts = ()
            writes = ()
            end_GC = tl.zeros([GROUPS, BLOCK], tl.float32)
            for i in tl.static_range(STEPS):
                lefts += (tl.exp2(times[i] * a_GC),)
                writes += (tl.gather(b_GC, zero_GC + i, 1) * inputs[i],)
                end_GC = lefts[i] * end_GC + writes[i]
            ends_OGC = give_all(end_GC, GROUPS, BLOCK)
            h_GC = state_GC
            for g in tl.static_range(GROUPS):
                h_GC = tl.where(group_G1 == g, state_GC, h_GC)
                state_GC = tl.exp2(take_one(sums_OGC, g, GROUPS) * a_GC) * state_GC + take_one(ends_OGC, g, GROUPS)
            tl.store(next_at_GC + s * channels, state_GC, mask=is_channel_1C & (group_G1 == 0))
            sums = ()
            for i in tl.static_range(STEPS):
                h_GC = lefts[i] * h_GC + writes[i]
                sums += (outputs[i] + tl.gather(c_GC, zero_GC + i, 1) * h_GC,)
            outputs = sums
        out_at_GC = out_ptr + begin_G1 * out_stride + channel_1C
        for i in tl.static_range(STEPS):
            tl.store(out_at_GC, outputs[i].to(out_ptr.dtype.element_ty), mask=i < count_GC)
            out_at_GC += out_stride
        tl.debug_barrier()  # the next chunk reads the state


@kernel("selective_scan", platform="cuda", priority=10, invariant=False)
def selective_scan(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    b_TS: torch.Tensor,
    c_TS: torch.Tensor,
    a_SC: torch.Tensor,
    d_C: torch.Tensor,
    states_PSC: torch.Tensor,
    metadata: AttentionMetadata,
    out_TC: torch.Tensor,
) -> None:
    """As `recurrent.selective_scan`; a result's last bits depend on how its prompt is cut into steps."""
    arguments = (x_TC, dt_TC, b_TS, c_TS, a_SC, d_C, states_PSC, metadata, out_TC)
    if is_long(metadata):
        scan_by_token(*arguments, most=FROM - 1)
        launch_selective_chunks(*arguments, fewest=FROM, tiles=choose_tiles(metadata.num_requests, x_TC.shape[1]))
    else:
        scan_by_token(*arguments)


def choose_tiles(num_requests: int, channels: int) -> Tiles:
    """Narrow ones where there are few programs."""
    return NARROW if num_requests * cdiv(channels, WIDE.channels) <= 2 * num_processors() else WIDE


def launch_selective_chunks(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    b_TS: torch.Tensor,
    c_TS: torch.Tensor,
    a_SC: torch.Tensor,
    d_C: torch.Tensor,
    states_PSC: torch.Tensor,
    metadata: AttentionMetadata,
    out_TC: torch.Tensor,
    *,
    fewest: int,
    tiles: Tiles,
) -> None:
    """The scan of requests with at least `fewest` tokens in this step."""
    size, channels = a_SC.shape
    groups = 32 * tiles.num_warps // tiles.channels
    steps = tiles.chunk // groups
    assert 0 < steps <= tiles.channels, "a lane has b and c of one token"
    if metadata.num_requests:
        selective_chunks_kernel[(metadata.num_requests, cdiv(channels, tiles.channels))](
            x_TC,
            dt_TC,
            b_TS,
            c_TS,
            a_SC,
            d_C,
            states_PSC,
            out_TC,
            metadata.query_start,
            metadata.seq_lens,
            metadata.rows,
            metadata.block_table,
            channels,
            size,
            x_TC.stride(0),
            dt_TC.stride(0),
            b_TS.stride(0),
            c_TS.stride(0),
            states_PSC.stride(0),
            out_TC.stride(0),
            metadata.block_table.stride(0),
            metadata.block_size,
            fewest,
            STEPS=steps,
            GROUPS=groups,
            BLOCK=tiles.channels,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            maxnreg=MAX_REGISTERS,
            **launch_options(),
        )
