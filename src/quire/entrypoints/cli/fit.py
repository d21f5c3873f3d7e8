"""Whether a model fits on this machine, in a sentence: memory, length of a context, conversations at once, and what limits them.

Reads no weights. Knows the plan of `worker/dry_run.py`; knows nothing of how it was made.
"""

from typing import Any

from quire.config import EngineConfig
from quire.config.hub.download import amount
from quire.media import MODALITIES

CONVERSATION = 3_000
"""Tokens of a conversation, in the sentence about conversations at once."""


def fits(memory: dict[str, Any]) -> bool:
    """Whether the model can start: `memory` is the plan's part of the report."""
    return "refused" not in memory


def fit_sentence(config: EngineConfig, memory: dict[str, Any], device: str) -> str:
    """One or two sentences for somebody who wants to know whether it works."""
    total, weights = int(memory["total"]), int(memory["weights"])
    stored = f" ({config.model.quantization})" if config.model.quantization else ""
    needs = f"{amount(weights)} of weights{stored}, {amount(total)} of memory ({amount(int(memory['free']))} free) on {device}"
    if not fits(memory):
        too_large = "The weights alone are larger: take a smaller model, --quantization int4, or more devices"
        return f"It does not fit: {needs}. {too_large if weights > total else memory['refused']}."
    length, tokens = config.model.max_model_len, int(memory["kv_tokens"])
    if config.model.pooling is not None:
        return f"It fits: {needs}; texts of up to {length:,} tokens."
    context = min(length, tokens) if tokens else length
    users = f"about {_users(config, tokens):,} conversations of {min(CONVERSATION, context):,} tokens at once"
    return f"It fits: {needs}; {context:,} tokens of context; {users}.{_media_sentence(config)}"


def _media_sentence(config: EngineConfig) -> str:
    """What pictures cost, of a model that sees."""
    if not config.model.modalities or config.multimodal is None:
        return ""
    kinds = " and ".join(MODALITIES[kind] for kind in config.model.modalities)
    return (
        f" It reads {kinds}, too: each takes part of the context, at most {config.multimodal.encoder_budget:,} tokens."
    )


def limits_sentence(config: EngineConfig, memory: dict[str, Any]) -> str:
    """What limits the length and the number, and the setting that changes it."""
    if not fits(memory):
        return ""
    if config.model.pooling is not None:
        return (
            "The model (or --max-model-len) limits the length: a longer text is refused unless a request cuts it "
            f"(truncate_prompt_tokens). A step takes {config.scheduler.max_num_batched_tokens:,} tokens "
            f"(--max-num-batched-tokens) of up to {config.scheduler.max_num_seqs} texts (--max-num-seqs); the rest wait."
        )
    length, tokens = config.model.max_model_len, int(memory["kv_tokens"])
    by_memory = bool(tokens) and tokens < length
    first = (
        "The memory for the KV cache limits the length: --kv-cache-dtype fp8, a smaller model or more memory gives more."
        if by_memory
        else "The model (or --max-model-len) limits the length, not the memory."
    )
    users = _users(config, tokens)
    if users >= config.scheduler.max_num_seqs:
        return f"{first} --max-num-seqs {config.scheduler.max_num_seqs} limits how many run at once."
    return f"{first} The memory for the KV cache limits how many run at once; the rest wait."


def _users(config: EngineConfig, tokens: int) -> int:
    """Conversations for which there is room at once."""
    rows = config.scheduler.max_num_seqs
    return min(rows, max(tokens // min(CONVERSATION, config.model.max_model_len), 1)) if tokens else rows
