"""What Ollama's routes read and answer, as msgspec structs. Names and types only.

Blocks of messages are plain dicts: they are checked where they are converted. Errors: `{"error": "a sentence"}`. Durations are
nanoseconds.
"""

import datetime
import math
from typing import Any

import msgspec

from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.openai.protocol import RequestId, TokenLogprob

PROTOCOL_VERSION = "0.13.5"
"""The release of Ollama whose routes these are: programs ask, and refuse old ones."""
NDJSON = b"application/x-ndjson"

UNSET = msgspec.UNSET
Unset = msgspec.UnsetType


class ModelFields(msgspec.Struct, kw_only=True):
    """What all requests about a model have; `name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None
    request_id: RequestId | None = None


class GenerationOptions(ModelFields, kw_only=True):
    """What the requests for a text have in common."""

    stream: bool | None = True
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChat(GenerationOptions, kw_only=True):
    """Body of `POST /api/chat`. Without messages it asks for the model to be there."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerate(GenerationOptions, kw_only=True):
    """Body of `POST /api/generate`. Without a prompt it asks for the model to be there."""

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    # Read so that they can be refused by name.
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None


class OllamaEmbed(ModelFields, kw_only=True):
    """Body of `POST /api/embed`."""

    input: str | list[str]
    truncate: bool | None = True
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class OllamaEmbedding(ModelFields, kw_only=True):
    """Body of `POST /api/embeddings`, which `/api/embed` has replaced."""

    prompt: str
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class OllamaModel(ModelFields, kw_only=True):
    """Body of the routes about a model itself."""

    stream: bool | None = True
    verbose: bool | None = None
    insecure: bool | None = None


class Function(msgspec.Struct):
    """A call of a function."""

    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct):
    """A call that the model asks for."""

    function: Function


class OllamaMessage(msgspec.Struct, kw_only=True):
    """What the model says, or a part of it."""

    role: str = "assistant"
    content: str = ""
    thinking: str | Unset = UNSET
    tool_calls: list[OllamaCall] | Unset = UNSET


class AnswerHead(msgspec.Struct, kw_only=True):
    """What each line of an answer begins with; the last one has counts and durations."""

    model: str
    created_at: str
    done: bool
    done_reason: str | Unset = UNSET
    total_duration: int | Unset = UNSET
    load_duration: int | Unset = UNSET
    prompt_eval_count: int | Unset = UNSET
    prompt_eval_duration: int | Unset = UNSET
    eval_count: int | Unset = UNSET
    eval_duration: int | Unset = UNSET
    logprobs: list[TokenLogprob] | Unset = UNSET


class OllamaChatAnswer(AnswerHead, kw_only=True):
    """Answer of `POST /api/chat`, or a line of it."""

    message: OllamaMessage


class OllamaText(AnswerHead, kw_only=True):
    """Answer of `POST /api/generate`, or a line of it."""

    response: str
    thinking: str | Unset = UNSET


class OllamaVectors(msgspec.Struct, kw_only=True):
    """Answer of `POST /api/embed`: a vector for each text, of length 1."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaVector(msgspec.Struct):
    """Answer of `POST /api/embeddings`."""

    embedding: list[float]


class ModelDetails(msgspec.Struct, kw_only=True):
    """What kind of model it is."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str


class ListedModel(msgspec.Struct, kw_only=True):
    """A served model; `size` is the bytes of its files."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class LoadedModel(ListedModel, kw_only=True):
    """A served model as `/api/ps` tells it."""

    expires_at: str
    size_vram: int
    context_length: int


class Tags(msgspec.Struct):
    """Answer of `GET /api/tags`."""

    models: list[ListedModel]


class Loaded(msgspec.Struct):
    """Answer of `GET /api/ps`."""

    models: list[LoadedModel]


class Shown(msgspec.Struct, kw_only=True):
    """Answer of `POST /api/show`."""

    license: str = ""
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


def now() -> str:
    """The time, as the protocol writes it."""
    return at(datetime.datetime.now(datetime.UTC))


def at(moment: datetime.datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def nanoseconds(milliseconds: float | None) -> int:
    """A duration; 0 where it is not known."""
    return 0 if milliseconds is None or not math.isfinite(milliseconds) else int(milliseconds * 1e6)


def speaks_ollama(path: str) -> bool:
    """Whether a route's clients expect this protocol's errors."""
    return path.startswith("/api/")


class OllamaError(msgspec.Struct):
    """The body of every answer that is not a success, and what ends a stream that fails."""

    error: str


def ollama_error(error: HTTPError) -> bytes:
    return msgspec.json.encode(OllamaError(error.detail.message))
