"""How to sample: one request's parameters, checked when they are made.

Knows ranges. Knows nothing of tensors, tokenizers or the model (what depends on those is checked by the input
processor).
"""

import enum
from collections.abc import Callable
from typing import Any

import msgspec

GREEDY_BELOW = 1e-5
"""Temperatures under this mean greedy."""


class RequestOutputKind(enum.IntEnum):
    """What each output of a request carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(enum.IntEnum):
    """Three ways to draw a token."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One constraint on the output's form; exactly one of the first six."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class SamplingParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters of one request; the names and meanings that users of vLLM know."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: list[Callable[..., Any]] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None

    # Filled by the input processor, never by users.
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy, random, or random with the user's seed."""
        if self.temperature < GREEDY_BELOW:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED


class BeamSearchParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Beam search over `beam_width` hypotheses of at most `max_tokens` tokens."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
