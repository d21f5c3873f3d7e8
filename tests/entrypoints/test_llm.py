"""The offline API over the hash model: every form of prompt, nothing half-added, Ctrl-C, chat, beam search."""

import dataclasses
import os
import signal
import threading
from typing import Any

import pytest
from tests.engine.builders import make_config, write_model_folder
from tests.oracles.hash_model import HashExecutor, HashModel

from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.llm import LLM
from quire.errors import ConfigError, EngineDeadError, RequestError
from quire.metrics.snapshot import Counter, Gauge, Histogram
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import BeamSearchParams, SamplingParams

MODEL = HashModel(vocab_size=512)


def sampling(**fields):
    return SamplingParams(**{"ignore_eos": True, "max_tokens": 8, **fields})


def oracle(prompt, max_tokens, seed):
    return MODEL.oracle(prompt, SamplingParams(max_tokens=max_tokens), seed, 10_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model_folder(tmp_path_factory.mktemp("llm") / "tiny")


@pytest.fixture(scope="module")
def llm(folder):
    with LLM.from_engine_config(make_config(folder, num_blocks=2048)) as llm:
        yield llm


def unfinished(llm):
    return llm.llm_engine.get_num_unfinished_requests()


def test_every_form_of_prompt_is_served_in_order(llm):
    ids = llm.get_tokenizer().encode("hello world")
    prompts = ["hello world", ids, {"prompt": "hello world"}, {"prompt_token_ids": ids}, {"prompt_token_ids": [7, 8]}]
    outputs = llm.generate(prompts, sampling(seed=3), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs[:4]] == [oracle(ids, 8, 3)] * 4
    assert outputs[4].outputs[0].token_ids == oracle([7, 8], 8, 3)
    assert outputs[0].prompt == "hello world" and outputs[1].prompt is None
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize("prompt", ["hello", [5, 6, 7], {"prompt": "hello"}, {"prompt_token_ids": [5]}])
def test_a_single_prompt_needs_no_list(llm, prompt):
    (output,) = llm.generate(prompt, sampling(), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8


def test_parameters_may_be_one_for_each_prompt(llm):
    params = [sampling(max_tokens=count, seed=count) for count in (1, 5, 3)]
    outputs = llm.generate([[5], [6], [7]], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [
        oracle([5], 1, 1),
        oracle([6], 5, 5),
        oracle([7], 3, 3),
    ]
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate("hi", params[:2], use_tqdm=False)


def test_text_is_the_same_as_when_it_is_streamed(llm, folder):
    params = sampling(max_tokens=60, seed=5)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    engine = LLMEngine.from_engine_config(make_config(folder), enable_multiprocessing=False)
    engine.add_request("r", "hello", params)
    last = None
    while engine.has_unfinished_requests():
        last = engine.step()[-1]
    assert output.outputs[0].text == last.outputs[0].text != ""


def test_the_user_s_parameters_stay_as_they_are(llm):
    params = SamplingParams(max_tokens=None, seed=2)
    before = SamplingParams(max_tokens=None, seed=2)
    llm.generate([[5]], params, use_tqdm=False)
    assert params == before


@pytest.mark.parametrize("bad", ["", [], [9999], {"promt": "x"}, [5] * 300, None, [5, "x"]])
def test_a_bad_prompt_raises_before_anything_is_queued(llm, bad):
    with pytest.raises(RequestError):
        llm.generate([[5, 6], bad, [7]], sampling(), use_tqdm=False)
    assert unfinished(llm) == 0


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], sampling(), use_tqdm=False) == []


def test_unseeded_requests_differ_and_a_new_engine_repeats_them(folder):
    runs = []
    for _ in range(2):
        with LLM.from_engine_config(make_config(folder)) as llm:
            runs.append([o.outputs[0].token_ids for o in llm.generate([[5]] * 3, sampling(), use_tqdm=False)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


def test_the_model_s_defaults_are_used_without_parameters(folder):
    config = make_config(folder, default_sampling={"max_tokens": 3, "temperature": 0.5})
    with LLM.from_engine_config(config) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(max_tokens=3, temperature=0.5)
        assert len(llm.generate([[5]], use_tqdm=False)[0].outputs[0].token_ids) <= 3


def test_siblings_come_in_one_output(llm):
    (output,) = llm.generate([[5, 6]], sampling(n=3, seed=1), use_tqdm=False)
    assert len(output.outputs) == 3


def test_without_detokenization_logprobs_have_no_texts(folder):
    params = sampling(detokenize=False, logprobs=2, prompt_logprobs=2)
    with LLM(skip_tokenizer_init=False, cpu_threads=1, max_model_len=64, kv_cache_memory_bytes=1 << 22) as demo:
        (output,) = demo.generate("one two three", params, use_tqdm=False)
    positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert output.outputs[0].text == "" and len(positions) > 8
    assert all(entry.decoded_token is None for position in positions for entry in position.values())


def test_a_chat_is_the_rendered_template_s_completion(llm):
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (output,) = llm.chat(messages, sampling(seed=1), use_tqdm=False)
    (name,) = llm.enqueue_chat(messages, sampling(seed=1))
    (queued,) = llm.wait_for_completion(use_tqdm=False)
    assert (queued.request_id, queued.prompt, queued.outputs[0].text) == (name, output.prompt, output.outputs[0].text)
    assert output.prompt == text
    assert output.outputs[0].token_ids == oracle(tokenizer.encode(text, add_special_tokens=False), 8, 1)
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert [o.prompt for o in llm.chat([messages, parts], sampling(), use_tqdm=False)] == [text, text]
    open_end = [*messages, {"role": "assistant", "content": "Well"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert llm.chat(open_end, sampling(), False, **options)[0].prompt.endswith("Well")
    assert llm.chat(messages, sampling(), False, chat_template="{{ messages[0].content }}!")[0].prompt == "hello!"


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        [],
        [[]],
        [{"content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image"}]}],
    ],
)
def test_a_bad_conversation_is_refused(llm, messages):
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, sampling(), use_tqdm=False)
    assert caught.value.param.startswith("messages")


def test_ctrl_c_takes_all_back_and_the_engine_goes_on(folder):
    class Interrupting(HashExecutor):
        steps = 0

        def collect(self):
            self.steps += 1
            if self.steps == 4:
                os.kill(os.getpid(), signal.SIGINT)
            return super().collect()

    config = make_config(folder)
    llm = LLM._from_engine(LLMEngine(config, executor=Interrupting(config)))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6]], sampling(max_tokens=100), use_tqdm=False)
    assert unfinished(llm) == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (output,) = llm.generate([[5]], sampling(seed=1), use_tqdm=False)
    assert output.outputs[0].token_ids == oracle([5], 8, 1)


def test_it_works_outside_the_main_thread(llm):
    results = []
    thread = threading.Thread(target=lambda: results.extend(llm.generate([[5]], sampling(seed=1), use_tqdm=False)))
    thread.start()
    thread.join()
    assert results[0].outputs[0].token_ids == oracle([5], 8, 1)


def test_a_failed_request_is_told_in_its_output_and_the_others_are_served(folder):
    from tests.oracles.hash_model import Faults

    config = make_config(folder)
    executor = HashExecutor(config, faults=Faults(seed=3, row_error_rate=0.03))
    llm = LLM._from_engine(LLMEngine(config, executor=executor))
    outputs = llm.generate([[5, i] for i in range(20)], sampling(seed=1), use_tqdm=False)
    assert 0 < sum(output.error is not None for output in outputs) < 20
    for index, output in enumerate(outputs):
        if output.error is None:
            assert output.outputs[0].token_ids == oracle([5, index], 8, 1)
        else:
            assert output.outputs[0].finish_reason == "error"


def test_after_shutdown_nothing_is_served(folder):
    llm = LLM.from_engine_config(make_config(folder))
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError):
        llm.generate([[5]], sampling(), use_tqdm=False)


def test_the_rest_of_the_surface_answers(llm, folder):
    assert llm.reset_prefix_cache() is True
    llm.sleep(1)
    assert llm.llm_engine.is_sleeping()
    llm.wake_up()
    assert len(llm.generate([[5]], sampling(), use_tqdm=False)[0].outputs[0].token_ids) == 8
    with pytest.raises(RequestError, match="disable_log_stats"):
        llm.get_metrics()
    with pytest.raises(RequestError, match="LoRA"):
        llm.generate([[5]], sampling(), use_tqdm=False, lora_request=object())
    with pytest.raises(RequestError, match="priority"):
        llm.generate([[5]], sampling(), use_tqdm=False, priority=[1, 2])
    with pytest.raises(RequestError, match="pad"):
        llm.generate("x", sampling(), use_tqdm=False, tokenization_kwargs={"pad": 1})


@pytest.mark.parametrize(("level", "multiprocess"), [(0, False), (1, False), (2, False), (1, True)])
def test_a_sleeping_engine_refuses_to_generate_until_it_wakes_up(folder, level, multiprocess):
    engine = LLMEngine.from_engine_config(make_config(folder), enable_multiprocessing=multiprocess)
    with LLM._from_engine(engine) as llm:
        llm.sleep(level)
        for _ in range(2):
            with pytest.raises(RequestError, match="wake_up"):
                llm.generate([[5]], sampling(), use_tqdm=False)
            with pytest.raises(RequestError, match="wake_up"):
                llm.chat([{"role": "user", "content": "x"}], sampling(), use_tqdm=False, chat_template="x")
        assert unfinished(llm) == 0
        assert llm.wake_up() is True
        assert llm.generate([[5]], sampling(seed=1), use_tqdm=False)[0].outputs[0].token_ids == oracle([5], 8, 1)


def test_one_priority_is_for_all_prompts(folder):
    config = make_config(folder, policy="priority", max_num_seqs=1)
    with LLM.from_engine_config(config) as llm:
        (late,) = llm.enqueue([[5]], sampling(seed=1), priority=9)
        (first,) = llm.generate([[6]], sampling(seed=2), use_tqdm=False, priority=-1)
        assert llm._enqueued[late] is None, "the one with the higher number ran first"
        assert first.outputs[0].token_ids == oracle([6], 8, 2)
        for method in (llm.chat, llm.enqueue_chat):
            method([{"role": "user", "content": "x"}], sampling(), False, priority=1, chat_template="x")
        llm.beam_search([[5]], BeamSearchParams(beam_width=2, max_tokens=2), priority=1)
        llm.wait_for_completion((RequestOutput, CompletionOutput), use_tqdm=False)
        bad: list[Any] = ["a", 1.5, [True], [1, 2]]
        for wrong in bad:
            with pytest.raises(RequestError) as error:
                llm.generate([[6]], sampling(), use_tqdm=False, priority=wrong)
            assert error.value.param == "priority"


def test_prompts_are_truncated_as_tokenization_kwargs_say(llm):
    ids = llm.get_tokenizer().encode("one two three four")

    def prompt_ids(**options):
        (output,) = llm.generate("one two three four", sampling(), use_tqdm=False, tokenization_kwargs=options)
        return output.prompt_token_ids

    assert prompt_ids(truncate_prompt_tokens=2) == ids[-2:]
    assert prompt_ids(truncate_prompt_tokens=2, truncation_side="right") == ids[:2]
    assert prompt_ids(truncation=True, max_length=3) == ids[-3:]
    assert prompt_ids(truncate_prompt_tokens=-1) == prompt_ids(add_special_tokens=None) == ids
    (chat,) = llm.chat(
        [{"role": "user", "content": "x"}],
        sampling(),
        use_tqdm=False,
        chat_template="one two three four",
        tokenization_kwargs={"truncate_prompt_tokens": 2},
        mm_processor_kwargs=None,
    )
    assert chat.prompt_token_ids == ids[-2:]
    bad = {"truncate_prompt_tokens": (0, "2", 10**6), "truncation_side": ("up",), "truncation": ("some",)}
    for name, values in bad.items():
        for value in values:
            with pytest.raises(RequestError):
                prompt_ids(**{name: value})
    with pytest.raises(RequestError, match="reads no media"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": 1}}, sampling(), use_tqdm=False)


def test_metrics_are_a_list_of_counters_gauges_and_histograms(folder):
    config = make_config(folder)
    observability = dataclasses.replace(config.observability, disable_log_stats=False)
    with LLM.from_engine_config(dataclasses.replace(config, observability=observability)) as llm:
        llm.generate([[5, 6, 7], [8]], sampling(), use_tqdm=False)
        metrics: list[Any] = llm.get_metrics()
        by_name = {metric.name: metric for metric in metrics if "finished_reason" not in metric.labels}
        assert by_name["quire:generation_tokens"] == Counter(
            "quire:generation_tokens", {"model_name": "hash", "engine": "0"}, 16
        )
        assert by_name["quire:prompt_tokens"].value == 4
        assert isinstance(by_name["quire:num_requests_running"], Gauge)
        lengths = by_name["quire:request_prompt_tokens"]
        assert isinstance(lengths, Histogram) and (lengths.count, lengths.sum) == (2, 4.0)
        assert list(lengths.buckets.items())[:3] == [("1.0", 1), ("2.0", 1), ("5.0", 2)]
        assert lengths.buckets["+Inf"] == 2
        reasons = {each.labels["finished_reason"]: each.value for each in metrics if "finished_reason" in each.labels}
        assert reasons["length"] == 2 and reasons["stop"] == 0
        theirs = {metric.name for metric in llm.get_metrics("vllm")}
        assert "vllm:num_requests_running" in theirs and not any(name.startswith("quire") for name in theirs)
        with pytest.raises(RequestError, match="names"):
            llm.get_metrics("other")


def test_what_scripts_read_of_the_configuration_is_there(llm):
    config = llm.llm_engine.vllm_config
    assert llm.model_config is llm.llm_engine.model_config is config.model_config
    model = llm.model_config
    assert (model.max_model_len, model.get_vocab_size(), model.hf_config.vocab_size) == (256, 512, 512)
    assert model.runner_type in ("auto", "generate") and not model.is_multimodal_model and not model.is_encoder_decoder
    assert model.get_sliding_window() is None and model.hf_text_config is model.hf_config
    assert (config.cache_config.num_gpu_blocks, config.cache_config.block_size) == (2048, 4)
    assert config.parallel_config.tensor_parallel_size == config.parallel_config.world_size == 1
    assert config.scheduler_config.max_num_seqs == 64
    assert config.scheduler_config.max_model_len == 256
    assert config.device_config.device == "cpu" and config.load_config.load_format == "auto"


@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_length_left_open_is_what_fits_in_the_pages(folder, multiprocess):
    config = make_config(folder, num_blocks=21, max_num_batched_tokens=64, max_num_seqs=8)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, fits_max_model_len=True))
    with LLM._from_engine(LLMEngine.from_engine_config(config, enable_multiprocessing=multiprocess)) as llm:
        length = llm.model_config.max_model_len
        assert length == 81  # 20 pages of 4 tokens, and the last token is never computed
        assert llm.llm_engine.vllm_config.scheduler_config.max_model_len == length
        (output,) = llm.generate([[5] * 40], sampling(max_tokens=None), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == length - 40
        with pytest.raises(RequestError, match=f"max_model_len is {length}"):
            llm.generate([[5] * length], sampling(), use_tqdm=False)


def test_where_not_even_a_short_request_fits_a_length_left_open_is_refused(folder):
    config = make_config(folder, num_blocks=1)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, fits_max_model_len=True))
    with pytest.raises(ConfigError, match="num_gpu_blocks_override"):
        LLM.from_engine_config(config)


def test_errors_have_the_names_that_scripts_catch(llm):
    from quire.exceptions import VLLMClientError, VLLMError, VLLMValidationError

    with pytest.raises(VLLMValidationError) as error:
        llm.generate([[5]], SamplingParams(logprobs=100), use_tqdm=False)
    assert error.value.parameter == "logprobs"
    assert isinstance(error.value, VLLMClientError) and isinstance(error.value, VLLMError)


def test_an_unknown_setting_is_refused_by_its_name():
    with pytest.raises(ConfigError, match="max_model_length"):
        LLM("somewhere", max_model_length=5)


def test_the_progress_bar_counts_requests(llm, capsys):
    llm.generate([[5], [6]], sampling(), use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


def test_beam_search_shares_batches_and_gives_the_best_first(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    both = llm.beam_search([[5, 6], "hello"], params)
    assert [len(output.sequences) for output in both] == [2, 2]
    for output in both:
        scores = [sequence.cum_logprob for sequence in output.sequences]
        assert scores == sorted(scores, reverse=True)
        assert all(len(sequence.logprobs) == 4 for sequence in output.sequences)
    assert both[0].sequences[0].tokens[:2] == [5, 6]
    assert both[1].sequences[0].text.startswith("hello")
    alone = llm.beam_search(["hello"], params, concurrency_limit=1)
    assert alone[0].sequences[0].tokens == both[1].sequences[0].tokens
    for field, value in (("beam_width", 129), ("max_tokens", 0)):
        with pytest.raises(RequestError) as caught:
            llm.beam_search([[5]], BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, field: value}))
        assert caught.value.param == field
