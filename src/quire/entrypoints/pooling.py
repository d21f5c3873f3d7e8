"""What `LLM` offers over pooling models: embeddings, classes, scores, and the pooler's numbers as they are.

Thin: parameters and prompts are checked by the pooling processor before anything is queued, and the engine does the rest.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict, Unpack

from quire.adapters import LoRARequest
from quire.engine.caller import asking
from quire.engine.input_processor import TokenizedPrompt, check_params
from quire.engine.io_processor import prompts_of
from quire.engine.llm_engine import LLMEngine
from quire.engine.pooling_processor import join_pieces
from quire.engine.request_record import RequestRecord
from quire.engine.tokenization import Tokenization
from quire.entrypoints.conversations import Adapters, adapters_per_prompt, as_prompts, check_count, with_media
from quire.entrypoints.media_parts import MediaMessages
from quire.entrypoints.scoring import (
    Given,
    Parts,
    Scored,
    check_scores,
    check_texts,
    each_once,
    key_of,
    pair_inputs,
    pair_prompts,
    scored_task,
    similarity,
)
from quire.errors import EngineError, RequestError
from quire.guards import is_dict
from quire.inputs import DataPrompt, PromptType
from quire.media import IMAGE
from quire.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import PoolingParams
from quire.tokenizers.chat_template import ChatTemplate

PoolingPerPrompt = PoolingParams | Sequence[PoolingParams] | None
Pooled = PoolingRequestOutput[PoolingOutput]


class EncodeOptions(TypedDict, total=False):
    """What `encode` takes besides prompts and a task."""

    pooling_params: PoolingPerPrompt
    truncate_prompt_tokens: int | None
    use_tqdm: bool | Callable[..., Any]
    lora_request: Adapters
    tokenization_kwargs: dict[str, Any] | None
    prompt_name: str | None


class PoolingMethods:
    """The pooling half of `LLM`. Every method takes prompts as `generate` does: text, token ids, dicts, or a list of these.

    Each of them raises `RequestError` where the model cannot do what is asked (nothing was queued then), and `EngineError`
    where a computation failed.
    """

    llm_engine: LLMEngine
    _ids: Iterator[str]
    _run: Callable[[Sequence[RequestRecord], Any], list[Any]]
    _render: Callable[..., list[TokenizedPrompt]]
    _by_tokenizer: Callable[..., Iterator[tuple[LoRARequest | None, list[Any]]]]

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType] | DataPrompt,
        pooling_params: PoolingPerPrompt = None,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[Pooled]:
        """What the pooler gives for each prompt: one vector, or an array with a row for each token.

        Args:
            prompts: or an object with `data`, for the plugin of `io_processor_plugin`; the one output then has its answer.
            pooling_params: for all prompts, or one for each.
            pooling_task: `embed`, `classify`, `token_embed` or `token_classify`; None takes the model's first.
            truncate_prompt_tokens: as in `PoolingParams`.
            prompt_name: put this prompt of config_sentence_transformers.json before each text.
        """
        if is_dict(prompts) and "data" in prompts:
            return [self._encode_data(prompts["data"], pooling_params, use_tqdm, lora_request)]
        tokenization = Tokenization.of(tokenization_kwargs)
        processor = self.llm_engine.pooling_processor
        special = tokenization.add_special_tokens is not False
        tokenized = list[TokenizedPrompt]()
        for own, some in self._by_tokenizer(as_prompts(prompts), lora_request):
            with asking(own):
                tokenized += processor.tokenize_batch(some, special, prompt_name)
        params = _params_per_prompt(pooling_params, len(tokenized), pooling_task, truncate_prompt_tokens)
        return self._pool(tokenized, [tokenization.of_pooling(each) for each in params], use_tqdm, lora_request)

    def _encode_data(
        self, data: Any, params: PoolingPerPrompt, use_tqdm: bool | Callable[..., Any], adapters: Adapters
    ) -> Any:
        processor = self.llm_engine.io_processor
        if processor is None:
            raise RequestError("a prompt with data needs io_processor_plugin, which names a plugin", param="data")
        merged = processor.merge_pooling_params(params if isinstance(params, PoolingParams) else None)
        outputs = PoolingMethods.encode(
            self, prompts_of(processor, data), merged, use_tqdm=use_tqdm, lora_request=adapters
        )
        tokens = [token_id for output in outputs for token_id in output.prompt_token_ids]
        return PoolingRequestOutput(outputs[0].request_id, processor.post_process(outputs), tokens, True)

    def embed(
        self, prompts: PromptType | Sequence[PromptType], **options: Unpack[EncodeOptions]
    ) -> list[EmbeddingRequestOutput] | list[Pooled]:
        """An embedding of each prompt; arguments as those of `encode`. Where the model gives vectors of tokens alone
        (`pooler_config` has the task `token_embed`), these, as `encode` gives them."""
        task = self.llm_engine.pooling_processor.config.embedding_task
        pooled = PoolingMethods.encode(self, prompts, pooling_task=task, **options)
        return pooled if task == "token_embed" else [EmbeddingRequestOutput.from_base(output) for output in pooled]

    def classify(
        self, prompts: PromptType | Sequence[PromptType], **options: Unpack[EncodeOptions]
    ) -> list[ClassificationRequestOutput]:
        """A probability for each class, of each prompt; arguments as those of `encode`."""
        pooled = PoolingMethods.encode(self, prompts, pooling_task="classify", **options)
        return [ClassificationRequestOutput.from_base(output) for output in pooled]

    def reward(self, prompts: PromptType | Sequence[PromptType], /, **options: Unpack[EncodeOptions]) -> list[Pooled]:
        """A reward model's numbers for each token (or each step) of each prompt; arguments as those of `encode`."""
        return self.encode(prompts, pooling_task="token_classify", **options)

    def score(
        self,
        data_1: Given,
        data_2: Given,
        /,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each input of `data_1` and its partner in `data_2` match; a single one is paired with every other one.

        An input is a text or, of an embedding model, parts of a message: one, or `{"content": [part, …]}` in a list; a
        `content` by itself has an input in each of its parts.

        A classifier with one label reads both texts as one prompt (a cross-encoder); of an embedding model it is the cosine
        of the two embeddings, and where `pooler_config` has the task `token_embed`, ColBERT's sum over tokens.

        Args:
            chat_template: how a cross-encoder's pair becomes a prompt (roles `query` and `document`); None joins them as
                the tokenizer joins pairs.
        """
        pooling_params = Tokenization.of(tokenization_kwargs).of_pooling(pooling_params or PoolingParams())
        firsts, seconds = pair_inputs(data_1, data_2)
        config = self.llm_engine.pooling_processor.config
        if config.embeds:
            return self._score_embeddings(
                firsts, seconds, pooling_params, truncate_prompt_tokens, use_tqdm, lora_request
            )
        check_scores(config)
        check_texts([*firsts, *seconds], "data_2")
        (params,) = _params_per_prompt(pooling_params, 1, "classify", truncate_prompt_tokens)
        tokenizer, pairs = self.llm_engine.get_tokenizer(), list(zip(firsts, seconds, strict=True))
        template = None if chat_template is None else ChatTemplate.choose(tokenizer.template, chat_template)
        prompts = pair_prompts(self.llm_engine.pooling_processor, pairs, params, tokenizer, template)
        pooled = self._pool(prompts, [params] * len(prompts), use_tqdm, lora_request)
        return [ScoringRequestOutput.from_base(output) for output in pooled]

    def _score_embeddings(
        self,
        firsts: list[Scored],
        seconds: list[Scored],
        pooling_params: PoolingParams | None,
        truncate_prompt_tokens: int | None,
        use_tqdm: bool | Callable[..., Any],
        lora_request: Adapters,
    ) -> list[ScoringRequestOutput]:
        """Each input is embedded once, however often it is paired."""
        once, task = each_once([*firsts, *seconds]), scored_task(self.llm_engine.pooling_processor.config)
        prompts = list[TokenizedPrompt]()
        for own, some in self._by_tokenizer(once, lora_request):
            with asking(own):
                prompts += self._scored_prompts(some)
        params = _params_per_prompt(pooling_params, len(prompts), task, truncate_prompt_tokens)
        embedded = dict(zip(map(key_of, once), self._pool(prompts, params, use_tqdm, lora_request), strict=True))
        pairs = [
            (embedded[key_of(first)], embedded[key_of(second)]) for first, second in zip(firsts, seconds, strict=True)
        ]
        return [
            ScoringRequestOutput(
                request_id=f"{first.request_id}_{second.request_id}",
                outputs=ScoringOutput(similarity(first, second)),
                prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
                finished=True,
                num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
            )
            for first, second in pairs
        ]

    def _scored_prompts(self, some: Sequence[Scored]) -> list[TokenizedPrompt]:
        """Of inputs that one tokenizer reads: all texts together."""
        texts = [one for one in some if isinstance(one, str)]
        tokenized = iter(self.llm_engine.pooling_processor.tokenize_batch(texts))
        return [next(tokenized) if isinstance(one, str) else self._prompt_of_parts(one) for one in some]

    def _prompt_of_parts(self, parts: Parts) -> TokenizedPrompt:
        messages, processor = [{"role": "user", "content": list(parts)}], self.llm_engine.input_processor
        if processor.media is None or not processor.media.is_alone:
            return self._render([messages], {"add_generation_prompt": False}, False, None)[0]
        taken = MediaMessages(messages, {IMAGE: ""}, is_text=False)
        return with_media(taken, taken.read(processor.media.source), [], processor, True)

    def _pool(
        self,
        prompts: list[TokenizedPrompt],
        params: list[PoolingParams],
        use_tqdm: bool | Callable[..., Any],
        lora_request: Adapters,
    ) -> list[Pooled]:
        processor = self.llm_engine.pooling_processor
        pieces = [processor.pieces(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        requests = [
            processor.process(next(self._ids), piece, one, adapter=adapter)
            for parts, one, adapter in zip(pieces, params, adapters_per_prompt(lora_request, len(prompts)), strict=True)
            for piece in parts
        ]
        outputs: Iterator[Pooled] = iter(self._run(requests, use_tqdm))
        joined = [join_pieces(list(itertools.islice(outputs, len(parts)))) for parts in pieces]
        failed = next((output for output in joined if output.error is not None), None)
        if failed is not None:
            raise EngineError(f"request {failed.request_id} failed: {failed.error}")
        return joined


def _params_per_prompt(
    given: PoolingPerPrompt, count: int, task: str | None, truncate: int | None
) -> list[PoolingParams]:
    """One for each prompt, with the call's task and truncation."""
    listed = list(given) if isinstance(given, Sequence) else [given or PoolingParams()] * count
    check_count(listed, count, "pooling_params")
    return [_with(params, task, truncate) for params in listed]


def _with(given: PoolingParams, task: str | None, truncate: int | None) -> PoolingParams:
    check_params(given, PoolingParams, "pooling_params")
    params = copy.copy(given)
    if task is not None and params.task not in (None, task):
        raise RequestError(f"pooling_params.task is {params.task!r}, but the call asks for {task!r}", param="task")
    params.task = task or params.task
    if truncate is not None:
        params.truncate_prompt_tokens = PoolingParams(truncate_prompt_tokens=truncate).truncate_prompt_tokens
    return params
