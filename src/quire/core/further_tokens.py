"""Tokens that a request gets beyond the one that a step drew for it: those behind right drafts, and those that need no draw.

Knows rows and what they have; knows nothing of why the tokens follow.
"""

from quire.core.publication import PendingPages
from quire.core.request_state import Request
from quire.core.running import RunningBatch
from quire.core.step import PendingDiff, trim_logprobs
from quire.core.step_stats import StepStats
from quire.core.stop import until_end
from quire.request import EngineCoreOutput


def take_accepted(
    batch: RunningBatch,
    pages: PendingPages,
    request: Request,
    accepted: list[int],
    result: EngineCoreOutput,
    is_end: bool,
) -> bool:
    """Take tokens that a step drew behind right drafts, unless the one before ends the request; whether it ends with them."""
    row = request.row
    if not is_end:
        token_ids, is_end = until_end(request, accepted, int(batch.known[row]))
        batch.extend(request, token_ids)
        result.new_token_ids += token_ids
        pages.add(row, int(min(batch.collected[row], batch.known[row])))
    trim_logprobs(result)
    return is_end


def jump(
    batch: RunningBatch,
    pages: PendingPages,
    diff: PendingDiff,
    stats: StepStats,
    request: Request,
    forced: list[int],
    result: EngineCoreOutput,
) -> bool:
    """Take tokens that nobody has to draw, if that saves a draw; whether the request ends with them."""
    row = request.row
    position, num_drawing = int(batch.known[row]), batch.num_drawing(row)
    token_ids, is_end = until_end(request, forced, position)
    if len(token_ids) <= num_drawing:
        return False
    batch.jump(request, token_ids)
    result.new_token_ids += token_ids
    diff.known_tokens.append((row, position, token_ids))
    pages.add(row, int(batch.collected[row]))
    stats.num_jumped_tokens += len(token_ids) - num_drawing
    return is_end
