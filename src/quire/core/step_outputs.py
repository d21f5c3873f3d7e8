"""News about one request, as the frontend gets it: tokens with their logprobs, and what is told once.

Knows the fields of the messages; takes no decisions.
"""

from quire.core.output import TokenLogprobs
from quire.core.request_state import Request
from quire.request import EngineCoreOutput


def build_output(request: Request, token_ids: list[int], logprobs: TokenLogprobs | None = None) -> EngineCoreOutput:
    """The request's news. The first one also tells how much of the prompt was cached, and the prompt's logprobs."""
    output = EngineCoreOutput(request_id=request.request_id, new_token_ids=token_ids)
    if logprobs is not None:
        output.logprob_token_ids = logprobs.token_ids
        output.logprob_values = logprobs.logprobs
        output.logprob_ranks = logprobs.ranks
    if not request.has_reported:
        request.has_reported = True
        output.num_cached_tokens = max(0, request.num_cached_tokens)
        kept, request.prompt_logprobs = request.prompt_logprobs, None
        if kept is not None:
            output.prompt_logprob_token_ids = kept.token_ids
            output.prompt_logprob_values = kept.logprobs
            output.prompt_logprob_ranks = kept.ranks
    return output


def keep_prompt_logprobs(request: Request, part: TokenLogprobs) -> None:
    """Add a chunk's prompt logprobs to those of earlier chunks; they are told together with the first token.

    A prompt that is computed again after a preemption replaces what came before, or was told already.
    """
    if request.has_reported or not request.wants_prompt_logprobs:
        return
    kept = request.prompt_logprobs
    if kept is None:
        request.prompt_logprobs = kept = TokenLogprobs(token_ids=[], logprobs=[], ranks=[])
    kept.token_ids.extend(part.token_ids)
    kept.logprobs.extend(part.logprobs)
    kept.ranks.extend(part.ranks)
