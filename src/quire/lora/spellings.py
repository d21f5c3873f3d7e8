"""What Transformers calls matrices that a checkpoint calls otherwise: adapters are made for its modules, and have their names.

Knows names alone. A spelling counts only where the model has a matrix of that name and none of the adapter's.
"""

import re
from collections.abc import Iterator

_PAIRS = (
    (r"\.shared_experts\.", ".shared_mlp."),
    (r"\.gate_proj$", ".linear_gate"),
    (r"\.g_proj$", ".gate_proj"),
    (r"\.self_attn\.o_proj$", ".attention.dense"),
    (r"\.mlp\.router$", ".block_sparse_moe.gate"),
    (r"^embed_out$", "lm_head"),
    (r"^lm_head$", "head"),
    (r"\.self_attn\.(q_a|q_b|kv|o_a|o_b)_proj$", r".attn.w\1"),
    (r"\.self_attn\.compressor\.(gate|kv)_proj$", r".attn.compressor.w\1"),
    (r"\.self_attn\.compressor\.indexer\.(gate|kv)_proj$", r".attn.indexer.compressor.w\1"),
    (r"\.self_attn\.compressor\.indexer\.(q_b)_proj$", r".attn.indexer.w\1"),
    (r"\.mlp\.shared_experts\.gate_proj$", ".ffn.shared_experts.w1"),
    (r"\.mlp\.shared_experts\.down_proj$", ".ffn.shared_experts.w2"),
    (r"\.mlp\.shared_experts\.up_proj$", ".ffn.shared_experts.w3"),
)
"""Patterns of names, and what checkpoints have in their place."""


def other_spellings(name: str) -> Iterator[str]:
    """What a checkpoint may call the matrix that Transformers calls so."""
    for theirs, ours in _PAIRS:
        spelled, count = re.subn(theirs, ours, name)
        if count:
            yield spelled
