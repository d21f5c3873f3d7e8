"""What changes single logits before the draw: penalties for tokens seen, biases and hidden tokens, allowed tokens.

A penalised row's distinct tokens and their counts live in a table on the device: penalties cost the tokens seen, not the
vocabulary, and the drawn token is counted where it was drawn. Every operation is rounded by itself, as in
`sample/penalties.py`: the kernels are compiled without fused multiply-add.

Legend: S rows, V vocabulary, X slots of a table, C seen tokens a slot, E edits a slot, W words of 32 tokens.
"""

import torch
import triton

from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, tl

BLOCK = 512
TILE = 2048


@triton.jit(
    do_not_specialize=["blocks"],
    do_not_specialize_on_alignment=["slots_ptr", "repetition_ptr", "frequency_ptr", "presence_ptr"],
)
def penalize_kernel(
    logits_ptr,
    slots_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    ids_ptr,
    counts_ptr,
    sizes_ptr,
    blocks,
    logits_stride,
    table_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        size = tl.load(sizes_ptr + slot)
        place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        repetition = tl.load(repetition_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        presence = tl.load(presence_ptr + row)
        token = tl.load(ids_ptr + slot * table_stride + place, mask=inside, other=0)
        count = tl.load(counts_ptr + slot * table_stride + place, mask=inside, other=0)
        at = logits_ptr + row * logits_stride + token
        x = tl.load(at, mask=inside, other=0.0)
        subtract = frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0)
        x = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition) - subtract
        tl.store(at, x, mask=inside)


@triton.jit
def count_tokens_kernel(
    token_ptr, slots_ptr, ids_ptr, counts_ptr, sizes_ptr, table_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        token = tl.load(token_ptr + row)
        size = tl.load(sizes_ptr + slot)
        found = size
        start = 0
        while start < size:
            place = start + tl.arange(0, BLOCK)
            seen = tl.load(ids_ptr + slot * table_stride + place, mask=place < size, other=-1)
            found = tl.minimum(found, tl.min(tl.where(seen == token, place, size), 0))
            start += BLOCK
        count = tl.load(counts_ptr + slot * table_stride + found, mask=found < size, other=0)
        tl.store(counts_ptr + slot * table_stride + found, count + 1)
        if found == size:
            tl.store(ids_ptr + slot * table_stride + found, token)
            tl.store(sizes_ptr + slot, size + 1)


@triton.jit(do_not_specialize=["width", "blocks"], do_not_specialize_on_alignment=["slots_ptr"])
def edit_logits_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    ids_ptr,
    values_ptr,
    until_ptr,
    width,
    blocks,
    logits_stride,
    table_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        entry = slot * table_stride + place
        token = tl.load(ids_ptr + entry, mask=place < width, other=-1)
        is_edit = token >= 0
        value = tl.load(values_ptr + entry, mask=is_edit, other=0.0)
        until = tl.load(until_ptr + entry, mask=is_edit, other=0)
        at = logits_ptr + row * logits_stride + token
        x = tl.load(at, mask=is_edit, other=0.0) + value
        x = tl.where(tl.load(positions_ptr + row) < until, float("-inf"), x)
        tl.store(at, x, mask=is_edit)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def keep_allowed_kernel(
    logits_ptr, slots_ptr, allowed_ptr, vocabulary, tiles, words, logits_stride, TILE: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        token = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
        inside = token < vocabulary
        word = tl.load(allowed_ptr + slot * words + token // 32, mask=inside, other=0)
        is_hidden = ((word >> (token % 32)) & 1) == 0
        nothing = tl.full((TILE,), float("-inf"), tl.float32)
        tl.store(logits_ptr + row * logits_stride + token, nothing, mask=inside & is_hidden)


@kernel("penalize", platform="cuda", priority=10)
def penalize(
    logits_SV: torch.Tensor,
    slots_S: torch.Tensor,
    repetition_S: torch.Tensor,
    frequency_S: torch.Tensor,
    presence_S: torch.Tensor,
    seen_ids_XC: torch.Tensor,
    seen_counts_XC: torch.Tensor,
    seen_sizes_X: torch.Tensor,
    longest: int,
) -> None:
    """As `ops.penalize`."""
    blocks = cdiv(longest, BLOCK)
    if len(slots_S) and blocks:
        penalize_kernel[(len(slots_S) * blocks,)](
            logits_SV,
            slots_S,
            repetition_S,
            frequency_S,
            presence_S,
            seen_ids_XC,
            seen_counts_XC,
            seen_sizes_X,
            blocks,
            logits_SV.stride(0),
            seen_ids_XC.stride(0),
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
            **launch_options(),
        )


@kernel("count_tokens", platform="cuda", priority=10)
def count_tokens(
    token_ids_S: torch.Tensor,
    slots_S: torch.Tensor,
    seen_ids_XC: torch.Tensor,
    seen_counts_XC: torch.Tensor,
    seen_sizes_X: torch.Tensor,
) -> None:
    """As `ops.count_tokens`."""
    if len(slots_S):
        count_tokens_kernel[(len(slots_S),)](
            token_ids_S,
            slots_S,
            seen_ids_XC,
            seen_counts_XC,
            seen_sizes_X,
            seen_ids_XC.stride(0),
            BLOCK=2 * BLOCK,
            num_warps=4,
            **launch_options(),
        )


@kernel("edit_logits", platform="cuda", priority=10)
def edit_logits(
    logits_SV: torch.Tensor,
    slots_S: torch.Tensor,
    positions_S: torch.Tensor,
    edit_ids_XE: torch.Tensor,
    edit_values_XE: torch.Tensor,
    edit_until_XE: torch.Tensor,
) -> None:
    """As `ops.edit_logits`."""
    width = edit_ids_XE.shape[1]
    blocks = cdiv(width, BLOCK)
    if len(slots_S) and blocks:
        edit_logits_kernel[(len(slots_S) * blocks,)](
            logits_SV,
            slots_S,
            positions_S,
            edit_ids_XE,
            edit_values_XE,
            edit_until_XE,
            width,
            blocks,
            logits_SV.stride(0),
            edit_ids_XE.stride(0),
            BLOCK=BLOCK,
            num_warps=4,
            **launch_options(),
        )


@kernel("keep_allowed", platform="cuda", priority=10)
def keep_allowed(logits_SV: torch.Tensor, slots_S: torch.Tensor, allowed_XW: torch.Tensor) -> None:
    """As `ops.keep_allowed`."""
    vocabulary = logits_SV.shape[1]
    tiles = cdiv(vocabulary, TILE)
    if len(slots_S):
        keep_allowed_kernel[(len(slots_S) * tiles,)](
            logits_SV,
            slots_S,
            allowed_XW,
            vocabulary,
            tiles,
            allowed_XW.stride(0),
            logits_SV.stride(0),
            TILE=TILE,
            num_warps=4,
            **launch_options(),
        )
