"""A step on an asynchronous device: one packed array that crosses the bus, and the buffers that it is unpacked into.

The buffers never move, so that a captured graph finds its inputs where they were; entries behind the step's own counts, up
to a graph's sizes, are made harmless. Knows the layout; knows nothing of requests.

Legend: T tokens, B requests, S rows that sample, G KV groups, U changed page-table entries, R rows, P pages a row may have.

A packet is int32: a header of `HEADER` words (num_tokens, num_requests, num_logits, max_query_len, max_seq_len,
num_updates), then, one after the other and each as long as the step's own count:

- of requests: row [B], context length [B], end of its tokens [B];
- of rows that sample: index of the token whose logits are wanted [S], row [S], position of the new token [S], inverse
  temperature (bits of a float32) [S], low and high half of the seed [S] [S], top-k [S], top-p (bits) [S], min-p (bits) [S];
- of tokens: id [T], or -1 - row where it is the last one that this row sampled; position [T]; slots [G, T];
- of page tables: flat index into [G, R, P] [U], page [U].
"""

import dataclasses

import torch
from torch import Tensor

from quire.kernels.registry import operation

HEADER = 8
REQUEST_FIELDS = 3
SAMPLE_FIELDS = 9
TOKEN_FIELDS = 2


@dataclasses.dataclass
class SampleColumns:
    """What the sampler reads of the rows that sample; the first S entries are meant, the rest are greedy and harmless.

    Attributes:
        rows_S: int32; `max_rows` where there is none.
        positions_S: int32; where the new token will stand.
        inverse_temperature_S: float32; infinity means greedy.
        seed_S: int64.
        top_k_S: int32; 0 means off.
        top_p_S, min_p_S: float32; 1 and 0 mean off.
    """

    rows_S: Tensor
    positions_S: Tensor
    inverse_temperature_S: Tensor
    seed_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor

    def on(self, device: torch.device) -> "SampleColumns":
        """The same on a device."""
        return SampleColumns(*(getattr(self, field.name).to(device) for field in dataclasses.fields(self)))


@dataclasses.dataclass
class StepBuffers:
    """Device tensors of fixed address.

    Attributes:
        packet: int32; the copy of the host's.
        input_ids_T, positions_T: int32. slots_GT: int64, -1 where nothing is written.
        query_start_B: int32 [max B + 1]; seq_lens_B, rows_B: int32.
        shape: int64 [4], as `AttentionMetadata.shape`.
        logits_index_S: int32.
        sample_start_S, sample_shape: as `query_start_B` and `shape`, of the rows that sample as requests of one token.
        tables_GRP: int32 page tables.
        last_token_R: int32 [max_rows + 1]; what each row sampled last (the extra entry takes what nobody wants).
    """

    packet: Tensor
    input_ids_T: Tensor
    positions_T: Tensor
    slots_GT: Tensor
    query_start_B: Tensor
    seq_lens_B: Tensor
    rows_B: Tensor
    shape: Tensor
    logits_index_S: Tensor
    sample_start_S: Tensor
    sample_shape: Tensor
    columns: SampleColumns
    tables_GRP: Tensor
    last_token_R: Tensor


def allocate_columns(max_rows: int, device: torch.device) -> SampleColumns:
    """Columns for so many rows."""

    def empty(dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(max_rows, dtype=dtype, device=device)

    floats, seeds = torch.float32, torch.int64
    return SampleColumns(empty(), empty(), empty(floats), empty(seeds), empty(), empty(floats), empty(floats))


def allocate(
    max_tokens: int,
    max_rows: int,
    groups: int,
    row_pages: int,
    updates: int,
    device: torch.device,
    slot_dtype: torch.dtype = torch.int64,
    max_draws: int = 0,
) -> StepBuffers:
    """Buffers for the largest step. `max_draws`: as many rows sample at most, or draws of rows that draw several times; as many
    requests may a graph have. By default as many as there are rows."""
    max_draws = max(max_draws, max_rows)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    words = HEADER + (REQUEST_FIELDS + SAMPLE_FIELDS) * max_draws + (TOKEN_FIELDS + groups) * max_tokens + 2 * updates
    return StepBuffers(
        packet=empty(words),
        input_ids_T=empty(max_tokens),
        positions_T=empty(max_tokens),
        slots_GT=empty(groups, max_tokens, dtype=slot_dtype),
        query_start_B=empty(max_draws + 1),
        seq_lens_B=empty(max_draws),
        rows_B=empty(max_draws),
        shape=empty(4, dtype=torch.int64),
        logits_index_S=empty(max_draws),
        sample_start_S=empty(max_draws + 1),
        sample_shape=empty(4, dtype=torch.int64),
        columns=allocate_columns(max_draws, device),
        tables_GRP=empty(groups, max_rows, row_pages),
        last_token_R=empty(max_rows + 1),
    )


@operation
def unpack_step(buffers: StepBuffers, max_tokens: int, max_requests: int) -> None:
    """Expand `buffers.packet` (see the module's docstring) into the other buffers; entries behind the step's own counts,
    up to the two bounds, become harmless. Page tables are updated; ids of tokens that only the device knows are filled in."""
    packet = buffers.packet
    tokens, requests, logits, max_query_len, max_seq_len, updates = packet[:6].tolist()
    groups = buffers.slots_GT.shape[0]
    at = HEADER

    def take(count: int) -> Tensor:
        nonlocal at
        at += count
        return packet[at - count : at]

    def put(target: Tensor, values: Tensor, bound: int, pad: float) -> None:
        target[: len(values)] = values
        target[len(values) : bound] = pad

    put(buffers.rows_B, take(requests), max_requests, 0)
    put(buffers.seq_lens_B, take(requests), max_requests, 0)
    buffers.query_start_B[0] = 0
    put(buffers.query_start_B[1:], take(requests), max_requests, tokens)
    columns = buffers.columns
    put(buffers.logits_index_S, take(logits), max_requests, 0)
    put(columns.rows_S, take(logits), max_requests, buffers.last_token_R.shape[0] - 1)
    buffers.sample_start_S[: max_requests + 1] = torch.arange(max_requests + 1).clamp(max=logits)
    buffers.sample_shape[:] = torch.tensor([logits, logits, min(logits, 1), max_seq_len])
    put(columns.positions_S, take(logits), max_requests, 0)
    put(columns.inverse_temperature_S, take(logits).view(torch.float32), max_requests, torch.inf)
    low, high = take(logits).long() & 0xFFFFFFFF, take(logits).long()
    put(columns.seed_S, low | (high << 32), max_requests, 0)
    put(columns.top_k_S, take(logits), max_requests, 0)
    put(columns.top_p_S, take(logits).view(torch.float32), max_requests, 1)
    put(columns.min_p_S, take(logits).view(torch.float32), max_requests, 0)
    ids = take(tokens).long()
    last = buffers.last_token_R[(-1 - ids).clamp(min=0)]
    put(buffers.input_ids_T, torch.where(ids < 0, last, ids.int()), max_tokens, 0)
    put(buffers.positions_T, take(tokens), max_tokens, 0)
    for group in range(groups):
        put(buffers.slots_GT[group], take(tokens).long(), max_tokens, -1)
    index = take(updates).long()
    buffers.tables_GRP.view(-1)[index] = take(updates)
    buffers.shape[:] = torch.tensor([tokens, requests, max_query_len, max_seq_len])


@operation
def keep_tokens(token_ids_S: Tensor, rows_S: Tensor, last_token_R: Tensor) -> None:
    """last_token[rows[s]] = token_ids[s]: the next step's unpacking reads them there."""
    last_token_R[rows_S.long()] = token_ids_S
