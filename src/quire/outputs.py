"""What users get back. Plain records; the field names are those of vLLM."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from quire.logprobs import PromptLogprobs, SampleLogprobs


@dataclasses.dataclass(slots=True, frozen=True)
class WeightVersionSpan:
    """Output tokens `start` to (not including) `end` were made by weights of this version."""

    version: str
    start: int
    end: int


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One generated sequence of a request.

    Attributes:
        finish_reason: None while it runs; then `stop`, `length`, `abort` or `error`.
        stop_reason: the stop string or stop token id that ended it; None for end of sequence.
        weight_versions: of a sequence that has ended: which of its tokens were made by which weights.
        text_ends: by token, where its text ends in `text`; only in streams with logprobs. Text at the end that no token is
            said to have is the last one's: what was held back of it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    weight_versions: list[WeightVersionSpan] | None = None
    text_ends: list[int] | None = dataclasses.field(default=None, repr=False)

    def finished(self) -> bool:
        """Whether this sequence has ended."""
        return self.finish_reason is not None

    def append(self, delta: "CompletionOutput") -> None:
        """Add what came after."""
        if self.text_ends is not None and delta.text_ends is not None:
            self.text_ends = [*self.text_ends, *(len(self.text) + end for end in delta.text_ends)]
        self.text += delta.text
        self.token_ids = [*self.token_ids, *delta.token_ids]
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = delta.logprobs
            else:
                self.logprobs.extend(delta.logprobs)
        if delta.cumulative_logprob is not None:
            self.cumulative_logprob = delta.cumulative_logprob
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.weight_versions = delta.weight_versions

    def by_token(self) -> Iterator["CompletionOutput"]:
        """The same as one output a token, where it is known which text is whose (`text_ends`); the last one has the end."""
        if self.text_ends is None or len(self.token_ids) < 2:
            yield self
            return
        start, last = 0, len(self.token_ids) - 1
        for index, (token_id, end) in enumerate(zip(self.token_ids, self.text_ends, strict=True)):
            end = len(self.text) if index == last else end
            one = CompletionOutput(self.index, self.text[start:end], [token_id], self.cumulative_logprob)
            one.logprobs = None if self.logprobs is None else self.logprobs[index : index + 1]
            if index == last:
                one.finish_reason, one.stop_reason = self.finish_reason, self.stop_reason
                one.weight_versions = self.weight_versions
            start = end
            yield one


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic()`; 0 where not yet."""

    arrival_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    finished_time: float = 0.0
    num_generation_tokens: int = 0
    scheduled_time: float = 0.0


def _repr_without_none(self: Any) -> str:
    """`Name(field=value, …)` of the fields that say something."""
    pairs = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
    return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in pairs if value is not None)})"


@dataclasses.dataclass(slots=True, repr=False)
class RequestOutput:
    """The state of one generation request; `error` tells why where a finish reason is `error`.

    Attributes:
        prompt: its text; None where only token ids are known.
        num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
        kv_transfer_params: where its prompt's pages are, for another engine.
    """

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
    kv_transfer_params: dict[str, Any] | None = None

    __repr__ = _repr_without_none

    def add(self, next_output: "RequestOutput", aggregate: bool) -> None:
        """Merge a later output of the same request into this one.

        Args:
            aggregate: append texts and tokens (outputs are deltas); otherwise the later sequence replaces the earlier.
        """
        self.finished |= next_output.finished
        self.metrics = next_output.metrics or self.metrics
        self.error = next_output.error or self.error
        self.kv_transfer_params = next_output.kv_transfer_params or self.kv_transfer_params
        for later in next_output.outputs:
            position = next((i for i, known in enumerate(self.outputs) if known.index == later.index), None)
            if position is None:
                self.outputs.append(later)
            elif aggregate:
                self.outputs[position].append(later)
            else:
                self.outputs[position] = later


@dataclasses.dataclass(slots=True)
class PoolingOutput:
    """What the pooler gave: float32 [D], or [tokens, D] where every token has a vector or scores of its own."""

    data: npt.NDArray[np.float32]


def _vector(pooled: PoolingOutput, what: str) -> list[float]:
    if pooled.data.ndim != 1:
        raise ValueError(f"{what} is one vector, but the pooler gave an array of shape {list(pooled.data.shape)}")
    return pooled.data.tolist()


@dataclasses.dataclass(slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @classmethod
    def from_base(cls, pooled: PoolingOutput) -> Self:
        """The pooler's vector as an embedding."""
        return cls(_vector(pooled, "an embedding"))

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclasses.dataclass(slots=True)
class ClassificationOutput:
    """A probability for each class."""

    probs: list[float]

    @classmethod
    def from_base(cls, pooled: PoolingOutput) -> Self:
        """The pooler's vector as probabilities."""
        return cls(_vector(pooled, "a classification"))

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)


@dataclasses.dataclass(slots=True)
class ScoringOutput:
    """How well two texts match."""

    score: float

    @classmethod
    def from_base(cls, pooled: PoolingOutput) -> Self:
        """The pooler's only number as a score.

        Raises:
            ValueError: it gave several.
        """
        values = _vector(pooled, "a score")
        if len(values) != 1:
            raise ValueError(f"a score is one number, but the pooler gave {len(values)}")
        return cls(values[0])


PooledT = TypeVar("PooledT")


@dataclasses.dataclass(frozen=True)
class LateChunk:
    """Which of the prompt's tokens are in a chunk, and which characters of the text; none where all are special tokens."""

    token_range: tuple[int, int]
    char_range: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class LateChunkingMetadata:
    """How late chunking has divided a text: an entry of `chunks` for each vector."""

    chunk_size: int
    input_tokens: int
    chunks: list[LateChunk]
    strategy: str = "fixed_tokens"


@dataclasses.dataclass(slots=True)
class PoolingRequestOutput(Generic[PooledT]):
    """A finished pooling request.

    Attributes:
        num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
        error: why it failed, where it did; then `outputs` are empty.
        late_chunking: of late chunking, the tokens and characters of each vector.
    """

    request_id: str
    outputs: PooledT
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int = 0
    error: str | None = None
    late_chunking: LateChunkingMetadata | None = None


def _shared_fields(output: PoolingRequestOutput[Any]) -> dict[str, Any]:
    """What a request's output of another kind has in common with it."""
    return {field.name: getattr(output, field.name) for field in dataclasses.fields(output) if field.name != "outputs"}


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A finished pooling request whose output is an embedding; empty where it failed."""

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        """What the pooler gave, as an embedding. Raises ValueError: it is not one vector."""
        made = EmbeddingOutput([]) if output.error else EmbeddingOutput.from_base(output.outputs)
        return cls(outputs=made, **_shared_fields(output))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """A finished pooling request whose output are probabilities; none where it failed."""

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        """What the pooler gave, as probabilities. Raises ValueError: it is not one vector."""
        made = ClassificationOutput([]) if output.error else ClassificationOutput.from_base(output.outputs)
        return cls(outputs=made, **_shared_fields(output))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """A finished pooling request whose output is a score; 0 where it failed."""

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        """What the pooler gave, as a score. Raises ValueError: it is not one number."""
        made = ScoringOutput(0.0) if output.error else ScoringOutput.from_base(output.outputs)
        return cls(outputs=made, **_shared_fields(output))


AnyOutput = RequestOutput | PoolingRequestOutput[PoolingOutput]
"""What an engine gives back for a request of either kind."""
