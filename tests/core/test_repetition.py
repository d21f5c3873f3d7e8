"""An output ends with the token that completes one repetition too many, and with no other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.builders import make_config
from tests.oracles.hash_model import HashModel

from quire.core.repetition import RepetitionWatch
from quire.engine.llm_engine import LLMEngine
from quire.errors import RequestError
from quire.outputs import RequestOutput
from quire.request import EngineRequest
from quire.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams

TWO_TOKENS = HashModel(vocab_size=3)
"""Its streams are of zeros and ones, which repeat themselves soon."""


def repeats(output: list[int], params: RepetitionDetectionParams) -> bool:
    """Whether it ends with a pattern so many times in a row."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        if (
            len(output) >= size * params.min_count
            and output[-size:] * params.min_count == output[-size * params.min_count :]
        ):
            return True
    return False


@given(
    output=st.lists(st.integers(0, 2), max_size=60),
    sizes=st.tuples(st.integers(1, 7), st.integers(0, 7)).map(sorted),
    count=st.integers(2, 5),
    already=st.integers(0, 20),
)
def test_every_token_is_told_as_a_look_at_the_whole_output_would(
    output: list[int], sizes: list[int], count: int, already: int
) -> None:
    params = RepetitionDetectionParams(max(sizes[1], 1), sizes[0], count)
    watch = RepetitionWatch(params, output[:already])
    for end in range(already + 1, len(output) + 1):
        assert watch.add(output[end - 1]) == repeats(output[:end], params)


@pytest.mark.parametrize("kind", ["inproc", "inproc-async", "process-async"])
@pytest.mark.parametrize("min_tokens", [0, 20])
def test_a_request_ends_with_its_repetition(kind: str, min_tokens: int) -> None:
    config = make_config(
        vocab_size=3, max_num_seqs=4, async_scheduling=kind.endswith("async"), num_blocks=48, max_model_len=100
    )
    engine = LLMEngine.from_engine_config(config, enable_multiprocessing=kind.startswith("process"))
    watched = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=4)
    try:
        for number in range(12):
            params = SamplingParams(
                max_tokens=80, seed=number, ignore_eos=True, min_tokens=min_tokens, detokenize=False,
                repetition_detection=watched if number % 3 else None, output_kind=RequestOutputKind.DELTA,
                logprobs=0 if number % 2 else None,
            )  # fmt: skip
            engine.add_request(str(number), [number % 2, 1], params)
        got: dict[str, list[int]] = {}
        reasons: dict[str, tuple[str | None, int | str | None]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert isinstance(output, RequestOutput)
                (choice,) = output.outputs
                got[output.request_id] = got.get(output.request_id, []) + list(choice.token_ids)
                reasons[output.request_id] = choice.finish_reason, choice.stop_reason
    finally:
        engine.shutdown()
    assert len(got) == 12
    for number in range(12):
        stream = TWO_TOKENS.oracle([number % 2, 1], SamplingParams(max_tokens=80, ignore_eos=True), number, 80)
        ends = (n for n in range(max(1, min_tokens), 81) if number % 3 and repeats(stream[:n], watched))
        end = next(ends, None)
        assert got[str(number)] == stream[:end]
        assert reasons[str(number)] == (("length", None) if end is None else ("repetition", "repetition_detected"))


def test_a_request_that_is_taken_up_again_remembers() -> None:
    from quire.core.request_state import Request

    params = SamplingParams(repetition_detection={"max_pattern_size": 1, "min_count": 4})  # pyright: ignore
    request = Request(EngineRequest("a", [1], params, resumed_token_ids=[5, 5, 5]), 0, 100)
    assert not request.repeats([6], 5)
    request = Request(EngineRequest("a", [1], params, resumed_token_ids=[5, 5, 5]), 0, 100)
    assert request.repeats([5], 5)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 2, "min_count": 1.5}, "min_count"),
        ({"pattern": 2}, "repetition_detection"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, int], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(repetition_detection=fields)  # pyright: ignore
    assert refused.value.param == field


def test_without_a_pattern_nothing_is_looked_for() -> None:
    from quire.core.request_state import Request

    params = SamplingParams(repetition_detection=RepetitionDetectionParams())
    assert Request(EngineRequest("a", [1], params), 0, 100).repetition is None
