"""The names of what a request may need of a sampler beyond plain sampling. Knows sampling parameters; knows nothing of how
they are carried out."""

from quire.sampling_params import GREEDY_BELOW, SamplingParams

FILTERS = "top_k, top_p, min_p"
PENALTIES = "penalties"
LOGPROBS, MANY_LOGPROBS, NAMED_LOGPROBS = "logprobs", "many logprobs", "logprob_token_ids"
PROMPT_LOGPROBS = "prompt_logprobs"
EDITS, BAD_WORDS, ALLOWED = "logit_bias", "bad_words", "allowed_token_ids"
FORCED = "thinking_token_budget, trace_decode_token_ids"
FORMS = "structured_outputs"
FEATURES = (
    *(FILTERS, LOGPROBS, PENALTIES, FORMS, EDITS, PROMPT_LOGPROBS, BAD_WORDS, ALLOWED, FORCED),
    *(MANY_LOGPROBS, NAMED_LOGPROBS),
)
"""All of them, the commonest first."""
FEW_LOGPROBS = 64
"""Alternatives up to which one kernel serves all rows together; more are sorted."""


def features_of(params: SamplingParams) -> list[str]:
    """The names of what a request needs; empty for one that is sampled plainly."""
    found: list[str] = []
    if params.temperature >= GREEDY_BELOW and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0):
        found.append(FILTERS)
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
        found.append(PENALTIES)
    if params.logprob_token_ids is not None:
        found.append(NAMED_LOGPROBS)
    elif params.logprobs is not None:
        found.append(LOGPROBS if 0 <= params.logprobs <= FEW_LOGPROBS else MANY_LOGPROBS)
    if params.prompt_logprobs is not None:
        found.append(PROMPT_LOGPROBS)
    if params.logit_bias or params.min_tokens or params.bad_words_token_ids:
        found.append(EDITS)
    if params.bad_words_token_ids:
        found.append(BAD_WORDS)
    if params.allowed_token_ids:
        found.append(ALLOWED)
    if params.trace_decode_token_ids or (params.thinking is not None and params.thinking_token_budget is not None):
        found.append(FORCED)
    if params.structured_outputs is not None:
        found.append(FORMS)
    return found
