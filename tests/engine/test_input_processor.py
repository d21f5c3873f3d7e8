"""What may be queued and what is refused, with the field at fault named."""

from array import array

import numpy as np
import pytest
from tests.engine.builders import make_config, process

from quire.engine.input_processor import InputProcessor, TokenizedPrompt, prepare_grammars
from quire.engine.tokenizer_source import TokenizerSource
from quire.errors import RequestError
from quire.request import child_seed
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.structured_output import grammars, trial


def refused(config, prompt, params, **options) -> RequestError:
    with pytest.raises(RequestError) as caught:
        process(config, prompt, params, **options)
    return caught.value


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        (5, 6, 7),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], dtype=np.uint16),
        [5, np.int64(6), 7],
        iter([5, 6, 7]),
        {"prompt_token_ids": [5, 6, 7]},
        {"prompt_token_ids": [5, 6, 7], "prompt": "x"},
    ],
)
def test_token_ids_are_taken_in_every_form(prompt):
    processed = process(make_config(), prompt, SamplingParams())
    assert list(processed.engine_requests[0].prompt_token_ids) == processed.prompt_token_ids == [5, 6, 7]
    assert all(type(token_id) is int for token_id in processed.prompt_token_ids)


def test_the_user_s_list_and_params_stay_the_user_s(model_folder):
    prompt, params = [5, 6, 7], SamplingParams(max_tokens=None)
    processed = process(make_config(model_folder), prompt, params)
    prompt.append(8)
    assert list(processed.engine_requests[0].prompt_token_ids) == processed.prompt_token_ids == [5, 6, 7]
    assert params.max_tokens is None and params.eos_token_ids == []
    assert processed.params.max_tokens == 256 - 3


@pytest.mark.parametrize("prompt", ["hello", {"prompt": "hello"}, {"prompt": "hello", "cache_salt": "s"}])
def test_text_is_tokenized_and_kept(model_folder, tokenizer, prompt):
    processed = process(make_config(model_folder), prompt, SamplingParams())
    assert processed.prompt == "hello"
    assert processed.prompt_token_ids == tokenizer.encode("hello")
    assert processed.engine_requests[0].cache_salt == (prompt.get("cache_salt") if isinstance(prompt, dict) else None)


def test_a_batch_is_tokenized_as_its_members_are(model_folder):
    config = make_config(model_folder)
    processor = InputProcessor(config, TokenizerSource(config.model))
    prompts = ["hello", [5, 6], {"prompt": "a b", "cache_salt": "s"}, {"prompt_token_ids": [7]}, "c"]
    assert processor.tokenize_batch(prompts) == [processor.tokenize(prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ({}, "prompt"),
        ({"promt": "x"}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ([5, -1], "prompt"),
        ([5, 512], "prompt"),
        ([5, "6"], "prompt"),
        ([5, 6.5], "prompt"),
        ([5, True], "prompt"),
        ([[5, 6]], "prompt"),
        (np.array([[5, 6]]), "prompt"),
        (np.array([5.0]), "prompt"),
        (np.array([True]), "prompt"),
        (np.array([5, 512]), "prompt"),
        ([1 << 70], "prompt"),
        (None, "prompt"),
        (7, "prompt"),
        ({"prompt_token_ids": [512]}, "prompt_token_ids"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
        ({"prompt_embeds": [1.0]}, "prompt_embeds"),
        ({"prompt_token_ids": [5], "cache_salt": ""}, "cache_salt"),
        ({"prompt_token_ids": [5], "cache_salt": 5}, "cache_salt"),
        ([5] * 256, "prompt"),
        ([5] * 300, "prompt"),
        ("\ud800", "prompt"),
    ],
)
def test_a_bad_prompt_is_refused_with_its_field(model_folder, prompt, param):
    assert refused(make_config(model_folder), prompt, SamplingParams()).param == param


def test_a_long_prompt_s_refusal_names_both_lengths():
    message = str(refused(make_config(), [5] * 300, SamplingParams()))
    assert "300 tokens" in message and "max_model_len is 256" in message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"allowed_token_ids": [1, 512]}, "allowed_token_ids"),
        ({"logit_bias": {512: 1.0}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
        ({"structured_outputs": StructuredOutputsParams(regex="(?=a)")}, "regex"),
        ({"bad_words": [f"{index} word " * 100 for index in range(8)]}, "bad_words"),
    ],
)
def test_a_bad_parameter_is_refused_with_its_field(model_folder, fields, param):
    assert refused(make_config(model_folder), "hi", SamplingParams(**fields)).param == param


@pytest.mark.parametrize(("fields", "param"), [({"stop": ["x"]}, "stop"), ({"bad_words": ["x"]}, "bad_words")])
def test_what_needs_a_tokenizer_is_refused_without_one(fields, param):
    error = refused(make_config(), [5], SamplingParams(**fields))
    assert error.param == param
    assert "skip_tokenizer_init" in str(error)


def test_text_without_a_tokenizer_is_refused_and_ids_are_served(tmp_path):
    config = make_config(tmp_path)
    assert "no tokenizer files" in str(refused(config, "text", SamplingParams()))
    assert process(config, [5], SamplingParams()).params.detokenize is False


def test_the_whole_vocabulary_of_logprobs_is_allowed_within_the_limit():
    assert process(make_config(max_logprobs=512), [5], SamplingParams(logprobs=-1)).params.logprobs == -1
    assert process(make_config(max_logprobs=-1), [5], SamplingParams(logprobs=-1)).params.logprobs == -1


def test_the_cost_of_logprobs_is_a_product():
    config = make_config(max_logprobs=-1, vocab_size=200_000, max_model_len=4096)
    assert process(config, [5], SamplingParams(logprobs=-1, max_tokens=16)).params.logprobs == -1
    error = refused(config, [5], SamplingParams(logprobs=-1, max_tokens=400))
    assert error.param == "logprobs" and "max_tokens" in str(error)


@pytest.mark.parametrize(("keep", "left"), [(2, [8, 9]), (9, [6, 7, 8, 9]), (-1, [6, 7, 8, 9])])
def test_truncation_keeps_the_last_tokens(keep, left):
    assert process(make_config(), [6, 7, 8, 9], SamplingParams(truncate_prompt_tokens=keep)).prompt_token_ids == left


def test_truncation_to_what_fits_leaves_room_for_one_token():
    processed = process(make_config(), list(range(5, 305)), SamplingParams(truncate_prompt_tokens=-1))
    assert processed.prompt_token_ids == list(range(305 - 255, 305))
    assert processed.params.max_tokens == 1


def test_max_tokens_never_exceeds_the_model_s_room():
    assert process(make_config(), [5] * 200, SamplingParams(max_tokens=100)).params.max_tokens == 56


def test_the_end_of_sequence_is_the_model_s_and_the_tokenizer_s(model_folder, tokenizer):
    config = make_config(model_folder, eos_token_ids=(9, 7))
    assert process(config, [5], SamplingParams()).params.eos_token_ids == [9, 7, tokenizer.eos_token_id]


def test_bad_words_become_token_sequences_with_and_without_a_space(model_folder, tokenizer):
    sequences = process(make_config(model_folder), [5], SamplingParams(bad_words=["fox"])).params.bad_words_token_ids
    assert sequences == [tokenizer.encode("fox"), tokenizer.encode(" fox")]


def test_siblings_share_prompt_and_group_and_draw_their_own_seeds():
    first = process(make_config(), [5], SamplingParams(n=3, seed=11)).engine_requests
    again = process(make_config(), [5], SamplingParams(n=3, seed=11)).engine_requests
    assert [request.request_id for request in first] == ["r~0.0", "r~0.1", "r~0.2"]
    assert {request.group_id for request in first} == {"r~0"}
    assert first[0].seed == 11 and len({request.seed for request in first}) == 3
    assert [request.seed for request in first] == [request.seed for request in again]
    assert process(make_config(), [5], SamplingParams(seed=11)).engine_requests[0].group_id is None


def test_seeds_fit_63_bits_and_siblings_of_neighbouring_seeds_do_not_meet():
    seeds = [child_seed(seed, index) for seed in (0, 1, 2, 2**63 - 1) for index in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_request_without_a_seed_draws_one():
    config = make_config()
    processor = InputProcessor(config, TokenizerSource(config.model))
    drawn = [
        processor.process(str(i), processor.tokenize([5]), SamplingParams()).engine_requests[0].seed for i in range(9)
    ]
    assert len(set(drawn)) == 9


def test_the_core_s_ids_never_come_again():
    config = make_config()
    processor = InputProcessor(config, TokenizerSource(config.model))
    prompt = processor.tokenize([5])
    ids = {processor.process("r", prompt, SamplingParams()).engine_requests[0].request_id for _ in range(9)}
    assert len(ids) == 9


def test_functions_are_only_for_a_core_in_this_process():
    params = SamplingParams(logits_processors=[lambda ids, logits: logits])
    assert process(make_config(), [5], params).params.logits_processors
    assert refused(make_config(), [5], params, allow_functions=False).param == "logits_processors"


def test_prompt_logprobs_do_not_read_the_prefix_cache():
    assert process(make_config(), [5], SamplingParams(prompt_logprobs=1)).params.skip_reading_prefix_cache is True


def test_wrong_kinds_of_parameters_and_ids_are_refused():
    assert refused(make_config(), [5], {"temperature": 0}).param == "sampling_params"
    assert refused(make_config(), [5], SamplingParams(), request_id="").param == "request_id"


def test_a_prompt_is_converted_once_for_all_its_siblings():
    config = make_config()
    processor = InputProcessor(config, TokenizerSource(config.model))
    converted = array("i", [5, 6, 7])
    prompt = TokenizedPrompt([5, 6, 7], array=converted)
    requests = processor.process("r", prompt, SamplingParams(n=3)).engine_requests
    assert all(request.prompt_token_ids is converted for request in requests)
    (shorter,) = processor.process("s", prompt, SamplingParams(truncate_prompt_tokens=2)).engine_requests
    assert shorter.prompt_token_ids.tolist() == [6, 7] and converted.tolist() == [5, 6, 7]


def test_token_ids_that_the_model_does_not_have_are_refused_wherever_they_come_from():
    config = make_config()
    processor = InputProcessor(config, TokenizerSource(config.model))
    for token_id in (-1, config.model.vocab_size):
        with pytest.raises(RequestError, match=f"token id {token_id}, but the vocabulary has") as caught:
            processor.process("r", TokenizedPrompt([5, token_id]), SamplingParams())
        assert caught.value.param == "prompt"


def test_what_the_first_grammar_needs_is_prepared_while_the_core_starts(model_folder, monkeypatch):
    started, read = [], []
    start_child = trial.start_child
    monkeypatch.setattr(
        trial, "start_child", lambda *args, **named: started.append(args) or start_child(*args, **named)
    )
    config = make_config(model_folder)
    source = TokenizerSource(config.model)
    grammars.shared_grammars.cache_clear()
    ahead = prepare_grammars(config, source)
    assert ahead is not None
    ahead.result(timeout=60)
    assert len(started) == 1
    monkeypatch.setattr("quire.engine.input_processor.read_vocabulary", lambda *args: read.append(args))
    processor = InputProcessor(config, source, try_grammars_apart=True)
    processor.check_grammar(StructuredOutputsParams(regex="a+"))
    assert len(started) == 1 and not read
    processor._grammars().close()
    grammars.shared_grammars.cache_clear()


def test_nothing_is_prepared_for_grammars_where_none_can_be_asked_for():
    config = make_config()
    assert prepare_grammars(config, TokenizerSource(config.model)) is None
