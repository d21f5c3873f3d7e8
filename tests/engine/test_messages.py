"""Messages between frontend and core survive the way, and nothing else gets through."""

import dataclasses
from array import array

import msgspec
import numpy as np
import pytest
from tests.engine.builders import make_config
from tests.oracles.hash_model import HashExecutor

from quire.codec import encode
from quire.config.wire import config_from_plain, config_to_plain
from quire.engine import messages
from quire.errors import CapacityError, ConfigError, EngineError, QuireError, RequestError
from quire.request import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineRequest,
    FinishReason,
    Refusal,
    SchedulerStats,
    TokenLogprobs,
    token_array,
)
from quire.sampling_params import SamplingParams, StructuredOutputsParams

PARAMS = SamplingParams(
    n=2, seed=3, stop=["a"], logit_bias={5: 1.5}, bad_words=["x"], bad_words_token_ids=[[1, 2]], extra_args={"k": [1]}
)
REQUEST = EngineRequest("r", [1, 2, 3], PARAMS, seed=2**63 - 1, cache_salt="s", group_id="g")
OUTPUT = EngineCoreOutput(
    "r",
    [4],
    FinishReason.STOP,
    "end",
    num_cached_tokens=0,
    logprobs=TokenLogprobs([[4, 5]], [[-0.5, -1.0]], [1]),
)


@pytest.mark.parametrize(
    "message",
    [
        messages.Start({"a": 1}, "m:C"),
        messages.AddRequests([REQUEST]),
        messages.AbortRequests(["r", "s"]),
        messages.UtilityCall(7, "sleep", [1]),
        messages.Shutdown(),
    ],
)
def test_messages_to_the_core_survive(message):
    assert messages.decoder_at_core()(encode(message)) == message


ODD = (True, False, 0, 1, -1, 1.5, "1", "{}", b"1", [], [1], ["a"], [[1]], (1,), {}, {"a": 1}, {1: 1}, {"1": [True]})


@pytest.mark.parametrize("kind", [SamplingParams, StructuredOutputsParams])
def test_parameters_that_are_accepted_survive(kind):
    """One that did not would end each core that it is sent to."""
    accepted = 0
    for name in {*kind.__struct_fields__} - {"thinking", "eos_token_ids", "bad_words_token_ids"}:  # never a user's
        for value in ODD:
            try:
                params = kind(**{name: value})
            except RequestError:
                continue
            accepted += 1
            given = params if kind is SamplingParams else SamplingParams(structured_outputs=params)
            message = messages.AddRequests([EngineRequest("r", [1], given)])
            assert messages.decoder_at_core()(encode(message)) == message, (name, value)
    assert accepted > 9


@pytest.mark.parametrize(
    "message",
    [
        messages.Ready(3, 16, 4096),
        messages.Outputs(EngineCoreOutputs(["a"], [5], [OUTPUT], SchedulerStats(num_running=1))),
        messages.UtilityResult(7, {"a": [1.5]}),
        messages.UtilityResult(7, error="no"),
        messages.UtilityResult(7, error="no", refusal=Refusal(param="level")),
        messages.Dead("why", True, "dtype"),
    ],
)
def test_messages_from_the_core_survive(message):
    assert messages.decoder_at_frontend()(encode(message)) == message


def test_numpy_values_become_plain_ones():
    message = messages.UtilityResult(1, {"a": np.arange(3), "b": np.float32(0.5)})
    assert messages.decoder_at_frontend()(encode(message)).value == {"a": [0, 1, 2], "b": 0.5}


def test_a_function_cannot_travel():
    params = SamplingParams(logits_processors=[lambda ids, logits: logits])
    for message in (
        messages.AddRequests([EngineRequest("r", [1], params)]),
        messages.UtilityCall(1, "collective_rpc", [print, None, [], None]),
    ):
        with pytest.raises(TypeError, match=r"function.* cannot be sent to another process"):
            encode(message)


@pytest.mark.parametrize(
    "error",
    [RequestError("bad", param="level"), CapacityError("full", retry_after=2.0), EngineError("broken")],
)
def test_an_error_of_a_call_is_of_the_same_kind_on_the_other_side(error):
    result = messages.UtilityResult(1, error=str(error), refusal=messages.refusal_of(error))
    with pytest.raises(QuireError) as caught:
        messages.decoder_at_frontend()(encode(result)).get()
    again = caught.value
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04K\x01.", b"\xff\xff", msgspec.msgpack.encode(["nonsense", 1]), b"\x93\xa3add\x01"]
)
def test_anything_else_is_an_error(data):
    for decode in (messages.decoder_at_core(), messages.decoder_at_frontend()):
        with pytest.raises(msgspec.MsgspecError):
            decode(data)


def test_a_configuration_survives_as_plain_data():
    config = make_config(eos_token_ids=(1, 2), async_scheduling=True)
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(config_to_plain(config)))
    again = config_from_plain(plain)
    assert again.model.hf_config.to_dict() == config.model.hf_config.to_dict()
    same = dataclasses.replace(again.model, hf_config=config.model.hf_config)
    assert dataclasses.replace(again, model=same) == config


def test_a_class_travels_as_its_path():
    plain = config_to_plain(make_config(executor=HashExecutor))
    assert plain["parallel"]["distributed_executor_backend"] == "tests.oracles.hash_model:HashExecutor"


def test_what_cannot_leave_the_process_is_a_config_error_with_its_name():
    class Local(HashExecutor):
        pass

    with pytest.raises(ConfigError) as caught:
        config_to_plain(make_config(executor=Local))
    assert caught.value.setting == "distributed_executor_backend"


def test_a_prompt_s_token_ids_travel_as_their_bytes():
    decode = messages.decoder_at_core()
    prompt = [100_000 + number for number in range(1000)]
    data = encode(messages.AddRequests([EngineRequest("r", prompt)]))
    assert len(data) < 4 * len(prompt) + 100
    got = decode(data)
    assert isinstance(got, messages.AddRequests) and got.requests[0].prompt_token_ids.tolist() == prompt
    with pytest.raises(msgspec.ValidationError):
        decode(data.replace(b"\xc8\x0f\xa0", b"\xc8\x0f\x9f"))  # bytes that are no whole number of tokens


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3000])
def test_token_ids_become_an_array_at_any_length(count):
    ids = [(7919 * place) % (1 << 31) - (place % 3) for place in range(count)]
    assert token_array(ids) == token_array(tuple(ids)) == array("i", ids)
    assert token_array(array("i", ids)) == array("i", ids)


@pytest.mark.parametrize(("bad", "error"), [(2.0, TypeError), ("x", TypeError), (1 << 31, OverflowError)])
@pytest.mark.parametrize("place", [0, 1023, 1500, 2100])
def test_what_is_no_token_id_is_no_array_wherever_it_stands(bad, error, place):
    ids: list = [5] * 2200
    ids[place] = bad
    with pytest.raises(error):
        token_array(ids)
