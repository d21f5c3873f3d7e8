"""Sampling parameters: every rule of what is allowed, and what is made of it."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import limits
from quire.errors import RequestError
from quire.pooling_params import PoolingParams
from quire.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)

NOT_NUMBERS = ["hot", None, [1], {}, True, b"1", float("nan"), float("inf"), -float("inf"), complex(1, 1), 10**400]
NOT_WHOLE = ["1", 1.5, 1.0, None, [1], True, float("nan"), float("inf")]
OUT_OF_RANGE = {
    "n": [0, -1, limits.MAX_N + 1, 10**30],
    "presence_penalty": [-2.01, 2.01, 1e300],
    "frequency_penalty": [-2.01, 2.01],
    "repetition_penalty": [0, 0.0, -1.0],
    "temperature": [-0.1, 2.1, -1],
    "top_p": [0, 0.0, -0.5, 1.01],
    "top_k": [-2, -100, 10**30],
    "min_p": [-0.1, 1.1],
    "seed": [1 << 63, -(1 << 63) - 1],
    "max_tokens": [0, -1, 1 << 40],
    "min_tokens": [-1, 17, 1 << 40],
    "logprobs": [-2, 1 << 40],
    "prompt_logprobs": [-2, 1 << 40],
    "truncate_prompt_tokens": [0, -2],
}
FLOATS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
WHOLE = ("n", "top_k", "min_tokens")
OPTIONAL_WHOLE = ("seed", "max_tokens", "truncate_prompt_tokens")
LOGPROBS = ("logprobs", "prompt_logprobs")
FLAGS = (
    "ignore_eos",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def refused(name: str, value: object) -> RequestError:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert error.value.param == name
    assert error.value.status == 400
    assert str(error.value).startswith(name)
    return error.value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in FLOATS for value in NOT_NUMBERS])
def test_what_is_no_finite_number_is_refused_by_name(name: str, value: object) -> None:
    assert "number" in str(refused(name, value))


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WHOLE for value in NOT_WHOLE])
def test_what_is_no_whole_number_is_refused_by_name(name: str, value: object) -> None:
    assert "number" in str(refused(name, value)) or "0 or -1" in str(refused(name, value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (n, v)
        for n in (*OPTIONAL_WHOLE, *LOGPROBS)
        for v in NOT_WHOLE
        if v is not None and not (n in LOGPROBS and v is True)
    ],
)
def test_optional_whole_numbers_are_checked_too(name: str, value: object) -> None:
    refused(name, value)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in OUT_OF_RANGE.items() for value in values]
)
def test_what_is_out_of_range_is_refused_with_the_range(name: str, value: object) -> None:
    assert "must be" in str(refused(name, value))


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [1, 0, "true", None, 1.0])
def test_a_flag_is_true_or_false(name: str, value: object) -> None:
    assert "true or false" in str(refused(name, value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5),
        ("stop", [5]),
        ("stop", [""]),
        ("stop", ""),
        ("stop", ["x" * (limits.MAX_STOP_STRING_CHARS + 1)]),
        ("stop", ["x"] * (limits.MAX_STOP_STRINGS + 1)),
        ("stop_token_ids", 5),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1] * (limits.MAX_STOP_TOKEN_IDS + 1)),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("bad_words", ["x"] * (limits.MAX_BAD_WORDS + 1)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", ["1"]),
        ("logit_bias", [1]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: "x"}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", dict.fromkeys(range(limits.MAX_LOGIT_BIAS + 1), 1.0)),
        ("logits_processors", [1]),
        ("logits_processors", print),
        ("extra_args", [1]),
        ("extra_args", {1: 2}),
        ("extra_args", {str(i): i for i in range(limits.MAX_EXTRA_ARGS + 1)}),
        ("output_kind", 7),
        ("output_kind", "DELTA"),
        ("structured_outputs", {"regex": "a"}),
        ("skip_reading_prefix_cache", 1),
    ],
)
def test_lists_and_records_are_checked_entry_by_entry(name: str, value: object) -> None:
    refused(name, value)


def test_the_value_that_is_shown_is_never_long() -> None:
    assert len(str(refused("temperature", "x" * 10_000_000))) < 300


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        (SamplingParams, "temprature", "did you mean 'temperature'?"),
        (SamplingParams, "max_token", "did you mean 'max_tokens'?"),
        (SamplingParams, "guided_json", "use structured_outputs=StructuredOutputsParams"),
        (SamplingParams, "best_of", "use n"),
        (StructuredOutputsParams, "choices", "did you mean 'choice'?"),
        (PoolingParams, "dimension", "did you mean 'dimensions'?"),
    ],
)
def test_an_unknown_name_is_a_type_error_that_says_what_was_meant(kind: Any, name: str, hint: str) -> None:
    with pytest.raises(TypeError) as error:
        kind(**{name: 1})
    assert str(error.value).startswith(f"{kind.__name__} has no parameter '{name}'; {hint}")


def test_an_unknown_name_that_resembles_none_gets_no_hint() -> None:
    with pytest.raises(TypeError, match=r"has no parameter 'zzz'$"):
        SamplingParams(zzz=1)  # type: ignore[call-arg]


def test_a_missing_parameter_is_told_as_python_does() -> None:
    with pytest.raises(TypeError, match="Missing required argument 'max_tokens'"):
        BeamSearchParams(beam_width=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_true_asks_for_one_logprob_and_false_for_none(name: str) -> None:
    for asked, meant in ((True, 1), (False, None)):
        params = SamplingParams(**{name: asked})  # type: ignore[arg-type]
        assert getattr(params, name) == meant


@pytest.mark.parametrize("number", [-(1 << 63) - 1, 1 << 64])
def test_numbers_that_no_message_can_hold_are_refused_wherever_they_are(number: int) -> None:
    refused("extra_args", {"a": [{"b": (1, number)}]})


def test_other_objects_of_extra_args_stay_what_they_are() -> None:
    shared: list[Any] = [object(), 1 << 63, True, None]
    shared.append(shared)  # also what holds itself
    params = SamplingParams(extra_args={"a": shared, "b": shared})
    assert params.extra_args is not None and params.extra_args["a"] is params.extra_args["b"] is shared


def test_an_error_tells_the_parameter_and_the_value() -> None:
    error = refused("top_p", 2.5)
    assert (error.parameter, error.value) == ("top_p", 2.5)


def test_defaults_are_those_that_users_know() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.detokenize, params.skip_special_tokens, params.ignore_eos) == (True, True, False)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert repr(params) == "SamplingParams()"


def test_greedy_sampling_forgets_what_would_not_matter() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.2)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)
    assert params.sampling_type is SamplingType.GREEDY
    assert SamplingParams(temperature=9e-6).sampling_type is SamplingType.GREEDY


def test_greedy_sampling_of_several_sequences_is_refused() -> None:
    with pytest.raises(RequestError, match=r"n=2 .*greedy"):
        SamplingParams(temperature=0, n=2)


def test_tiny_temperatures_are_raised() -> None:
    assert SamplingParams(temperature=1e-5).temperature == 0.01
    assert SamplingParams(temperature=0.01).temperature == 0.01
    assert SamplingParams(temperature=0.011).temperature == 0.011


def test_equivalent_spellings_become_one() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(top_k=1 << 40).top_k == (1 << 31) - 1
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop="a").stop == ["a"]
    assert SamplingParams(stop=("a", "b")).stop == ["a", "b"]  # type: ignore[arg-type]
    assert SamplingParams(output_kind=1).output_kind is RequestOutputKind.DELTA  # type: ignore[arg-type]
    assert type(SamplingParams(temperature=1).temperature) is float


def test_numpy_numbers_become_pythons() -> None:
    params = SamplingParams(n=np.int64(2), temperature=np.float32(0.5), stop_token_ids=[np.int32(3)])  # type: ignore[list-item]
    assert (params.n, params.temperature, params.stop_token_ids) == (2, 0.5, [3])
    assert type(params.n) is int and type(params.temperature) is float
    msgspec.msgpack.encode(params)


def test_biases_are_clamped() -> None:
    assert SamplingParams(logit_bias={1: 1000, 2: -1000.0, 3: 5}).logit_bias == {1: 100.0, 2: -100.0, 3: 5.0}


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize=True"):
        SamplingParams(stop=["a"], detokenize=False)


def test_lists_are_the_requests_own() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("b")
    assert params.stop == ["a"]


def test_from_optional_takes_none_for_the_default_and_text_for_token_ids() -> None:
    params = SamplingParams.from_optional(temperature=None, n=None, max_tokens=None, logit_bias={"5": 2})
    assert (params.temperature, params.n, params.max_tokens, params.logit_bias) == (1.0, 1, None, {5: 2.0})
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams.from_optional(logit_bias={"five": 2})


def test_a_clone_shares_nothing_but_functions() -> None:
    def keep(ids: list[int], logits: object) -> object:
        return logits

    params = SamplingParams(stop=["a"], logit_bias={1: 1.0}, extra_args={"a": [1]}, logits_processors=[keep])
    copied = params.clone()
    assert copied == params
    assert copied.stop is not None and copied.logit_bias is not None and copied.extra_args is not None
    copied.stop.append("b")  # type: ignore[union-attr]
    copied.logit_bias[2] = 1.0
    copied.extra_args["a"].append(2)
    assert (params.stop, params.logit_bias, params.extra_args) == (["a"], {1: 1.0}, {"a": [1]})
    assert copied.logits_processors == [keep]


def test_eos_ids_of_the_generation_config_are_added_once() -> None:
    params = SamplingParams()
    params.update_from_generation_config({"eos_token_id": [3, 2]}, 2)
    params.update_from_generation_config({"eos_token_id": 3})
    params.update_from_generation_config({})
    assert params.eos_token_ids == [2, 3]


def test_assigned_values_can_be_checked_later() -> None:
    params = SamplingParams()
    params.temperature = "hot"  # type: ignore[assignment]
    with pytest.raises(RequestError, match="temperature='hot'"):
        params.validate()


def test_sampling_types() -> None:
    assert SamplingParams().sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=1).sampling_type is SamplingType.RANDOM_SEED


@given(
    temperature=st.floats(0, 2),
    top_p=st.floats(1e-6, 1),
    top_k=st.integers(-1, 1000),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    stop=st.none() | st.lists(st.text(min_size=1, max_size=5), max_size=4),
    max_tokens=st.none() | st.integers(16, 1000),
    bias=st.none() | st.dictionaries(st.integers(0, 1000), st.floats(-200, 200), max_size=5),
)
def test_whatever_is_accepted_survives_the_wire_unchanged(
    temperature: float, top_p: float, top_k: int, min_p: float, seed, stop, max_tokens, bias
) -> None:
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop, max_tokens=max_tokens,
        logit_bias=bias,
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    before = msgspec.structs.asdict(params)
    params.validate()
    assert msgspec.structs.asdict(params) == before


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()), st.binary()))
def test_no_value_of_any_parameter_gives_anything_but_parameters_or_a_request_error(value: object) -> None:
    for name in SamplingParams.__struct_fields__:
        if name in ("eos_token_ids", "bad_words_token_ids"):
            continue
        try:
            params = SamplingParams(**{name: value})  # type: ignore[arg-type]
        except RequestError as error:
            assert name in str(error)
        else:
            assert math.isfinite(params.temperature) and params.n >= 1


# --- structured outputs ---


def test_exactly_one_constraint_is_allowed() -> None:
    with pytest.raises(RequestError, match=r"exactly one of json, regex.*none is given"):
        StructuredOutputsParams()
    with pytest.raises(RequestError, match=r"exactly one.*regex, choice are given"):
        StructuredOutputsParams(regex="a", choice=["a"])
    assert StructuredOutputsParams(regex="a+").constraint() == ("regex", "a+")


@pytest.mark.parametrize(
    "values",
    [
        {"json": "{"},
        {"json": 5},
        {"json": "[]"},
        {"json": "[" * 100_000},
        {"regex": ""},
        {"regex": "a" * (limits.MAX_REGEX_CHARS + 1)},
        {"choice": []},
        {"choice": "ab"},
        {"choice": [1]},
        {"grammar": ""},
        {"json_object": False},
        {"structural_tag": 5},
        {"regex": "a", "disable_any_whitespace": 1},
    ],
)
def test_a_constraint_that_cannot_be_meant_is_refused(values: dict) -> None:
    with pytest.raises(RequestError):
        StructuredOutputsParams(**values)


def test_a_schema_may_be_nested_up_to_a_limit() -> None:
    schema: dict = {}
    for _ in range(limits.MAX_JSON_DEPTH):
        schema = {"a": schema}
    StructuredOutputsParams(json=schema)
    with pytest.raises(RequestError, match="nested deeper"):
        StructuredOutputsParams(json={"a": schema})


# --- beam search ---


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"beam_width": 0, "max_tokens": 1}, "beam_width"),
        ({"beam_width": limits.MAX_BEAM_WIDTH + 1, "max_tokens": 1}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "max_tokens": 1, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "max_tokens": 1, "temperature": -1}, "temperature"),
        ({"beam_width": 2, "max_tokens": 1, "ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_beam_search_parameters_are_checked(values: dict, param: str) -> None:
    with pytest.raises(RequestError) as error:
        BeamSearchParams(**values)
    assert error.value.param == param
