"""From what users give to what the engine core takes: prompts to token ids, parameters checked against the model.

Knows the model's limits and the tokenizer. Queues nothing: a request that is refused here leaves no trace.
"""

import concurrent.futures
import copy
import dataclasses
import functools
import itertools
import operator
import random
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from quire.adapters import LoRARequest, adapter_of_media, check_adapter
from quire.config import EngineConfig, ModelConfig, limits
from quire.config.kv_transfer import HIDDEN_STATES
from quire.engine.prompt_halves import PromptHalves
from quire.engine.request_record import RequestRecord
from quire.engine.tokenizer_source import TokenizerSource
from quire.engine.virtual_tokens import VirtualTokens
from quire.errors import RequestError
from quire.inputs import PromptType, has_media, plain_text
from quire.media import EMBEDS, MediaItem
from quire.multimodal.encoder_half import EncoderHalf
from quire.multimodal.given_embeds import PLACEHOLDER, embeds_items, read_embeds
from quire.multimodal.media_source import as_given, in_threads, opener
from quire.multimodal.processor import MediaProcessor
from quire.parsers.choice import AUTO, NONE, apply_response_template, apply_strings, choose_formats
from quire.parsers.thinking import check_budget, find_prompt_thinking
from quire.request import SEED_BITS, EngineRequest, TokenIds, child_seed, token_array
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.structured_output.grammars import Grammars, shared_grammars
from quire.structured_output.vocabulary import Vocabulary, read_vocabulary
from quire.tokenizers.interface import Tokenizer

_LONG_TEXT = 1 << 30
_WAYS = {"embed": "LLM.embed or /v1/embeddings", "classify": "LLM.classify or /classify"}
_NOT_WITH_EMBEDS = ("prompt", "prompt_token_ids", "multi_modal_data")


def check_params(params: object, kind: type[object], name: str) -> None:
    """Raise a RequestError for parameters of another class."""
    if not isinstance(params, kind):
        raise RequestError(f"{name} must be {kind.__name__}, not {type(params).__name__}", param=name)


def check_truncation(keep: int, limit: int) -> None:
    """Raise a RequestError for a `truncate_prompt_tokens` that the model's length does not allow."""
    if keep != -1 and not 1 <= keep <= limit:
        message = f"truncate_prompt_tokens is {keep}; it may be -1 (as many as fit) or 1 to max_model_len ({limit})"
        raise RequestError(message, param="truncate_prompt_tokens")


@dataclasses.dataclass(slots=True)
class TokenizedPrompt:
    """A prompt as token ids, with its text where that is known; of a pair of texts also each token's segment (0 or 1).

    Attributes:
        array: the token ids once more, where they were converted already.
        media: what stands in the prompt besides text, in order.
    """

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None
    token_type_ids: list[int] | None = None
    array: TokenIds | None = None
    media: list[MediaItem] = dataclasses.field(default_factory=list[MediaItem])

    def with_ids(self, token_ids: list[int]) -> "TokenizedPrompt":
        """The same with other token ids: a part of these, usually.
        Raises RequestError: the prompt has media, whose places would be others."""
        if self.media and len(token_ids) != len(self.token_ids):
            raise RequestError("a prompt with media cannot be truncated", param="truncate_prompt_tokens")
        return self if token_ids is self.token_ids else dataclasses.replace(self, token_ids=token_ids, array=None)


def check_in_vocabulary(token_ids: TokenIds, vocab_size: int, param: str) -> None:
    """Raise a RequestError for a token id that the model does not have."""
    ids_N = np.frombuffer(token_ids, np.uint32)  # a negative one is a huge one
    if len(ids_N) and ids_N.max() >= vocab_size:
        raise _out_of_vocabulary(token_ids[int((ids_N >= vocab_size).argmax())], vocab_size, param)


def _out_of_vocabulary(token_id: int, vocab_size: int, param: str) -> RequestError:
    message = f"{param} has token id {token_id}, but the vocabulary has {vocab_size} (0 to {vocab_size - 1})"
    return RequestError(message, param=param)


def end_token_ids(model: ModelConfig, tokenizer: Tokenizer | None) -> list[int]:
    """The ids that end a sequence: the model's and the tokenizer's."""
    ids = list(model.eos_token_ids)
    own = tokenizer.eos_token_id if tokenizer is not None else None
    if own is not None and own not in ids and own < model.vocab_size:
        ids.append(own)
    return ids


def prepare_grammars(config: EngineConfig, source: TokenizerSource) -> "concurrent.futures.Future[None] | None":
    """Have another thread read the vocabulary and start a process that tries grammars, while a core of another process starts.
    The first request with a grammar would wait for it, and this process's streams for the interpreter. Returns what ends when
    it is done; None where no grammar can be asked for."""
    model = config.model
    if model.pooling is not None or source.why_absent is not None:
        return None

    def tokenizer() -> Tokenizer:
        found = source.of_model()
        assert found is not None
        return found

    grammars = shared_grammars(model.tokenizer_path, model.tokenizer_mode, model.vocab_size, config.structured_outputs)
    return grammars.read_ahead(
        lambda: end_token_ids(model, tokenizer()), lambda: read_vocabulary(tokenizer(), model.vocab_size), apart=True
    )


class InputProcessor:
    """Turns users' requests into the core's.

    Args:
        config: the engine's.
        tokenizer_source: where the tokenizer comes from.
        try_grammars_apart: whether a grammar is tried in a process of its own before it is relied on.
        allow_functions: whether a request may carry `logits_processors` (only where the core is in this process).
        open_files: whether `multi_modal_data` may name files by their paths (only where no clients send it).
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer_source: TokenizerSource,
        *,
        allow_functions: bool = True,
        try_grammars_apart: bool = False,
        open_files: bool = False,
    ) -> None:
        self._try_grammars_apart = try_grammars_apart
        self._open_media = opener(config.multimodal) if open_files else as_given
        self._model = config.model
        self._structured_outputs = config.structured_outputs
        self._reasoning = config.reasoning
        self._stream_interval = config.scheduler.stream_interval
        self._source = tokenizer_source
        self._allow_functions = allow_functions
        self._has_adapters = config.lora is not None
        self._by_media = config.lora.default_mm_loras if config.lora is not None else {}
        self._gives_states = config.kv_transfer is not None and config.kv_transfer.kv_connector == HIDDEN_STATES
        self._virtual = VirtualTokens(config.model.max_model_len, tokenizer_source.folders)
        self._token_ids_type: Any = list[Annotated[int, msgspec.Meta(ge=0, lt=config.model.own_vocab_size)]]
        self._eos_token_ids: list[int] | None = None
        self._random = random.Random(config.model.seed)
        self._serial = itertools.count()
        self._bad_words: dict[tuple[str, ...], list[list[int]]] = {}
        self._takes_embeds = config.multimodal is not None and config.multimodal.prompt_embeds
        self.media: MediaProcessor | None = None
        self.halves: PromptHalves | None = None
        if config.multimodal is not None and config.model.is_encoder_decoder:
            half = EncoderHalf(config.model, config.multimodal, lambda text: self._encode(text, False))
            self.media = half.media
            self.halves = PromptHalves(half, self._encode, self._check_token_ids, self._open_media)
        elif config.multimodal is not None and config.model.modalities:
            self.media = MediaProcessor(config.model, config.multimodal, lambda text: self._encode(text, False))

    def distinguish(self, first_serial: int) -> None:
        """Give ids and seeds of one's own, where several frontends share a core."""
        self._serial = itertools.count(first_serial)
        self._random = random.Random(f"{self._model.seed} {first_serial}")

    # --- prompts ---

    def needs_tokenizer(self, prompt: PromptType) -> int:
        """Characters that have to be tokenized; 0 for a prompt that is token ids already. Media count as a long text."""
        if isinstance(prompt, str):
            return len(prompt)
        if has_media(prompt):
            return _LONG_TEXT
        if isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt:
            text: Any = prompt.get("prompt")
            return len(text) if isinstance(text, str) else 0
        return 0

    def tokenize(self, prompt: PromptType, add_special_tokens: bool = True) -> TokenizedPrompt:
        """A prompt as token ids. Raises RequestError: it is no prompt, it is empty, or there is no tokenizer for its text."""
        if self.halves is not None:
            salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
            ids, text, item = self.halves.read(prompt)
            return TokenizedPrompt(ids, text, self._check_salt(salt), media=[item])
        if isinstance(prompt, str):
            return TokenizedPrompt(self._encode(prompt, add_special_tokens), prompt)
        if isinstance(prompt, Mapping):
            return self._tokenize_mapping(cast("Mapping[str, Any]", prompt), add_special_tokens)
        return TokenizedPrompt(self._check_token_ids(prompt, "prompt"))

    def tokenize_batch(self, prompts: Sequence[PromptType], add_special_tokens: bool = True) -> list[TokenizedPrompt]:
        """Several prompts; their texts are tokenized together, in parallel where the library can, and media side by side."""
        texts = {index: text for index, prompt in enumerate(prompts) if (text := plain_text(prompt)) is not None}
        result: dict[int, TokenizedPrompt] = {}
        if len(texts) > 1 and self.halves is None:
            ids = self.require_tokenizer().encode_batch(list(texts.values()), add_special_tokens)
            for (index, text), token_ids in zip(texts.items(), ids, strict=True):
                prompt = prompts[index]
                salt = self._check_salt(prompt.get("cache_salt")) if isinstance(prompt, Mapping) else None
                result[index] = TokenizedPrompt(token_ids, text, salt)
        others = [index for index in range(len(prompts)) if index not in result]
        rest = [prompts[index] for index in others]
        one = functools.partial(self.tokenize, add_special_tokens=add_special_tokens)
        found = in_threads(one, rest) if any(map(has_media, rest)) else list(map(one, rest))
        result.update(zip(others, found, strict=True))
        return [result[index] for index in range(len(prompts))]

    def _tokenize_mapping(self, prompt: Mapping[str, Any], add_special_tokens: bool) -> TokenizedPrompt:
        if prompt.get("encoder_prompt") is not None:
            message = f"encoder_prompt: {self._model.model!r} has no encoder beside its decoder; give 'prompt' alone"
            raise RequestError(message, param="encoder_prompt")
        salt = self._check_salt(prompt.get("cache_salt"))
        if (embeds := prompt.get("prompt_embeds")) is not None:
            if others := [key for key in _NOT_WITH_EMBEDS if prompt.get(key)]:
                raise RequestError(f"prompt_embeds is a whole prompt: leave {others[0]} out", param="prompt_embeds")
            return self.embedded(read_embeds(embeds), salt)
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"prompt must be text, not {type(text).__name__}", param="prompt")
        if (token_ids := prompt.get("prompt_token_ids")) is not None:
            ids = self._check_token_ids(token_ids, "prompt_token_ids")
            return self.with_media(TokenizedPrompt(ids, text, salt), prompt)
        if text is None:
            found = ", ".join(map(repr, prompt)) or "nothing"
            raise RequestError(f"a prompt needs 'prompt' or 'prompt_token_ids'; this one has {found}", param="prompt")
        is_image = not text and self.media is not None and self.media.is_alone
        ids = [] if is_image else self._encode(text, add_special_tokens)
        return self.with_media(TokenizedPrompt(ids, text, salt), prompt)

    def embedded(self, embeds_TD: npt.NDArray[Any], salt: str | None = None) -> TokenizedPrompt:
        """A prompt of embeddings. Raises RequestError: the engine takes none."""
        if not self._takes_embeds:
            raise RequestError(
                "prompt_embeds are off: start the engine with enable_prompt_embeds", param="prompt_embeds"
            )
        return TokenizedPrompt([PLACEHOLDER] * len(embeds_TD), None, salt, media=embeds_items(embeds_TD))

    @property
    def markers(self) -> dict[str, str]:
        """The texts of the tokens that stand for an item of each modality in a prompt."""
        tokenizer = self._source.get()
        return {} if self.media is None or tokenizer is None else self.media.marker_texts(tokenizer.id_to_token)

    def with_media(
        self, tokenized: TokenizedPrompt, prompt: Mapping[str, Any], fields: Mapping[str, Sequence[str]] | None = None
    ) -> TokenizedPrompt:
        """The prompt with the media that it names in its tokens' places, or beside it; itself where it names none. `fields`: of
        the request, that the items of each modality come from, for errors.
        Raises RequestError: they cannot be used, or the model reads none."""
        if self.halves is not None:
            ids, text, item = self.halves.read({"prompt": tokenized.text, **prompt}, fields)
            return dataclasses.replace(tokenized, token_ids=ids, text=text, media=[item])
        data = prompt.get("multi_modal_data")
        if not data:
            return tokenized
        if self.media is None:
            raise RequestError(f"multi_modal_data: {self._model.model!r} reads no media here", param="multi_modal_data")
        options, io = prompt.get("mm_processor_kwargs"), prompt.get("media_io_kwargs")
        uuids = prompt.get("multi_modal_uuids")
        if self.media.is_alone and (prompt.get("prompt") or prompt.get("prompt_token_ids")):
            raise RequestError("a prompt of this model is a text or an image: leave one of them out", param="prompt")
        ids, items = self.media.apply(tokenized.token_ids, self._open_media(data, io), uuids, options, fields=fields)
        return dataclasses.replace(tokenized, token_ids=ids, media=items)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.require_tokenizer().encode(text, add_special_tokens)

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError: there is none."""
        tokenizer = self._source.get()
        if tokenizer is None:
            raise RequestError(
                f"a text prompt needs a tokenizer, but {self._source.why_absent}; give token ids (prompt_token_ids)",
                param="prompt",
            )
        return tokenizer

    def _check_token_ids(self, given: Any, param: str) -> list[int]:
        """Token ids as a list of this request's own; within the vocabulary."""
        if hasattr(given, "tolist"):  # an array or a tensor: all at once
            given = given.tolist()
        try:
            return msgspec.convert(given, self._token_ids_type)  # one pass in C: 13 ns a token, against 60 below
        except msgspec.ValidationError:
            pass  # other kinds of whole numbers, or an error that is to be told
        try:
            token_ids = list(given)
            if set(map(type, token_ids)) - {int}:
                if any(isinstance(token_id, bool) for token_id in token_ids):
                    raise TypeError
                token_ids = [operator.index(token_id) for token_id in token_ids]
        except TypeError:
            raise RequestError(f"{param} must be text or a list of token ids (whole numbers)", param=param) from None
        markers = (
            set[int]() if self.media is None else set(self.media.markers.values())
        )  # they may be behind the vocabulary
        self._check_ids([token_id for token_id in token_ids if token_id not in markers], param)
        return token_ids

    @staticmethod
    def _check_salt(salt: Any) -> str | None:
        if salt is None:
            return None
        if not isinstance(salt, str) or not 0 < len(salt) <= limits.MAX_CACHE_SALT_CHARS:
            message = f"cache_salt must be text of 1 to {limits.MAX_CACHE_SALT_CHARS} characters"
            raise RequestError(message, param="cache_salt")
        return salt

    # --- requests ---

    def process(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        tenant: str = "",
        is_beam: bool = False,
        is_continuation: bool = False,
        adapter: LoRARequest | None = None,
    ) -> RequestRecord:
        """A request that may be queued. `params` is copied, never changed. A step of a beam search (`is_beam`) may ask for as
        many logprobs as it has candidates; `is_continuation`: it is not the first one.
        Raises RequestError: something about it cannot be served; `param` names it."""
        check_params(params, SamplingParams, "sampling_params")
        self._check_generates()
        core_id = self.next_core_id(request_id)
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        tokenizer = self._source.get()
        prompt = prompt.with_ids(self._fit_prompt(prompt.token_ids, params))
        token_ids = prompt.token_ids
        array = token_array(token_ids) if prompt.array is None else prompt.array
        check_in_vocabulary(array, self._source.num_tokens(), "prompt")
        params = self._complete_params(params, len(token_ids), tokenizer, is_beam)
        if params.prompt_logprobs is not None and any(item.modality == EMBEDS for item in prompt.media):
            message = "a prompt of embeddings has no tokens, and so no prompt_logprobs: leave them out"
            raise RequestError(message, param="prompt_logprobs")
        if params.thinking_token_budget is not None:
            self._limit_thinking(params, token_ids, tokenizer)
        seed = self._random.getrandbits(SEED_BITS) if params.seed is None else params.seed
        engine_requests = [
            EngineRequest(
                request_id=core_id if params.n == 1 else f"{core_id}.{index}",
                prompt_token_ids=array,
                sampling_params=params,
                seed=child_seed(seed, index),
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=prompt.cache_salt,
                tenant=tenant,
                group_id=core_id if params.n > 1 else None,
                is_continuation=is_continuation,
                media=prompt.media,
            )
            for index in range(params.n)
        ]
        self.attach(engine_requests, adapter or adapter_of_media(self._by_media, prompt.media))
        return RequestRecord(request_id, prompt.text, token_ids, params, engine_requests, arrival_time, tokenizer)

    def attach(self, requests: list[EngineRequest], adapter: LoRARequest | None) -> None:
        """Give the sequences of a request their adapter.
        Raises RequestError: it is no adapter, adapters are off, or the request cannot have it."""
        if adapter is None:
            return
        check_adapter(adapter)
        if not self._has_adapters:
            raise RequestError(
                f"lora_request asks for the adapter {adapter.lora_name!r}, and adapters are off: start the engine with "
                "enable_lora",
                param="lora_request",
            )
        self._virtual.attach(requests, adapter)

    def _check_generates(self) -> None:
        """Raises RequestError: the model pools."""
        if self._model.pooling is not None:
            tasks = self._model.pooling.tasks
            instead = next(filter(None, map(_WAYS.get, tasks)), "LLM.encode or /pooling")
            raise RequestError(
                f"{self._model.model!r} runs as a pooling model here ({', '.join(tasks)}) and generates no text: use {instead}, "
                "or start the engine with runner='generate', if the checkpoint can",
                param="model",
            )

    def next_core_id(self, request_id: str) -> str:
        """A request's id in the core. None comes twice, even if the user's does: late outputs of an aborted request find no
        other request.
        Raises RequestError: the user's id is empty or too long."""
        if not 0 < len(request_id) <= limits.MAX_REQUEST_ID_CHARS:
            message = f"request_id must have 1 to {limits.MAX_REQUEST_ID_CHARS} characters, not {len(request_id)}"
            raise RequestError(message, param="request_id")
        return f"{request_id}~{next(self._serial):x}"

    def _fit_prompt(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """The prompt, truncated on the left if that was asked for; it leaves room for at least one token."""
        limit = self._model.max_model_len
        if (keep := params.truncate_prompt_tokens) is not None:
            check_truncation(keep, limit)
            token_ids = token_ids[-(max(1, limit - 1) if keep == -1 else keep) :]
        if not token_ids:
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
        if len(token_ids) >= limit:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, but max_model_len is {limit} and one must be left for the "
                "output; shorten it, or set truncate_prompt_tokens",
                param="prompt",
            )
        return token_ids

    def _complete_params(
        self, given: SamplingParams, prompt_len: int, tokenizer: Tokenizer | None, is_beam: bool
    ) -> SamplingParams:
        """A copy with what depends on the model filled in, after checking it."""
        params = copy.copy(given)
        room = self._model.max_model_len - prompt_len
        self._check_ids(params.follow_trace(), "trace_decode_token_ids")
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        params.eos_token_ids = self._eos(tokenizer)
        if tokenizer is None:
            params.detokenize = False
        self._check_stops(params, tokenizer)
        if params.stream_interval is not None or self._stream_interval > 1:
            params.stream_interval = max(params.stream_interval or 1, self._stream_interval)
        if params.logprob_token_ids is not None:
            self._check_ids(params.logprob_token_ids, "logprob_token_ids")
            params.logprobs = 0  # the named ones come beside the token's own
        if not is_beam:
            self._check_logprobs(params, prompt_len)
        self._check_token_choices(params)
        if params.bad_words:
            params.bad_words_token_ids = self._bad_word_ids(params.bad_words, tokenizer)
        if params.logits_processors and not self._allow_functions:
            raise RequestError(
                "logits_processors of a request are functions, which work only where the engine core runs in this "
                "process; give the engine a logits processor class instead",
                param="logits_processors",
            )
        if params.structured_outputs is not None:
            self.check_grammar(params.structured_outputs)
        if params.skip_reading_prefix_cache is None and (params.prompt_logprobs is not None or self._gives_states):
            params.skip_reading_prefix_cache = True  # of what the cache has nothing is computed
        return params

    def _limit_thinking(self, params: SamplingParams, prompt_ids: list[int], tokenizer: Tokenizer | None) -> None:
        """Find where a request with a budget for its thoughts thinks, unless the server has: its prompt tells."""
        if params.structured_outputs is not None and self._structured_outputs.enable_in_reasoning:
            raise RequestError(
                "thinking_token_budget cannot be kept: the engine's enable_in_reasoning constrains the reasoning with "
                "structured_outputs",
                param="thinking_token_budget",
            )
        if params.thinking is None:
            template = None if tokenizer is None else tokenizer.chat_template
            config = self._reasoning
            formats = choose_formats(config.reasoning_parser or AUTO, NONE, template)
            formats = apply_response_template(formats, "" if tokenizer is None else tokenizer.name_or_path)
            formats = apply_strings(formats, config.reasoning_start_str, config.reasoning_end_str)
            check_budget(formats, tokenizer)
            assert tokenizer is not None
            params.thinking = find_prompt_thinking(formats, prompt_ids, tokenizer)

    def _grammars(self) -> Grammars:
        model = self._model
        return shared_grammars(model.tokenizer_path, model.tokenizer_mode, model.vocab_size, self._structured_outputs)

    def knows_grammar(self, constraint: StructuredOutputsParams) -> bool:
        """Whether `check_grammar` does not have to wait. Raises RequestError: it is too large, or no JSON."""
        ends = self._eos_token_ids
        return ends is not None and self._grammars().is_known(constraint, ends, shared=self._allow_functions)

    def check_grammar(self, constraint: StructuredOutputsParams) -> None:
        """Wait until a request's grammar is compiled: milliseconds, or seconds with the first one of a large vocabulary.
        Raises RequestError: it cannot be used; `param` names the field."""
        tokenizer = self._source.of_model()
        if tokenizer is None:
            message = f"structured_outputs need a tokenizer, but {self._source.why_absent}"
            raise RequestError(message, param="structured_outputs")
        model, grammars, eos = self._model, self._grammars(), self._eos(tokenizer)

        def load() -> Vocabulary:
            return read_vocabulary(tokenizer, model.vocab_size)

        if self._try_grammars_apart:
            grammars.check(constraint, eos, load, apart=True)
        if (
            not self._try_grammars_apart or self._allow_functions
        ):  # the core, which needs it soon, shares what is compiled
            grammars.check(constraint, eos, load)

    def _eos(self, tokenizer: Tokenizer | None) -> list[int]:
        """The ids that end a sequence: the model's and the tokenizer's."""
        if tokenizer is not self._source.of_model():
            return end_token_ids(self._model, tokenizer)
        if self._eos_token_ids is None:
            self._eos_token_ids = end_token_ids(self._model, tokenizer)
        return self._eos_token_ids

    def _check_stops(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        if params.stop and (tokenizer is None or not params.detokenize):
            why = self._source.why_absent if tokenizer is None else "detokenize is off"
            raise RequestError(f"stop strings need detokenization, but {why}; use stop_token_ids", param="stop")
        if params.stop_token_ids:
            self._check_ids(params.stop_token_ids, "stop_token_ids")

    def _check_logprobs(self, params: SamplingParams, prompt_len: int) -> None:
        size = self._source.num_tokens()
        limit = size if self._model.max_logprobs == -1 else self._model.max_logprobs
        cost = 0
        for name, positions in (("logprobs", (params.max_tokens or 0) * params.n), ("prompt_logprobs", prompt_len)):
            asked: int | None = getattr(params, name)
            if asked is None:
                continue
            if (count := asked) == -1:
                count = size
                setattr(params, name, size if self._model.added_tokens else -1)  # logits have those of adapters, too
            if count > limit:
                what = f"{asked} (the whole vocabulary, {count})" if asked == -1 else str(asked)
                raise RequestError(f"{name} is {what}, but max_logprobs is {limit}", param=name)
            named = len(params.logprob_token_ids or ()) if name == "logprobs" else 0
            cost += positions * (count + named + 1)
            if cost > limits.MAX_LOGPROB_COST:
                raise RequestError(
                    f"{name}={asked} for {positions} tokens is {cost} logprobs in all; at most "
                    f"{limits.MAX_LOGPROB_COST} are allowed: lower {name}, max_tokens or n",
                    param=name,
                )

    def _check_token_choices(self, params: SamplingParams) -> None:
        if params.allowed_token_ids is not None:
            if not params.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty: no token could be sampled", param="allowed_token_ids")
            self._check_ids(params.allowed_token_ids, "allowed_token_ids")
        if params.logit_bias:
            self._check_ids(list(params.logit_bias), "logit_bias")

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        count = self._source.num_tokens()
        for token_id in token_ids:
            if not 0 <= token_id < count:
                raise _out_of_vocabulary(token_id, count, param)

    def _bad_word_ids(self, words: list[str], tokenizer: Tokenizer | None) -> list[list[int]]:
        """Token sequences of each word, as a sentence's start and after a space."""
        if tokenizer is None:
            raise RequestError(f"bad_words need a tokenizer, but {self._source.why_absent}", param="bad_words")
        key = (tokenizer.name_or_path, *words)
        if key in self._bad_words:
            return self._bad_words[key]
        sequences: list[list[int]] = []
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                token_ids = tokenizer.encode(text, add_special_tokens=False)
                if token_ids and token_ids not in sequences:
                    sequences.append(token_ids)
        if sum(map(len, sequences)) > limits.MAX_BAD_WORDS_TOKENS:
            raise RequestError(
                f"bad_words are {sum(map(len, sequences))} tokens in all; at most {limits.MAX_BAD_WORDS_TOKENS} are allowed",
                param="bad_words",
            )
        if len(self._bad_words) >= 64:
            self._bad_words.clear()
        self._bad_words[key] = sequences
        return sequences
