"""Attention of prompts over pages on Hopper, the warp that loads: what is next, and its queries, keys and values.

It takes tiles as long as there are any, lays what a tile is on a desk in shared memory for the warps that compute
(`hopper_kernel.py`), and has the copy engine (TMA) bring the tile's queries, and pages of keys and values,
a page's tokens of one KV head at a time. It runs ahead of the others by as many tiles as fit.

Legend: B requests, H head size, S keys of a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from quire.kernels.triton.attention import decode_kernel

is_short = gluon.jit(decode_kernel.is_short.fn)


@aggregate
class Layer:
    """What is compiled in."""

    NUM_KV_HEADS: gl.constexpr
    GROUP: gl.constexpr
    PACK: gl.constexpr
    PARTS: gl.constexpr
    TOKENS: gl.constexpr
    HEAD_DIM: gl.constexpr
    PAGE: gl.constexpr
    WINDOW: gl.constexpr
    SOFT_CAP: gl.constexpr
    SINKS: gl.constexpr
    TILE_S: gl.constexpr
    STAGES: gl.constexpr
    SLOTS: gl.constexpr
    COPY_QUERIES: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, NUM_KV_HEADS, GROUP, PACK, HEAD_DIM, PAGE, WINDOW, SOFT_CAP, SINKS, TILE_S, STAGES, SLOTS, COPY_QUERIES
    ):
        self.NUM_KV_HEADS = gl.constexpr(NUM_KV_HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.PACK = gl.constexpr(PACK)
        self.PARTS = gl.constexpr((GROUP + PACK - 1) // PACK)
        self.TOKENS = gl.constexpr(128 // PACK)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.PAGE = gl.constexpr(PAGE)
        self.WINDOW = gl.constexpr(WINDOW)
        self.SOFT_CAP = gl.constexpr(SOFT_CAP)
        self.SINKS = gl.constexpr(SINKS)
        self.TILE_S = gl.constexpr(TILE_S)
        self.STAGES = gl.constexpr(STAGES)
        self.SLOTS = gl.constexpr(SLOTS)
        self.COPY_QUERIES = gl.constexpr(COPY_QUERIES)


@aggregate
class Batch:
    """The step's requests, and the counters that hand out its tiles."""

    query_start: gl.tensor
    seq_lens: gl.tensor
    rows: gl.tensor
    num_requests: gl.tensor
    min_query_len: gl.tensor
    short_tokens: gl.tensor
    tickets: gl.tensor

    @gluon.constexpr_function
    def __init__(self, query_start, seq_lens, rows, num_requests, min_query_len, short_tokens, tickets):
        self.query_start = query_start
        self.seq_lens = seq_lens
        self.rows = rows
        self.num_requests = num_requests
        self.min_query_len = min_query_len
        self.short_tokens = short_tokens
        self.tickets = tickets


@aggregate
class Ring:
    """STAGES tiles of keys and as many of values in shared memory, and who may touch which: `full` when the pages of a tile
    have arrived, `empty` when both groups of warps have read it."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, v, k_full, k_empty, v_full, v_empty):
        self.k = k
        self.v = v
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty


@aggregate
class Desk:
    """Where the loading warp lays out work: SLOTS tiles, eight numbers each; beside them lie the tile's queries."""

    info: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, info, full, empty):
        self.info = info
        self.full = full
        self.empty = empty


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _count_tiles(batch, first, layer):
    """Tiles of requests first to first + 255, for one KV head."""
    b = first + gl.arange(0, 256, layout=gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    begin_B = gl.load(batch.query_start + b, mask=b < batch.num_requests, other=0)
    length_B = gl.load(batch.query_start + b + 1, mask=b < batch.num_requests, other=0) - begin_B
    seq_len_B = gl.load(batch.seq_lens + b, mask=b < batch.num_requests, other=0)
    is_other_B = (length_B < batch.min_query_len) | is_short(length_B, seq_len_B, batch.short_tokens)
    return gl.where(is_other_B, 0, (length_B + layer.TOKENS - 1) // layer.TOKENS)


@gluon.jit
def _locate(ticket, num_tiles, batch, layer):
    """Where a tile's rows and keys are. The last tiles of a request have the most keys: they go first."""
    head = ticket // num_tiles
    tile = num_tiles - 1 - ticket % num_tiles
    request = gl.to_tensor(0)
    before = gl.to_tensor(0)
    seen = gl.to_tensor(0)
    for first in range(0, batch.num_requests, 256):
        tiles_B = _count_tiles(batch, first, layer)
        passed_B = seen + gl.associative_scan(tiles_B, 0, _add) <= tile
        request += gl.sum(passed_B.to(gl.int32), 0)
        before += gl.sum(gl.where(passed_B, tiles_B, 0), 0)
        seen += gl.sum(tiles_B, 0)
    query_begin = gl.load(batch.query_start + request)
    query_len = gl.load(batch.query_start + request + 1) - query_begin
    seq_len = gl.load(batch.seq_lens + request)
    row = gl.load(batch.rows + request)
    first_token = (tile - before) * layer.TOKENS
    first_position = seq_len - query_len + first_token
    last_position = gl.minimum(first_position + layer.TOKENS, seq_len) - 1
    first_tile = gl.to_tensor(0)
    if layer.WINDOW > 0:
        first_tile = gl.maximum(first_position - layer.WINDOW + 1, 0) // layer.TILE_S
    num_keys = last_position // layer.TILE_S + 1 - first_tile
    kv_head = head // layer.PARTS
    return (
        kv_head,
        head % layer.PARTS,
        query_begin,
        query_len,
        seq_len,
        row,
        first_token,
        last_position,
        first_tile,
        num_keys,
    )


@gluon.jit
def _load_tile(kv_desc, pages, first_key, last_page, kv_head, first_row, panels, full, stage, layer):
    """One tile of keys, or of values: a page's tokens of one head at a time, into its piece of each panel of 64 columns."""
    PANELS: gl.constexpr = layer.HEAD_DIM // 64
    PIECE: gl.constexpr = min(layer.PAGE, layer.TILE_S)
    PIECES: gl.constexpr = layer.TILE_S // PIECE
    mbarrier.expect(full.index(stage), layer.TILE_S * layer.HEAD_DIM * 2)
    for i in gl.static_range(PIECES):
        key = first_key + i * PIECE
        page = gl.load(pages + gl.minimum(key // layer.PAGE, last_page))
        row = first_row + (page * layer.NUM_KV_HEADS + kv_head) * layer.PAGE + key % layer.PAGE
        for p in gl.static_range(PANELS):
            piece = panels.index((stage * PANELS + p) * PIECES + i)
            tma.async_copy_global_to_shared(kv_desc, [row, p * 64], full.index(stage), piece)


@gluon.jit
def _tell(desk, at, value, layout: gl.constexpr):
    desk.info.index(at).store(gl.full([1], value, gl.int32, layout=layout))


@gluon.jit
def told(desk, at, layout: gl.constexpr):
    return gl.max(desk.info.index(at).load(layout), 0)


@gluon.jit
def load(
    kv_desc, q_desc, k_panels, v_panels, q_panels, ring, desk, block_table, block_table_stride, v_row, batch, layer
):
    """The loading warp: takes tiles as long as there are any, says what each is, and loads its queries, keys and values."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    PANELS: gl.constexpr = layer.HEAD_DIM // 64
    num_tiles = gl.to_tensor(0)
    for first in range(0, batch.num_requests, 256):
        num_tiles += gl.sum(_count_tiles(batch, first, layer), 0)
    num_tickets = num_tiles * (layer.NUM_KV_HEADS * layer.PARTS)
    n = 0
    count = 0
    ticket = gl.program_id(0)
    while ticket < num_tickets:
        next_ticket = gl.num_programs(0) + gl.atomic_add(batch.tickets, 1)
        kv_head, part, query_begin, query_len, seq_len, row, first_token, last_position, first_tile, num_keys = _locate(
            ticket, num_tiles, batch, layer
        )
        slot = count % layer.SLOTS
        mbarrier.wait(desk.empty.index(slot), ((count // layer.SLOTS) & 1) ^ 1)
        _tell(desk, slot * 8, num_keys, one)
        _tell(desk, slot * 8 + 1, kv_head, one)
        _tell(desk, slot * 8 + 2, part, one)
        _tell(desk, slot * 8 + 3, query_begin, one)
        _tell(desk, slot * 8 + 4, query_len, one)
        _tell(desk, slot * 8 + 5, seq_len, one)
        _tell(desk, slot * 8 + 6, first_token, one)
        _tell(desk, slot * 8 + 7, first_tile, one)
        gl.thread_barrier()
        if layer.COPY_QUERIES:
            HALF: gl.constexpr = 64 // layer.PACK
            mbarrier.expect(desk.full.index(slot), 2 * 64 * layer.HEAD_DIM * 2)
            head = kv_head * layer.GROUP + part * layer.PACK
            token = query_begin + first_token
            for i in gl.static_range(2):
                for p in gl.static_range(PANELS):
                    panel = q_panels.index((slot * 2 + i) * PANELS + p)
                    tma.async_copy_global_to_shared(
                        q_desc, [token + i * HALF, head, p * 64], desk.full.index(slot), panel
                    )
        else:
            mbarrier.arrive(desk.full.index(slot))
        count += 1
        pages = block_table + row.to(gl.int64) * block_table_stride
        last_page = last_position // layer.PAGE
        for j in range(num_keys):
            stage = n % layer.STAGES
            phase = ((n // layer.STAGES) & 1) ^ 1
            first_key = (first_tile + j) * layer.TILE_S
            mbarrier.wait(ring.k_empty.index(stage), phase)
            _load_tile(kv_desc, pages, first_key, last_page, kv_head, 0, k_panels, ring.k_full, stage, layer)
            mbarrier.wait(ring.v_empty.index(stage), phase)
            _load_tile(kv_desc, pages, first_key, last_page, kv_head, v_row, v_panels, ring.v_full, stage, layer)
            n += 1
        ticket = next_ticket
    slot = count % layer.SLOTS
    mbarrier.wait(desk.empty.index(slot), ((count // layer.SLOTS) & 1) ^ 1)
    _tell(desk, slot * 8, 0, one)
    gl.thread_barrier()
    mbarrier.arrive(desk.full.index(slot))
    # Who is last clears the counters for the next launch.
    if gl.atomic_add(batch.tickets + 1, 1) == gl.num_programs(0) - 1:
        gl.store(batch.tickets, 0)
        gl.store(batch.tickets + 1, 0)
