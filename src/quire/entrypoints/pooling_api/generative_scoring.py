"""`POST /generative_scoring`: how likely one token is to come next, behind a query with each of several items.

What a model that generates says to "yes or no?", without an answer being written: the score of an item is the probability of the
first of `label_token_ids`, among these tokens or (`apply_softmax: false`) among all.
"""

import math
import time

from quire.config import limits
from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.openai.completions import prepare_completion, run_completion
from quire.entrypoints.openai.prompts import check_token_ids, encode_text, require_tokenizer
from quire.entrypoints.openai.protocol import (
    CompletionRequest,
    GenerativeScoringRequest,
    GenerativeScoringResponse,
    LabelScore,
    build_usage,
)
from quire.logprobs import LogprobsOnePosition
from quire.tokenizers.interface import Tokenizer


async def answer_generative_scoring(
    state: ServerState, request: GenerativeScoringRequest, public_id: str
) -> GenerativeScoringResponse:
    """Score every item. A prompt too long for the model keeps its beginning."""
    config, labels = state.engine.config.model, request.label_token_ids
    state.resolve_model(request.model)
    check_token_ids(labels, config.vocab_size, "label_token_ids")
    if request.apply_softmax is False and config.returns_logits:
        raise bad_field("apply_softmax", f"false needs logprobs, and logprobs_mode is {config.logprobs_mode!r}.")
    if len(labels) > limits.MAX_LOGPROB_TOKEN_IDS:
        raise bad_field("label_token_ids", f"{len(labels)} tokens; at most {limits.MAX_LOGPROB_TOKEN_IDS}.")
    completion = CompletionRequest(
        prompt=[prompt[: config.max_model_len - 1] for prompt in await _prompts(state, request)],
        model=request.model,
        max_tokens=1,
        temperature=0.0,
        logprob_token_ids=labels,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )
    job = await prepare_completion(state, completion, public_id)
    outputs = await run_completion(job)
    softmax = request.apply_softmax is not False
    data: list[LabelScore] = []
    for index, output in enumerate(outputs):
        told = output.outputs[0].logprobs
        assert told is not None
        data.append(LabelScore(index, _score(told[0], labels, softmax)))
    tokens = sum(part.count.prompt for part in job.parts)
    return GenerativeScoringResponse(
        id=f"generative-scoring-{public_id}",
        created=int(time.time()),
        model=job.parts[0].model,
        data=data,
        usage=build_usage(tokens, sum(len(output.outputs[0].token_ids) for output in outputs)),
    )


async def _prompts(state: ServerState, request: GenerativeScoringRequest) -> list[list[int]]:
    """The query with each item behind it, or before it."""
    items = request.items
    if not 0 < len(items) <= limits.MAX_PROMPTS:
        raise bad_field("items", f"{len(items)} items; 1 to {limits.MAX_PROMPTS} in one request.")
    tokenizer, size = state.engine.get_tokenizer(), state.engine.config.model.vocab_size
    query = await _token_ids(request.query, "query", request.add_special_tokens is not False, tokenizer, size)
    prompts: list[list[int]] = []
    for index, item in enumerate(items):
        token_ids = await _token_ids(item, f"items[{index}]", False, tokenizer, size)
        prompts.append(token_ids + query if request.item_first else query + token_ids)
        if not prompts[-1]:
            raise bad_field(f"items[{index}]", "the query and this item have no tokens.")
    return prompts


async def _token_ids(
    given: str | list[int], field: str, special: bool, tokenizer: Tokenizer | None, vocab_size: int
) -> list[int]:
    if isinstance(given, str):
        return await encode_text(require_tokenizer(tokenizer, field), given, special)
    if given:
        check_token_ids(given, vocab_size, field)
    return given


def _score(position: LogprobsOnePosition, labels: list[int], softmax: bool) -> float:
    """The probability of the first label, of all tokens or of the labels."""
    logprobs = [position[label].logprob for label in dict.fromkeys(labels)]
    if not softmax:
        return math.exp(logprobs[0])
    highest = max(logprobs)
    if not math.isfinite(highest):
        return 0.0
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    return weights[0] / sum(weights)
