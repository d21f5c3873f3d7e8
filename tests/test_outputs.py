"""What users get back: merging deltas, flat logprobs, reprs, pooled results."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.logprobs import FlatLogprobs, Logprob
from quire.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import PoolingParams

POSITIONS = st.lists(
    st.dictionaries(
        st.integers(0, 1000),
        st.builds(Logprob, st.floats(-100, 0), st.none() | st.integers(1, 9), st.none() | st.text(max_size=3)),
        max_size=4,
    ),
    max_size=8,
)


@given(POSITIONS)
def test_flat_logprobs_read_like_the_list_of_dicts_that_they_hold(positions: list[dict[int, Logprob]]) -> None:
    flat = FlatLogprobs()
    flat.extend(positions)
    assert flat == positions and list(flat) == positions and len(flat) == len(positions)
    assert flat[1:] == positions[1:] and flat[::-1] == positions[::-1]
    assert repr(positions) in repr(flat)
    for index in range(-len(positions), len(positions)):
        assert flat[index] == positions[index]
    with pytest.raises(IndexError):
        flat[len(positions)]


@given(POSITIONS)
def test_columns_and_dicts_give_the_same(positions: list[dict[int, Logprob]]) -> None:
    flat, fast = FlatLogprobs(), FlatLogprobs()
    for position in positions:
        flat.append(position)
        values = list(position.values())
        fast.append_fast(
            list(position), [v.logprob for v in values], [v.rank for v in values], [v.decoded_token for v in values]
        )
    assert flat == fast and (flat == [*positions, {}]) is False


def test_the_first_prompt_position_is_an_empty_one() -> None:
    flat = FlatLogprobs()
    flat.append(None)
    assert flat[0] == {} and flat == [None]


def output(text: str, tokens: list[int], index: int = 0, reason: str | None = None) -> RequestOutput:
    completion = CompletionOutput(index=index, text=text, token_ids=tokens, finish_reason=reason)
    return RequestOutput("r", "p", [1], None, [completion], finished=reason is not None)


def test_deltas_merge_into_the_whole() -> None:
    whole = output("a", [1])
    whole.outputs[0].logprobs = [{1: Logprob(-1.0)}]
    later = output("b", [2, 3], reason="stop")
    later.outputs[0].logprobs = [{2: Logprob(-1.0)}, {3: Logprob(-2.0)}]
    whole.add(later, aggregate=True)
    whole.add(output("x", [9], index=1), aggregate=True)
    first, second = whole.outputs
    assert (first.text, first.token_ids, first.finish_reason) == ("ab", [1, 2, 3], "stop")
    assert first.logprobs is not None and len(first.logprobs) == 3
    assert second.text == "x" and whole.finished


def test_cumulative_outputs_replace_one_another() -> None:
    whole = output("a", [1])
    whole.add(output("ab", [1, 2]), aggregate=False)
    assert whole.outputs[0].token_ids == [1, 2] and not whole.finished


def test_a_repr_says_what_there_is_and_leaves_out_what_is_not() -> None:
    text = repr(output("hi", [1]))
    assert text.startswith("RequestOutput(request_id='r', prompt='p', prompt_token_ids=[1], outputs=[CompletionOutput(")
    assert "finished=False" in text and "metrics" not in text


def test_pooled_vectors_become_what_was_asked_for() -> None:
    assert EmbeddingOutput.from_base(PoolingOutput(np.array([1.0, 2.0], np.float32))).hidden_size == 2
    assert ClassificationOutput.from_base(PoolingOutput(np.array([0.1, 0.9], np.float32))).num_classes == 2
    assert ScoringOutput.from_base(PoolingOutput(np.array([0.5], np.float32))).score == 0.5
    with pytest.raises(ValueError, match="gave 2"):
        ScoringOutput.from_base(PoolingOutput(np.array([0.5, 0.5], np.float32)))
    with pytest.raises(ValueError, match=r"an embedding is one vector, but the pooler gave an array of shape \[1, 2\]"):
        EmbeddingOutput.from_base(PoolingOutput(np.array([[0.5, 0.5]], np.float32)))


@pytest.mark.parametrize(
    ("values", "param"),
    [({"task": "sing"}, "task"), ({"dimensions": 0}, "dimensions"), ({"use_activation": "yes"}, "use_activation")],
)
def test_pooling_parameters_are_checked(values: dict, param: str) -> None:
    with pytest.raises(RequestError) as error:
        PoolingParams(**values)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("kind", "data", "made", "empty"),
    [
        (EmbeddingRequestOutput, [1.0, 2.0], EmbeddingOutput([1.0, 2.0]), EmbeddingOutput([])),
        (ClassificationRequestOutput, [0.25, 0.75], ClassificationOutput([0.25, 0.75]), ClassificationOutput([])),
        (ScoringRequestOutput, [0.5], ScoringOutput(0.5), ScoringOutput(0.0)),
    ],
)
def test_what_the_pooler_gave_becomes_an_output_of_each_kind(kind: Any, data: Any, made: Any, empty: Any) -> None:
    base = PoolingRequestOutput("r", PoolingOutput(np.array(data, np.float32)), [1, 2], True, num_cached_tokens=1)
    output = kind.from_base(base)
    assert isinstance(output, kind) and isinstance(output, PoolingRequestOutput)
    assert (output.outputs, output.request_id, output.prompt_token_ids, output.finished) == (made, "r", [1, 2], True)
    assert output.num_cached_tokens == 1 and output.error is None
    failed = kind.from_base(PoolingRequestOutput("r", PoolingOutput(np.zeros(0, np.float32)), [1], True, error="no"))
    assert (failed.outputs, failed.error) == (empty, "no")
