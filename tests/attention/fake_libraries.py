"""FlashAttention-4's and FlashInfer's functions as their documentation states them, computed one query and head at a time.

What they refuse, these refuse too: shapes, types, alignments, distances between elements.
Legend: T tokens, B requests, N query heads, K KV heads, H head size, S tokens a page, P pages.
"""

import math
import types

import torch


def _attend(q_H, k_LH, v_LH, scale, soft_cap, sink):
    scores = k_LH.float() @ q_H.float() * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = scores.exp()
    total = weights.sum() + (0.0 if sink is None else sink.float().exp())
    return (weights / total) @ v_LH.float() if len(scores) else torch.zeros_like(q_H)


def _is_aligned(tensor, bytes_=16):
    step = max(1, bytes_ // tensor.element_size())
    return (
        tensor.stride(-1) == 1 and tensor.data_ptr() % bytes_ == 0 and all(s % step == 0 for s in tensor.stride()[:-1])
    )


class FakeFlash:
    """`flash_attn.cute.interface`."""

    def __init__(self):
        self.calls = []

    def module(self):
        def _flash_attn_fwd(
            q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
            max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
            window_size_left=None, window_size_right=None, learnable_sink=None, num_splits=1, pack_gqa=None, out=None,
        ):  # fmt: skip
            self.calls.append((cu_seqlens_q.shape[0] - 1, max_seqlen_q))
            self.attend(
                q, k, v, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table, softmax_scale, causal, softcap,
                window_size_left, window_size_right, learnable_sink, out,
            )  # fmt: skip
            return out, None, None, None, None

        return types.SimpleNamespace(_flash_attn_fwd=_flash_attn_fwd)

    @staticmethod
    def attend(
        q_TNH, k_PSKH, v_PSKH, starts, lens, longest_q, longest_k, tables_BP, scale, causal, cap, left, right, sinks, out_TNH,
    ):  # fmt: skip
        tokens, heads, size = q_TNH.shape
        pages, page, kv_heads, _ = k_PSKH.shape
        count = len(starts) - 1
        assert k_PSKH.shape == v_PSKH.shape == (pages, page, kv_heads, size) and heads % kv_heads == 0
        assert out_TNH.shape == (tokens, heads, size) and out_TNH.dtype == q_TNH.dtype == k_PSKH.dtype
        assert lens.shape == (count,) and tables_BP.shape[0] == count
        assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in (starts, lens, tables_BP))
        assert all(_is_aligned(tensor) for tensor in (q_TNH, k_PSKH, v_PSKH, out_TNH))
        assert sinks is None or (sinks.shape == (heads,) and sinks.dtype.is_floating_point)
        if causal:
            right = 0
        for b in range(count):
            start, end, length = int(starts[b]), int(starts[b + 1]), int(lens[b])
            assert end - start <= longest_q and length <= longest_k <= tables_BP.shape[1] * page
            ids = tables_BP[b, : math.ceil(length / page)].long()
            for row in range(start, end):
                at = row - start + length - (end - start)
                first = 0 if left is None else max(0, at - left)
                last = length if right is None else min(length, at + right + 1)
                for head in range(heads):
                    sides = (
                        side[ids][:, :, head // (heads // kv_heads)].flatten(0, 1)[first:last]
                        for side in (k_PSKH, v_PSKH)
                    )
                    sink = None if sinks is None else sinks[head]
                    out_TNH[row, head] = _attend(q_TNH[row, head], *sides, scale, cap, sink)


class FakeFlashInfer:
    """`flashinfer.decode`."""

    def __init__(self):
        self.calls = []

    def module(self):
        def trtllm_batch_decode_with_kv_cache(
            query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
            window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout="HND",
            enable_pdl=None, backend="auto",
        ):  # fmt: skip
            self.calls.append(len(query))
            k_PKSH, v_PKSH = kv_cache
            heads = query.shape[1]
            assert query.is_contiguous() and kv_layout == "HND" and enable_pdl is False
            assert k_PKSH.shape == v_PKSH.shape and k_PKSH.stride() == v_PKSH.stride() and k_PKSH.stride(-1) == 1
            assert workspace_buffer.dtype == torch.uint8 and not workspace_buffer.any()
            assert block_tables.shape[0] == len(seq_lens) == len(query) and out.shape == query.shape
            assert block_tables.dtype == seq_lens.dtype == torch.int32 and int(seq_lens.min()) >= 1
            assert sinks is None or sinks.dtype == torch.float32
            kv_heads, page = k_PKSH.shape[1:3]
            for b, length in enumerate(seq_lens.tolist()):
                assert length <= max_seq_len
                ids = block_tables[b, : math.ceil(length / page)].long()
                first = 0 if window_left < 0 else max(0, length - 1 - window_left)
                for head in range(heads):
                    sides = (side[ids, head // (heads // kv_heads)].flatten(0, 1)[first:length] for side in kv_cache)
                    sink = None if sinks is None else sinks[head]
                    out[b, head] = _attend(query[b, head], *sides, bmm1_scale, 0.0, sink) * bmm2_scale
            return out

        return types.SimpleNamespace(trtllm_batch_decode_with_kv_cache=trtllm_batch_decode_with_kv_cache)
