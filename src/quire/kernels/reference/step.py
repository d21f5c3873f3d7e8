"""Reference of what stands around a step on an asynchronous device: unpacking its inputs, keeping its tokens."""

import torch
from torch import Tensor

from quire.kernels.registry import kernel
from quire.kernels.step_buffers import HEADER, StepBuffers


@kernel("unpack_step", platform="any")
def unpack_step(buffers: StepBuffers, max_tokens: int, max_requests: int) -> None:
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


@kernel("keep_tokens", platform="any")
def keep_tokens(token_ids_S: Tensor, rows_S: Tensor, last_token_R: Tensor) -> None:
    last_token_R[rows_S.long()] = token_ids_S
