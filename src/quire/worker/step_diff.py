"""What a step changes about the rows, before it computes: the same for every runner.

Knows rows, pages and who keeps state of a row. Knows nothing of how a step is computed.
"""

from quire.core.output import NewRequestData, SchedulerOutput
from quire.sample.sampler import Sampler
from quire.worker.batch_state import BatchState
from quire.worker.page_store import PageStore
from quire.worker.prompt_logprobs import PromptLogprobs


def apply_diff(
    plan: SchedulerOutput,
    state: BatchState,
    sampler: Sampler,
    prompt_logprobs: PromptLogprobs,
    pages: PageStore | None,
) -> None:
    """The diff, in the contract's order (`SchedulerOutput`)."""
    assert pages is not None, "execute() before initialize()"
    for row in plan.finished_rows:
        state.remove_row(row)
        sampler.remove_row(row)
        prompt_logprobs.remove_row(row)
    if plan.swap_outs:
        pages.swap_out(plan.swap_outs)
    for request in plan.new_requests:
        _add_row(request, state, sampler, prompt_logprobs)
    for row, group, new_pages in plan.new_blocks:
        state.append_pages(row, group, new_pages)
    if plan.swap_ins:
        pages.swap_in(plan.swap_ins)
    for row, position, token_id in plan.drawn:
        state.put_tokens(row, position, [token_id])
    for row, position, token_ids in plan.known_tokens:
        state.put_tokens(row, position, token_ids)
        sampler.put_tokens(row, position, token_ids)


def _add_row(request: NewRequestData, state: BatchState, sampler: Sampler, prompt_logprobs: PromptLogprobs) -> None:
    state.add_row(request)
    params = request.sampling_params
    if params is None:
        return
    prompt = request.token_ids[: request.num_prompt_tokens]
    sampler.add_row(request.row, params, prompt, request.token_ids[request.num_prompt_tokens :], request.seed)
    if params.prompt_logprobs is not None:
        prompt_logprobs.add_row(request.row)
