"""The names of what a request may need of a sampler beyond plain sampling. Knows sampling parameters; knows nothing of how
they are carried out."""

from collections.abc import Callable

from quire.sample.penalties import are_penalized
from quire.sampling_params import GREEDY_BELOW, SamplingParams

FILTERS = "top_k, top_p, min_p"
PENALTIES = "penalties"
LOGPROBS, MANY_LOGPROBS, NAMED_LOGPROBS = "logprobs", "many logprobs", "logprob_token_ids"
PROMPT_LOGPROBS = "prompt_logprobs"
EDITS, BAD_WORDS, ALLOWED = "logit_bias", "bad_words", "allowed_token_ids"
FORCED = "thinking_token_budget, trace_decode_token_ids"
FORMS = "structured_outputs"
FEW_LOGPROBS = 64
"""Alternatives up to which one kernel serves all rows together; more are sorted."""


def _has_logprobs(params: SamplingParams) -> bool:
    """Of the likeliest tokens, and not of named ones."""
    return params.logprobs is not None and params.logprob_token_ids is None


_NEEDS: dict[str, Callable[[SamplingParams], object]] = {
    FILTERS: lambda params: (
        params.temperature >= GREEDY_BELOW and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    ),
    LOGPROBS: lambda params: _has_logprobs(params) and 0 <= (params.logprobs or 0) <= FEW_LOGPROBS,
    PENALTIES: are_penalized,
    FORMS: lambda params: params.structured_outputs is not None,
    EDITS: lambda params: params.logit_bias or params.min_tokens or params.bad_words_token_ids,
    PROMPT_LOGPROBS: lambda params: params.prompt_logprobs is not None,
    BAD_WORDS: lambda params: params.bad_words_token_ids,
    ALLOWED: lambda params: params.allowed_token_ids,
    FORCED: lambda params: (
        params.trace_decode_token_ids or (params.thinking is not None and params.thinking_token_budget is not None)
    ),
    MANY_LOGPROBS: lambda params: _has_logprobs(params) and not 0 <= (params.logprobs or 0) <= FEW_LOGPROBS,
    NAMED_LOGPROBS: lambda params: params.logprob_token_ids is not None,
}
"""By feature, whether a request needs it; the commonest first."""
FEATURES = tuple(_NEEDS)


def features_of(params: SamplingParams) -> list[str]:
    """The names of what a request needs; empty for one that is sampled plainly."""
    return [name for name, needs in _NEEDS.items() if needs(params)]
