"""What the routes of pooling models read and answer: embeddings, classes, scores, ranks, and the pooler's numbers as they are.

Names and types only; values are checked by `PoolingParams` and the engine.
"""

from typing import Any, Literal

import msgspec

from quire.entrypoints.openai.protocol import AnswerHead, CacheSalt, Priority, PromptItem, RequestId
from quire.entrypoints.pooling_api.number_formats import EmbedDtype, Endianness
from quire.outputs import LateChunkingMetadata

UNSET = msgspec.UNSET
EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]


class PoolingFields(msgspec.Struct, kw_only=True):
    """The fields that every route of a pooling model takes."""

    model: str | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None
    user: str | None = None


class InputFields(PoolingFields, kw_only=True):
    """Of routes that take inputs one by one: texts or token ids, or a conversation in place of them."""

    input: str | list[PromptItem] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None


class EncodedFields(InputFields, kw_only=True):
    """Of routes that answer with many numbers, and how these are written."""

    encoding_format: EncodingFormat | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Endianness | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    late_chunking_params: dict[str, Any] | None = None


class EmbeddingRequest(EncodedFields, kw_only=True):
    """Body of `POST /v1/embeddings`."""


class ClassificationRequest(InputFields, kw_only=True):
    """Body of `POST /classify`."""


class PoolingRequest(EncodedFields, kw_only=True):
    """Body of `POST /pooling`."""

    task: str | None = None
    data: Any = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None


class PairFields(PoolingFields, kw_only=True):
    """Of routes that compare texts."""

    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


Scored = str | dict[str, Any] | list[str | dict[str, Any]]
"""A text, parts of a message (`content`, or one), or several of these."""


class ScoreRequest(PairFields, kw_only=True):
    """Body of `POST /score`: one text against many, or as many of both; any of four pairs of names."""

    text_1: Scored | None = None
    text_2: Scored | None = None
    data_1: Scored | None = None
    data_2: Scored | None = None
    queries: Scored | None = None
    documents: Scored | None = None
    items: Scored | None = None


class RerankRequest(PairFields, kw_only=True):
    """Body of `POST /rerank`, in Jina's and Cohere's form. A document is a text, an object with `text`, or parts of a message."""

    query: str | dict[str, Any]
    documents: list[str | dict[str, Any]] | dict[str, Any]
    top_n: int | None = None
    return_documents: bool | None = None


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v2/embed`, in Cohere's form."""

    model: str | None = None
    texts: list[str] | None = None
    inputs: list[dict[str, Any]] | None = None
    images: Any = None
    input_type: str | None = None
    embedding_types: list[str] | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None
    truncate: str | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None


class PoolingUsage(msgspec.Struct):
    """Tokens of a pooling request; nothing is generated."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class EmbeddingData(msgspec.Struct):
    """One input's vector, or one for each of its chunks or tokens: numbers, or base64 of their bytes."""

    index: int
    embedding: list[float | list[float]] | str
    object: str = "embedding"
    late_chunking: LateChunkingMetadata | msgspec.UnsetType = UNSET


class PoolingAnswer(AnswerHead, kw_only=True):
    """What most answers have in common."""

    usage: PoolingUsage


class EmbeddingResponse(PoolingAnswer, kw_only=True):
    """Answer of `POST /v1/embeddings`."""

    data: list[EmbeddingData]


class ClassificationData(msgspec.Struct):
    """One input's probabilities; `label` is the likeliest class's name."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(PoolingAnswer, kw_only=True):
    """Answer of `POST /classify`."""

    data: list[ClassificationData]


class PoolingData(msgspec.Struct):
    """One input's numbers: a vector, a row for each token, or base64 of their bytes."""

    index: int
    data: list[float | list[float]] | str
    object: str = "pooling"
    late_chunking: LateChunkingMetadata | msgspec.UnsetType = UNSET


class IOProcessorResponse(msgspec.Struct):
    """Answer of `POST /pooling` to `data`: the IO processor's own."""

    request_id: str
    created_at: int
    data: Any


class PoolingResponse(PoolingAnswer, kw_only=True):
    """Answer of `POST /pooling`."""

    data: list[PoolingData]


class ScoreData(msgspec.Struct):
    """One pair's score."""

    index: int
    score: float
    object: str = "score"


class ScoreResponse(PoolingAnswer, kw_only=True):
    """Answer of `POST /score`."""

    data: list[ScoreData]


class RankedDocument(msgspec.Struct):
    """A document's text, or the parts of its message."""

    text: str | None = None
    multi_modal: Any = UNSET


class RankedResult(msgspec.Struct):
    """A document's place: `index` is where it stood in the request."""

    index: int
    relevance_score: float
    document: RankedDocument | msgspec.UnsetType = UNSET


class RerankResponse(msgspec.Struct, kw_only=True):
    """Answer of `POST /rerank`: the best document first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedResult]


class CohereMeta(msgspec.Struct):
    """What a request cost."""

    api_version: dict[str, str]
    billed_units: dict[str, int]


class CohereEmbedResponse(msgspec.Struct, kw_only=True):
    """Answer of `POST /v2/embed`: the vectors of all texts, for each type that was asked for."""

    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: CohereMeta
    response_type: str = "embeddings_by_type"
