"""Profiles on demand: files, bounds, what is refused; through the worker, the offline engine and the server."""

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.config.observability import ProfilerConfig, resolve_profiler
from quire.engine.arg_utils import AsyncEngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app
from quire.errors import ConfigError, RequestError

SMALL: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 2}
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def steps_in(path: str) -> list[str]:
    """Names of the steps that a trace holds, in order of time."""
    data = Path(path).read_bytes()
    trace = json.loads(gzip.decompress(data) if path.endswith(".gz") else data)
    events = [event for event in trace["traceEvents"] if str(event.get("name", "")).startswith("step ")]
    return [event["name"] for event in sorted(events, key=lambda event: event["ts"])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def llm(folder):
    config = {"torch_profiler_dir": str(folder), "torch_profiler_with_stack": False, "torch_profiler_use_gzip": False}
    with LLM(profiler_config=config, **SMALL) as made:
        yield made


def test_a_profile_holds_the_steps_between_start_and_stop(llm):
    llm.generate("before", PARAMS)
    llm.start_profile("mine")
    llm.generate("one two three", PARAMS)
    (path,) = llm.stop_profile()
    llm.generate("after", PARAMS)
    assert Path(path).name.startswith("mine-rank0-") and path.endswith(".pt.trace.json")
    steps = steps_in(path)
    assert len(steps) == 6 and steps[1].endswith(": 1 tokens, 1 requests")


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"profile_prefix": "../up"}, "profile_prefix"),
        ({"delay_iterations": -1}, "profiler_kwargs"),
        ({"profiler_kwargs": {"speed": 1}}, "profiler_kwargs"),
        ({"profiler_kwargs": {"torch_profiler_dir": "/"}}, "profiler_kwargs"),
    ],
)
def test_what_a_profile_cannot_be_told_is_refused_and_none_is_taken(llm, arguments, param):
    with pytest.raises(RequestError) as error:
        llm.start_profile(**arguments)
    assert error.value.param == param
    with pytest.raises(RequestError, match="no profile is being taken"):
        llm.stop_profile()


def test_a_second_start_and_a_stop_without_a_start_are_refused(llm):
    llm.start_profile()
    with pytest.raises(RequestError, match="already"):
        llm.start_profile()
    llm.stop_profile()
    with pytest.raises(RequestError, match="no profile is being taken"):
        llm.stop_profile()


def test_steps_may_be_skipped_and_bounded(llm):
    llm.start_profile(profile_prefix="few", delay_iterations=2, profiler_kwargs={"max_iterations": 3})
    llm.generate("one two three", PARAMS)
    (path,) = llm.stop_profile()
    assert len(steps_in(path)) == 3


def test_without_a_configuration_there_are_no_profiles():
    with LLM(**SMALL) as llm, pytest.raises(RequestError, match="profiler_config"):
        llm.start_profile()


@pytest.mark.anyio
async def test_the_server_starts_and_stops_profiles(folder):
    config = {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_with_stack": False}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(profiler_config=config, **SMALL))
    transport = httpx.ASGITransport(build_app(ServerState(ServerSettings(), engine)))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            bad = await client.post("/start_profile", json={"profile_prefix": "../up"})
            assert bad.status_code == 400 and "profile_prefix" in bad.text
            assert (await client.post("/stop_profile")).status_code == 400
            assert (await client.post("/start_profile", json={"profile_prefix": "http"})).status_code == 200
            assert (await client.post("/start_profile")).status_code == 400
            body = {"prompt": "one two", "max_tokens": 4, "ignore_eos": True}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            answer = (await client.post("/stop_profile")).json()
        assert len(steps_in(answer["files"][0])) == 4 and answer["files"][0].endswith(".gz")
    finally:
        engine.shutdown()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_settings_are_read_under_both_spellings_and_checked():
    given = {"profiler": "torch", "torch_profiler_dir": "d", "torch_profiler_record_shapes": True, "max_iterations": 4}
    expected = ProfilerConfig(dir="d", record_shapes=True, max_iterations=4)
    assert (
        resolve_profiler(given)
        == resolve_profiler({"dir": "d", "record_shapes": True, "max_iterations": 4})
        == expected
    )
    assert resolve_profiler({"profiler": "cuda", "ignore_frontend": True}) == ProfilerConfig(profiler="device")
    assert resolve_profiler(None) is None is resolve_profiler({})
    for wrong, words in (
        ({"torch_profiler_dirs": "d"}, "did you mean 'torch_profiler_dir'"),
        ({"dir": "d", "max_iterations": -1}, "max_iterations"),
        ({"dir": "d", "with_stack": 1}, "with_stack"),
        ({"profiler": "torch"}, "torch_profiler_dir"),
        ({"profiler": "nsys", "dir": "d"}, "must be one of torch, device"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolve_profiler(wrong)
