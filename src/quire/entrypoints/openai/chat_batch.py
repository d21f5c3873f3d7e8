"""`POST /v1/chat/completions/batch`: several conversations in one request, answered beside one another.

Choice `i * n + j` is the j-th answer to the i-th conversation, as the choices of completions are.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.config import limits
from quire.entrypoints.openai.chat import ChatJob, answer_chat, prepare_chat
from quire.entrypoints.openai.errors import HTTPError, bad_field
from quire.entrypoints.openai.generation import all_of
from quire.entrypoints.openai.protocol import BatchChatRequest, ChatCompletionRequest
from quire.entrypoints.openai.responses import UNSET, ChatCompletionResponse, Usage, build_usage
from quire.entrypoints.openai.state import ServerState

_OF_ONE = ("stream", "prompt_logprobs", "return_prompt_text", "return_timing")
"""What an answer tells of one conversation only."""


async def answer_chat_batch(state: ServerState, request: BatchChatRequest, public_id: str) -> ChatCompletionResponse:
    """Answer every conversation. One that cannot be answered is the request's error, and cancels the others."""
    jobs = await _prepare(state, request, public_id)
    answers = await all_of([answer_chat(state, job) for job in jobs])
    choices = [choice for answer in answers for choice in answer.choices]
    for index, choice in enumerate(choices):
        choice.index = index
    merged, usage = answers[0], _total([answer.usage for answer in answers])
    return msgspec.structs.replace(
        merged, choices=choices, usage=usage, prompt_token_ids=UNSET, prompt_text=UNSET, metrics=UNSET
    )


async def _prepare(state: ServerState, request: BatchChatRequest, public_id: str) -> list[ChatJob]:
    for field in _OF_ONE:
        if (value := getattr(request, field)) is not None and value is not False:
            raise bad_field(field, "not available for a batch of conversations.", "not_supported")
    count = len(request.messages)
    if not 0 < count <= limits.MAX_PROMPTS:
        raise bad_field("messages", f"{count} conversations; 1 to {limits.MAX_PROMPTS} in one request.")
    if count * (request.n or 1) > limits.MAX_N:
        message = f"{request.n} answers to {count} conversations; at most {limits.MAX_N} sequences in one request."
        raise bad_field("n", message)
    fields = msgspec.structs.asdict(request)
    return [
        await _prepare_one(state, fields | {"messages": messages}, public_id, f"messages[{index}]")
        for index, messages in enumerate(request.messages)
    ]


async def _prepare_one(state: ServerState, fields: dict[str, Any], public_id: str, path: str) -> ChatJob:
    try:
        return await prepare_chat(state, ChatCompletionRequest(**fields), public_id)
    except HTTPError as error:
        param = error.detail.param
        if param is None or not param.startswith("messages"):
            raise
        message = error.detail.message.replace("messages", path, 1)
        param = param.replace("messages", path, 1)
        raise HTTPError(error.status, message, param=param, code=error.detail.code) from None


def _total(usages: Sequence[Usage]) -> Usage:
    """The tokens of all."""
    details = [usage.prompt_tokens_details for usage in usages]
    thoughts = [usage.completion_tokens_details for usage in usages]
    return build_usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        None if details[0] is None else sum(one.cached_tokens for one in details if one is not None),
        None if not thoughts[0] else sum(one.reasoning_tokens for one in thoughts if one),
    )
