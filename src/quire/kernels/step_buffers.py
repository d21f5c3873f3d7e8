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

    rows_S: torch.Tensor
    positions_S: torch.Tensor
    inverse_temperature_S: torch.Tensor
    seed_S: torch.Tensor
    top_k_S: torch.Tensor
    top_p_S: torch.Tensor
    min_p_S: torch.Tensor


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

    packet: torch.Tensor
    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_GT: torch.Tensor
    query_start_B: torch.Tensor
    seq_lens_B: torch.Tensor
    rows_B: torch.Tensor
    shape: torch.Tensor
    logits_index_S: torch.Tensor
    sample_start_S: torch.Tensor
    sample_shape: torch.Tensor
    columns: SampleColumns
    tables_GRP: torch.Tensor
    last_token_R: torch.Tensor


def allocate(
    max_tokens: int, max_rows: int, groups: int, row_pages: int, updates: int, device: torch.device
) -> StepBuffers:
    """Buffers for the largest step."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    words = HEADER + (REQUEST_FIELDS + SAMPLE_FIELDS) * max_rows + (TOKEN_FIELDS + groups) * max_tokens + 2 * updates
    columns = SampleColumns(
        rows_S=empty(max_rows),
        positions_S=empty(max_rows),
        inverse_temperature_S=empty(max_rows, dtype=torch.float32),
        seed_S=empty(max_rows, dtype=torch.int64),
        top_k_S=empty(max_rows),
        top_p_S=empty(max_rows, dtype=torch.float32),
        min_p_S=empty(max_rows, dtype=torch.float32),
    )
    return StepBuffers(
        packet=empty(words),
        input_ids_T=empty(max_tokens),
        positions_T=empty(max_tokens),
        slots_GT=empty(groups, max_tokens, dtype=torch.int64),
        query_start_B=empty(max_rows + 1),
        seq_lens_B=empty(max_rows),
        rows_B=empty(max_rows),
        shape=empty(4, dtype=torch.int64),
        logits_index_S=empty(max_rows),
        sample_start_S=empty(max_rows + 1),
        sample_shape=empty(4, dtype=torch.int64),
        columns=columns,
        tables_GRP=empty(groups, max_rows, row_pages),
        last_token_R=empty(max_rows + 1),
    )
