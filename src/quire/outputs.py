"""What users get back. Plain records; the field names are those of vLLM."""

import dataclasses
from typing import Any, Generic, TypeVar

from quire.logprobs import PromptLogprobs, SampleLogprobs


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One generated sequence of a request.

    Attributes:
        finish_reason: None while it runs; then `stop`, `length`, `abort` or `error`.
        stop_reason: the stop string or stop token id that ended it; None for end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    def finished(self) -> bool:
        """Whether this sequence has ended."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic()`; 0 where not yet."""

    arrival_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    finished_time: float = 0.0
    num_generation_tokens: int = 0


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """The state of one generation request; `error` tells why where a finish reason is `error`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    num_cached_tokens: int | None = None
    error: str | None = None


@dataclasses.dataclass(slots=True)
class PoolingOutput:
    """What the pooler gave."""

    data: list[float]


@dataclasses.dataclass(slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclasses.dataclass(slots=True)
class ClassificationOutput:
    """A probability for each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)


@dataclasses.dataclass(slots=True)
class ScoringOutput:
    """How well two texts match."""

    score: float


PooledT = TypeVar("PooledT")


@dataclasses.dataclass(slots=True)
class PoolingRequestOutput(Generic[PooledT]):
    """A finished pooling request."""

    request_id: str
    outputs: PooledT
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int = 0


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
