"""From what users give to pooling requests: prompts and pairs of texts to token ids, parameters checked against the model.

Queues nothing: a request that is refused here leaves no trace. Knows nothing of how anything is pooled.
"""

import copy
import time
from collections.abc import Sequence

import numpy as np

from quire.adapters import LoRARequest
from quire.config import EngineConfig, HFConfig, PoolingConfig
from quire.config.pooling import FILLED_UP, IMAGES_ALONE
from quire.engine.caller import asking
from quire.engine.input_processor import (
    InputProcessor,
    TokenizedPrompt,
    check_params,
    check_truncation,
)
from quire.engine.request_record import NO_TOKENS, PoolingRecord
from quire.engine.tokenizer_source import TokenizerSource
from quire.errors import RequestError, TooLongError
from quire.inputs import PromptType
from quire.outputs import LateChunk, LateChunkingMetadata, PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams
from quire.request import EngineRequest, token_array
from quire.tokenizers.interface import Tokenizer

_FIELD = "late_chunking_params"


def divide(prompt: TokenizedPrompt, params: PoolingParams, source: TokenizerSource) -> LateChunkingMetadata | None:
    """The chunks of a prompt; None where it is not divided.

    Raises:
        RequestError: the vectors would not be those of a whole text, or the tokenizer does not say where its tokens are.
    """
    if params.late_chunking_params is None:
        return None
    if params.task != "token_embed":
        message = f"late chunking is for the task token_embed, and this is {params.task} (pooler_config.task chooses)"
        raise RequestError(message, param=_FIELD)
    if params.truncate_prompt_tokens is not None or params.step_tag_id is not None:
        name = "step_tag_id" if params.truncate_prompt_tokens is None else "truncate_prompt_tokens"
        raise RequestError(f"late chunking is of a whole text: leave {name} out", param=_FIELD)
    tokenizer = source.get()
    if not prompt.text or prompt.media or tokenizer is None:
        raise RequestError("late chunking needs a prompt of text (not of token ids, messages or media)", param=_FIELD)
    spans = _spans(prompt.text, prompt.token_ids, tokenizer)
    size, count = params.late_chunking_params.chunk_size, len(spans)
    chunks = [_chunk(spans, at, min(at + size, count)) for at in range(0, count, size)]
    return LateChunkingMetadata(size, count, chunks)


def _spans(text: str, token_ids: list[int], tokenizer: Tokenizer) -> list[tuple[int, int]]:
    for special in (True, False):
        ids, spans = tokenizer.encode_spans(text, special)
        if ids == token_ids:
            return spans
    raise RequestError("late chunking: the model reads other tokens than the text's own", param=_FIELD)


def _chunk(spans: list[tuple[int, int]], start: int, end: int) -> LateChunk:
    written = [span for span in spans[start:end] if span[0] < span[1]]
    if not written:
        return LateChunk((start, end), None)
    return LateChunk((start, end), (min(first for first, _ in written), max(last for _, last in written)))


_UNIT_TOLERANCE = 1e-2
"""How far the length of a normalised vector may be from 1: half-precision numbers are rounded."""


class PoolingProcessor:
    """Turns users' pooling requests into the core's.

    Args:
        config: the engine's.
        tokenizer_source: where the tokenizer comes from.
        inputs: checks what pooling requests have in common with others.
    """

    def __init__(self, config: EngineConfig, tokenizer_source: TokenizerSource, inputs: InputProcessor) -> None:
        self._model = config.model
        self._source = tokenizer_source
        self._inputs = inputs

    @property
    def config(self) -> PoolingConfig:
        """How the model pools. Raises RequestError: it generates."""
        pooling = self._model.pooling
        if pooling is None:
            raise RequestError(
                f"{self._model.model!r} generates text here and cannot embed, classify or score: start the engine with "
                "runner='pooling' (and convert='embed' or 'classify')",
                param="task",
            )
        return pooling

    # --- prompts ---

    def tokenize_batch(
        self, prompts: Sequence[PromptType], add_special_tokens: bool = True, prompt_name: str | None = None
    ) -> list[TokenizedPrompt]:
        """Several prompts as token ids. `prompt_name`: put this prompt of config_sentence_transformers.json before each text.
        Raises RequestError: a prompt cannot be served, or there is no prompt of that name."""
        start = self._start_of(prompt_name)
        if start or self.config.lower_case:
            prompts = [self._prepared(prompt, start) for prompt in prompts]
        return self._inputs.tokenize_batch(prompts, add_special_tokens)

    def num_characters(self, prompt: PromptType) -> int:
        """How many have to be tokenized."""
        return self._inputs.needs_tokenizer(prompt)

    def _start_of(self, prompt_name: str | None) -> str:
        prompts = self.config.prompts
        if prompt_name is None:
            return ""
        if prompt_name not in prompts:
            known = ", ".join(map(repr, prompts)) or "none"
            raise RequestError(f"prompt_name={prompt_name!r}: the model has {known}", param="prompt_name")
        return prompts[prompt_name]

    def _prepared(self, prompt: PromptType, start: str) -> PromptType:
        if isinstance(prompt, str):
            return start + (prompt.lower() if self.config.lower_case else prompt)
        if isinstance(prompt, dict) and "prompt_token_ids" not in prompt and "prompt" in prompt:
            return {**prompt, "prompt": str(self._prepared(prompt["prompt"], start))}
        return prompt

    def tokenize_pair(self, first: str, second: str, params: PoolingParams) -> TokenizedPrompt:
        """Two texts as one prompt, as the tokenizer joins pairs; truncated where `params` ask for it.
        Raises RequestError: there is no tokenizer."""
        tokenizer = self._inputs.require_tokenizer()
        if self.config.lower_case:
            first, second = first.lower(), second.lower()
        token_ids, types = tokenizer.encode_pair(first, second, self._limit(params))
        return TokenizedPrompt(token_ids, token_type_ids=types if any(types) else None)

    def pieces(self, prompt: TokenizedPrompt, params: PoolingParams) -> list[TokenizedPrompt]:
        """The parts of a text that are embedded one by one: one of them, unless it is longer than the model reads and
        `pooler_config` lets it be. Their vectors are put together by `join_pieces`.
        Raises RequestError: it has more tokens than `max_embed_len`."""
        config, limit, token_ids = self.config, self._model.max_model_len, prompt.token_ids
        if (params.task or config.tasks[0]) != "embed" or params.truncate_prompt_tokens is not None:
            return [prompt]
        if 0 < config.max_embed_len < len(token_ids):
            raise TooLongError(
                f"The model's maximum context length is {config.max_embed_len} tokens here (max_embed_len in pooler_config), and "
                f"the prompt has {len(token_ids)}; shorten it, or set truncate_prompt_tokens (-1: as many as fit).",
                param="prompt",
            )
        if not config.in_pieces or len(token_ids) <= limit:
            return [prompt]
        starts = range(0, len(token_ids), limit)
        return [TokenizedPrompt(token_ids[at : at + limit], cache_salt=prompt.cache_salt) for at in starts]

    def _limit(self, params: PoolingParams) -> int | None:
        keep = params.truncate_prompt_tokens
        if keep is None:
            return None
        limit = self._model.max_model_len
        check_truncation(keep, limit)
        return limit if keep == -1 else keep

    # --- requests ---

    def process(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: PoolingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        tenant: str = "",
        adapter: LoRARequest | None = None,
    ) -> PoolingRecord:
        """A request that may be queued. `params` is copied, never changed.
        Raises RequestError: something about it cannot be served; `param` names it."""
        check_params(params, PoolingParams, "pooling_params")
        core_id = self._inputs.next_core_id(request_id)
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        completed = self._complete(params)
        token_ids = self._fit(prompt.token_ids, params)
        token_ids = token_ids if prompt.media else self._filled_up(token_ids)
        if prompt.token_type_ids is not None:
            completed.token_type_ids = prompt.token_type_ids
        types = completed.token_type_ids
        if types is not None and len(types) != len(token_ids):
            message = f"token_type_ids has {len(types)} entries for {len(token_ids)} prompt tokens"
            raise RequestError(message, param="token_type_ids")
        request = EngineRequest(
            request_id=core_id,
            prompt_token_ids=token_array(token_ids),
            pooling_params=completed,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=prompt.cache_salt,
            tenant=tenant,
            media=prompt.media,
        )
        self._inputs.attach([request], adapter)
        with asking(adapter):
            chunks = divide(prompt, completed, self._source)
        token_ids = prompt.with_ids(token_ids).token_ids  # a prompt with media is not truncated
        record = PoolingRecord(request_id, prompt.text, token_ids, NO_TOKENS, [request], arrival_time, None)
        record.late_chunking = chunks
        return record

    def _filled_up(self, token_ids: list[int]) -> list[int]:
        """A text as the model reads it. Raises RequestError: it reads none."""
        if self.config.family in IMAGES_ALONE:
            raise RequestError("a prompt of this model is an image: it reads no text", param="prompt")
        if self.config.family not in FILLED_UP:
            return token_ids
        padding = int(self._model.hf_config.get("text_config", HFConfig({})).get("pad_token_id", 1))
        return token_ids + [padding] * (self._model.max_model_len - len(token_ids))

    def _fit(self, token_ids: list[int], params: PoolingParams) -> list[int]:
        """The prompt, shortened if that was asked for; special tokens around it stay."""
        limit = self._model.max_model_len
        keep = self._limit(params)
        if keep is not None and len(token_ids) > keep:
            token_ids = _shorten(token_ids, keep, self._source.get(), params.truncation_side == "left")
        if not token_ids:
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
        if len(token_ids) > limit:
            raise TooLongError(
                f"The model's maximum context length is {limit} tokens, and the prompt has {len(token_ids)}; shorten it, or "
                "set truncate_prompt_tokens (-1: as many as fit).",
                param="prompt",
            )
        return token_ids

    def _complete(self, given: PoolingParams) -> PoolingParams:
        """A copy in which everything is decided."""
        config, params = self.config, copy.copy(given)
        params.task = params.task or config.tasks[0]
        if params.task not in config.tasks:
            raise RequestError(
                f"task={params.task!r} is not what {self._model.model!r} can do here; allowed: {', '.join(config.tasks)} "
                f"(it runs as {config.convert!r}; the setting convert changes that)",
                param="task",
            )
        if params.use_activation is None:
            params.use_activation = config.activation != "none"
        params.dimensions = self._dimensions(params)
        if params.step_tag_id is None:
            params.step_tag_id = config.step_tag_id
        if params.returned_token_ids is None and config.returned_token_ids:
            params.returned_token_ids = list(config.returned_token_ids)
        if params.returned_token_ids is not None:
            self._check_columns(params.returned_token_ids)
        if params.skip_reading_prefix_cache is None or not config.reads_prefixes(params.task):
            params.skip_reading_prefix_cache = not config.reads_prefixes(params.task)
        return params

    def _dimensions(self, params: PoolingParams) -> int | None:
        config, asked = self.config, params.dimensions
        if asked is None:
            return config.dimensions or None
        if not config.embeds:
            raise RequestError(f"dimensions={asked} is for embeddings; this model classifies", param="dimensions")
        if not config.matryoshka:
            raise RequestError(
                f"dimensions={asked}: {self._model.model!r} does not say that its embeddings may be cut; if they may, start "
                'the engine with hf_overrides={"is_matryoshka": true}',
                param="dimensions",
            )
        size = self._num_columns()
        if asked > size or (config.matryoshka != (0,) and asked not in (*config.matryoshka, size)):
            allowed = f"1 to {size}" if config.matryoshka == (0,) else ", ".join(map(str, config.matryoshka))
            raise RequestError(f"dimensions={asked} is not one of the model's: {allowed}", param="dimensions")
        return asked

    def _num_columns(self) -> int:
        """Numbers of one vector: labels, or an embedding's length."""
        config, hf = self.config, self._model.hf_config
        if not config.embeds:
            return config.num_labels
        return config.dense[-1].outputs if config.dense else int(hf.get("hidden_size") or hf.get("dim") or hf.n_embd)

    def _check_columns(self, columns: list[int]) -> None:
        wrong = [column for column in columns if column >= self._num_columns()]
        if wrong:
            message = f"returned_token_ids has {wrong[0]}, but the model gives {self._num_columns()} numbers a token"
            raise RequestError(message, param="returned_token_ids")


def _shorten(token_ids: list[int], keep: int, tokenizer: Tokenizer | None, from_left: bool) -> list[int]:
    if from_left:
        return _shorten(token_ids[::-1], keep, tokenizer, False)[::-1]
    special = tokenizer.special_ids if tokenizer is not None else frozenset[int]()
    closing = 0
    while closing < min(keep - 1, len(token_ids)) and token_ids[-1 - closing] in special:
        closing += 1
    return token_ids[: keep - closing] + (token_ids[-closing:] if closing else [])


def join_pieces(parts: Sequence[PoolingRequestOutput[PoolingOutput]]) -> PoolingRequestOutput[PoolingOutput]:
    """The vectors of a text's pieces as one: their mean, weighted by their tokens; where each has length 1, so has the result."""
    if len(parts) == 1:
        return parts[0]
    vectors = np.stack([np.asarray(part.outputs.data, np.float32) for part in parts])
    weights = np.array([len(part.prompt_token_ids) for part in parts], np.float32)
    mean = (vectors * weights[:, None]).sum(axis=0) / weights.sum()
    are_unit = bool(np.all(np.abs(np.linalg.norm(vectors, axis=1) - 1.0) < _UNIT_TOLERANCE))
    length = float(np.linalg.norm(mean))
    first = parts[0]
    return PoolingRequestOutput(
        request_id=first.request_id,
        outputs=PoolingOutput(mean / length if are_unit and length else mean),
        prompt_token_ids=[token_id for part in parts for token_id in part.prompt_token_ids],
        finished=True,
        num_cached_tokens=sum(part.num_cached_tokens for part in parts),
        error=next((part.error for part in parts if part.error is not None), None),
    )
