"""Requests through the whole synchronous engine over the hash model, with the core in this process and in another."""

import os
import select
import subprocess
import sys

import pytest
from tests.engine.builders import make_config
from tests.oracles.hash_model import Faults, HashExecutor, HashModel

from quire.engine.llm_engine import LLMEngine
from quire.engine.messages import AddRequests
from quire.errors import ConfigError, EngineDeadError, RequestError
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.tokenizers.detokenizer import detokenize

MODEL = HashModel(vocab_size=512)


def sampling(**fields):
    """Parameters whose streams end at `max_tokens` alone."""
    return SamplingParams(ignore_eos=True, **fields)


def oracle(prompt, params, seed):
    return MODEL.oracle(prompt, params, seed, 10_000)


@pytest.fixture(scope="module", params=["inproc", "inproc-async", "process", "process-async"])
def engine(request, model_folder):
    config = make_config(model_folder, async_scheduling=request.param.endswith("async"))
    engine = LLMEngine.from_engine_config(config, enable_multiprocessing=request.param.startswith("process"))
    yield engine
    engine.shutdown()


def run(engine):
    """Every output until all requests have ended."""
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_every_stream_is_the_oracle_s(engine):
    prompts = {f"r{i}": [(7 * i + j) % 500 for j in range(3 + 5 * i)] for i in range(12)}
    for index, (request_id, prompt) in enumerate(prompts.items()):
        params = sampling(max_tokens=5 + index, seed=index, output_kind=RequestOutputKind.FINAL_ONLY)
        engine.add_request(request_id, prompt, params)
    outputs = {output.request_id: output for output in run(engine)}
    assert len(outputs) == 12
    for index, (request_id, prompt) in enumerate(prompts.items()):
        completion = outputs[request_id].outputs[0]
        params = sampling(max_tokens=5 + index)
        assert completion.token_ids == oracle(prompt, params, index)
        assert completion.text == detokenize(engine.get_tokenizer(), prompt, completion.token_ids)
        assert completion.finish_reason == "length"


def test_deltas_join_to_the_final_output(engine):
    params = sampling(max_tokens=20, seed=1)
    for kind in RequestOutputKind:
        engine.add_request(kind.name, "hello world", sampling(max_tokens=20, seed=1, output_kind=kind))
    outputs = run(engine)
    ids = engine.get_tokenizer().encode("hello world")
    expected = oracle(ids, params, 1)
    deltas = [output.outputs[0] for output in outputs if output.request_id == "DELTA"]
    assert [token for delta in deltas for token in delta.token_ids] == expected
    final = next(output.outputs[0] for output in outputs if output.request_id == "FINAL_ONLY")
    assert "".join(delta.text for delta in deltas) == final.text
    assert len([output for output in outputs if output.request_id == "CUMULATIVE"]) == 20


def test_an_abort_mid_way_ends_one_request_and_leaves_the_others_alone(engine):
    for request_id in ("a", "b"):
        engine.add_request(request_id, [5, 6, 7], sampling(max_tokens=30, seed=3))
    for _ in range(4):
        engine.step()
    engine.abort_request("a")
    outputs = run(engine)
    last = {output.request_id: output for output in outputs}
    assert last["a"].outputs[0].finish_reason == "abort"
    assert (
        last["a"].outputs[0].token_ids
        == oracle([5, 6, 7], sampling(max_tokens=30), 3)[: len(last["a"].outputs[0].token_ids)]
    )
    assert last["b"].outputs[0].token_ids == oracle([5, 6, 7], sampling(max_tokens=30), 3)
    assert not engine.has_unfinished_requests()


def test_siblings_have_streams_of_their_own_that_the_seed_fixes(engine):
    params = sampling(n=3, max_tokens=8, seed=11, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("first", [5, 6, 7], params)
    engine.add_request("again", [5, 6, 7], params)
    first, again = run(engine)
    assert len({tuple(completion.token_ids) for completion in first.outputs}) == 3
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in again.outputs]
    assert first.outputs[0].token_ids == oracle([5, 6, 7], params, 11)


def test_logprobs_come_through(engine):
    engine.add_request("r", [5, 6, 7], sampling(max_tokens=4, seed=3, logprobs=2, prompt_logprobs=1))
    final = run(engine)[-1]
    completion = final.outputs[0]
    assert [next(iter(position)) for position in completion.logprobs] == completion.token_ids
    assert all(len(position) == 2 for position in completion.logprobs)
    assert final.prompt_logprobs[0] is None
    assert [next(iter(position)) for position in final.prompt_logprobs[1:]] == [6, 7]


def test_a_stop_string_ends_the_request_in_the_core_too(engine):
    params = sampling(max_tokens=60, seed=3)
    tokenizer = engine.get_tokenizer()
    ids = oracle([5, 6, 7], params, 3)
    stop = tokenizer.decode(ids[10:13], True)
    engine.add_request("r", [5, 6, 7], sampling(max_tokens=60, seed=3, stop=[stop]))
    completion = run(engine)[-1].outputs[0]
    whole = tokenizer.decode(ids, True)
    assert completion.text == whole[: whole.index(stop)]
    assert completion.stop_reason == stop
    assert engine.get_num_unfinished_requests() == 0


def test_a_request_that_the_scheduler_refuses_fails_alone(engine):
    small = make_config(num_blocks=70, max_model_len=256)
    own = LLMEngine.from_engine_config(small, enable_multiprocessing=False)
    own.add_request("ok", [5], sampling(max_tokens=3, seed=1))
    own._client.core._scheduler._max_model_len = 32  # the scheduler knows a tighter limit than the frontend
    own.add_request("big", [5] * 40, sampling(max_tokens=3))
    outputs = {output.request_id: output for output in run(own)}
    assert outputs["big"].outputs[0].finish_reason == "error"
    assert "40 tokens" in outputs["big"].error
    assert outputs["ok"].outputs[0].token_ids == oracle([5], sampling(max_tokens=3), 1)


def test_a_refused_request_leaves_nothing_behind(engine):
    with pytest.raises(RequestError):
        engine.add_request("r", [9999], sampling())
    assert not engine.has_unfinished_requests()
    engine.add_request("r", [5], sampling(max_tokens=2))
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("r", [5], sampling(max_tokens=2))
    assert len(run(engine)[-1].outputs[0].token_ids) == 2


def test_the_prefix_cache_serves_and_can_be_reset(engine):
    prompt = list(range(5, 45))
    seen = []
    for name in ("cold", "warm", "reset"):
        if name == "reset":
            assert engine.reset_prefix_cache() is True
        engine.add_request(name, prompt, sampling(max_tokens=2, seed=1))
        seen.append(run(engine)[-1].num_cached_tokens)
    assert seen[0] == 0 and seen[1] >= 32 and seen[2] == 0


def test_sleep_aborts_refuses_and_wakes(engine):
    engine.add_request("r", [5], sampling(max_tokens=200, seed=1))
    engine.step()
    engine.sleep(1)
    assert engine.is_sleeping()
    assert run(engine)[-1].outputs[0].finish_reason == "abort"
    engine.add_request("s", [5], sampling(max_tokens=2))
    assert "sleeps" in run(engine)[-1].error
    engine.wake_up()
    assert not engine.is_sleeping()
    engine.add_request("t", [5], sampling(max_tokens=2, seed=1))
    assert run(engine)[-1].outputs[0].token_ids == oracle([5], sampling(max_tokens=2), 1)


def test_explain_tells_about_pages(engine):
    assert engine.explain()["num_kv_blocks"] == 256


class FailingExecutor(HashExecutor):
    """Fails at the third step."""

    steps = 0

    def collect(self):
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("the device fell off")
        return super().collect()


@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_failed_step_is_the_engine_s_death(multiprocess):
    config = make_config(executor=FailingExecutor, recovery=False)
    engine = LLMEngine.from_engine_config(config, enable_multiprocessing=multiprocess)
    engine.add_request("r", [5], sampling(max_tokens=9))
    with pytest.raises(EngineDeadError, match="the device fell off"):
        run(engine)
    with pytest.raises(EngineDeadError):
        engine.add_request("s", [5], sampling())
    engine.shutdown()


def test_a_row_that_fails_ends_its_request_alone():
    config = make_config()
    executor = HashExecutor(config, faults=Faults(seed=3, row_error_rate=0.02))
    engine = LLMEngine(config, executor=executor)
    for index in range(20):
        engine.add_request(str(index), [5, index], sampling(max_tokens=10, seed=index))
    last = {output.request_id: output for output in run(engine)}
    failed = [output for output in last.values() if output.error]
    assert 0 < len(failed) < 20
    for request_id, output in last.items():
        if not output.error:
            assert output.outputs[0].token_ids == oracle([5, int(request_id)], sampling(max_tokens=10), int(request_id))


def test_a_configuration_that_cannot_work_is_refused_from_the_child_too():
    with pytest.raises(ConfigError, match="num_gpu_blocks_override") as caught:
        LLMEngine.from_engine_config(make_config(num_blocks=3), enable_multiprocessing=True)
    assert caught.value.setting == "num_gpu_blocks_override"


def test_without_a_tokenizer_there_is_none_to_get():
    engine = LLMEngine.from_engine_config(make_config(), enable_multiprocessing=False)
    with pytest.raises(ConfigError, match="no tokenizer"):
        engine.get_tokenizer()


def test_a_record_goes_on_in_a_new_core_from_where_it_stopped():
    first, second = (LLMEngine.from_engine_config(make_config(), enable_multiprocessing=False) for _ in range(2))
    first.add_request("r", [5, 6, 7], sampling(max_tokens=20, seed=9, n=2))
    for _ in range(6):
        first.step()
    (record,) = first._outputs.records
    emitted = [list(sequence.token_ids) for sequence in record.sequences]
    assert all(0 < len(tokens) < 20 for tokens in emitted)
    second._outputs.add(record)
    second._client.send(AddRequests(record.resumption()))
    completions = run(second)[-1].outputs
    assert [
        completion.token_ids[: len(tokens)] for completion, tokens in zip(completions, emitted, strict=True)
    ] == emitted
    assert completions[0].token_ids == oracle([5, 6, 7], SamplingParams(max_tokens=20), 9)
    assert all(len(completion.token_ids) == 20 for completion in completions)


ORPHAN = """
import sys
from quire.engine.process_client import ProcessClient
from tests.engine.builders import make_config
client = ProcessClient(make_config(), print)
print(client.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd")
def test_the_core_process_ends_when_its_parent_is_killed():
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
    )
    child = next(int(line) for line in parent.stdout if line.strip().isdigit())
    watch = os.pidfd_open(child)
    parent.kill()
    parent.wait()
    ended, _, _ = select.select([watch], [], [], 60)
    os.close(watch)
    parent.stdout.close()
    parent.stdin.close()
    assert ended
