"""From the core's outputs to users': text, stop strings, logprobs, kinds, siblings, ends."""

import pytest
from tests.engine.builders import make_config, make_record, process

from quire.engine.output_processor import OutputProcessor
from quire.errors import RequestError
from quire.logprobs import FlatLogprobs
from quire.request import EngineCoreOutput, EngineCoreOutputs, FinishReason, TokenLogprobs
from quire.sampling_params import RequestOutputKind, SamplingParams

TEXT = "hello world, this is a test. 你好 STOP and more"


def start(folder, tokenizer, params, prompt="hi", request_id="r"):
    processor = OutputProcessor()
    processed = process(make_config(folder), prompt, params, request_id)
    record = make_record(processed, tokenizer)
    processor.add(record)
    return processor, record


def feed(processor, record, ids, finish=None, columns=True, index=0, **fields):
    """Tokens one step at a time, as the core sends them; returns the aborted ids and an output after each step."""
    core_id = record.sequences[index].core_id
    aborts, built = [], []
    for position, token_id in enumerate(ids):
        last = finish is not None and position == len(ids) - 1
        if columns and not last:
            step = EngineCoreOutputs(plain_ids=[core_id], plain_tokens=[token_id])
        else:
            reason = finish if last else None
            step = EngineCoreOutputs(outputs=[EngineCoreOutput(core_id, [token_id], reason, **fields)])
        touched, more = processor.process(step, float(position + 1))
        aborts += more
        built += [output for one in touched if (output := one.build_output()) is not None]
    return aborts, built


@pytest.mark.parametrize("columns", [True, False])
def test_deltas_join_to_the_text_and_cumulative_outputs_grow_to_it(model_folder, tokenizer, columns):
    ids = tokenizer.encode(TEXT)
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY):
        processor, record = start(model_folder, tokenizer, SamplingParams(max_tokens=200, output_kind=kind))
        _, outputs = feed(processor, record, ids, FinishReason.LENGTH, columns)
        texts = [output.outputs[0].text for output in outputs]
        assert ("".join(texts) if kind is RequestOutputKind.DELTA else texts[-1]) == TEXT
        assert len(outputs) == (1 if kind is RequestOutputKind.FINAL_ONLY else len(ids))
        tokens = [token for output in outputs for token in output.outputs[0].token_ids]
        assert (tokens if kind is not RequestOutputKind.CUMULATIVE else outputs[-1].outputs[0].token_ids) == ids
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert len(processor) == 0


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["STOP", "好 ST", "is a", "t. ", "o", "TOP and"])
def test_a_stop_string_ends_the_text_at_the_same_place_in_every_kind(model_folder, tokenizer, stop, include, kind):
    params = SamplingParams(max_tokens=200, stop=[stop], include_stop_str_in_output=include, output_kind=kind)
    processor, record = start(model_folder, tokenizer, params)
    aborts, outputs = feed(processor, record, tokenizer.encode(TEXT))
    end = TEXT.index(stop) + (len(stop) if include else 0)
    texts = [output.outputs[0].text for output in outputs]
    assert ("".join(texts) if kind is RequestOutputKind.DELTA else texts[-1]) == TEXT[:end]
    assert all(TEXT[:end].startswith(text) for text in texts) or kind is RequestOutputKind.DELTA
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert outputs[-1].outputs[0].stop_reason == stop
    assert aborts == [record.sequences[0].core_id]
    assert len(processor) == 0


def test_a_stop_string_split_over_every_token_border_is_found(model_folder, tokenizer):
    for cut in range(1, len(TEXT)):
        ids = tokenizer.encode(TEXT[:cut]) + tokenizer.encode(TEXT[cut:])
        processor, record = start(model_folder, tokenizer, SamplingParams(max_tokens=200, stop="STOP"))
        _, outputs = feed(processor, record, ids)
        assert outputs[-1].outputs[0].text == TEXT[: TEXT.index("STOP")]


def test_several_tokens_in_one_step_are_cut_where_the_stop_string_ends(model_folder, tokenizer):
    ids = tokenizer.encode(TEXT)
    processor, _record = start(model_folder, tokenizer, SamplingParams(max_tokens=200, stop="world", logprobs=0))
    rows = TokenLogprobs([[i] for i in ids], [[-1.0]] * len(ids), [1] * len(ids))
    step = EngineCoreOutputs(outputs=[EngineCoreOutput("r~0", ids, logprobs=rows)])
    touched, aborts = processor.process(step, 1.0)
    completion = touched[0].build_output().outputs[0]
    assert aborts == ["r~0"]
    assert completion.text == "hello "
    assert tokenizer.decode(completion.token_ids).startswith("hello world")
    assert len(completion.token_ids) == len(completion.logprobs) < len(ids)
    assert completion.cumulative_logprob == -len(completion.token_ids)


def test_a_stop_string_before_min_tokens_does_not_stop(model_folder, tokenizer):
    ids = tokenizer.encode("a b a b a b")
    params = SamplingParams(max_tokens=200, min_tokens=3, stop="a")
    processor, record = start(model_folder, tokenizer, params)
    _, outputs = feed(processor, record, ids)
    completion = outputs[-1].outputs[0]
    assert len(completion.token_ids) > 3
    assert completion.text.startswith("a b")
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [None, ["zzz"]])
def test_a_stop_token_s_text_is_hidden_unless_asked_for(model_folder, tokenizer, include, stop):
    ids = tokenizer.encode("hello") + tokenizer.encode("!")
    params = SamplingParams(max_tokens=9, stop_token_ids=[ids[-1]], include_stop_str_in_output=include, stop=stop)
    processor, record = start(model_folder, tokenizer, params)
    _, outputs = feed(processor, record, ids, FinishReason.STOP, stop_reason=ids[-1])
    completion = outputs[-1].outputs[0]
    assert completion.text == ("hello!" if include else "hello")
    assert completion.token_ids == ids
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ids[-1])


def test_an_unfinished_character_is_shown_at_the_end_only(model_folder, tokenizer):
    ids = [tokenizer.token_to_id(character) for character in "äł"]
    params = SamplingParams(max_tokens=2, output_kind=RequestOutputKind.DELTA)
    processor, record = start(model_folder, tokenizer, params)
    _, outputs = feed(processor, record, ids, FinishReason.LENGTH)
    assert [output.outputs[0].text for output in outputs] == ["", "\ufffd"]


def test_a_slow_reader_gets_several_steps_in_one_output(model_folder, tokenizer):
    ids = tokenizer.encode(TEXT)
    processor, record = start(
        model_folder, tokenizer, SamplingParams(max_tokens=99, output_kind=RequestOutputKind.DELTA)
    )
    for token_id in ids[:5]:
        processor.process(EngineCoreOutputs(plain_ids=["r~0"], plain_tokens=[token_id]), 1.0)
    first = record.build_output().outputs[0]
    assert record.build_output() is None
    for token_id in ids[5:9]:
        processor.process(EngineCoreOutputs(plain_ids=["r~0"], plain_tokens=[token_id]), 2.0)
    second = record.build_output().outputs[0]
    assert first.token_ids + second.token_ids == ids[:9]
    assert first.text + second.text == tokenizer.decode(ids[:9])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_logprobs_come_with_their_tokens_ranks_and_texts(model_folder, tokenizer, flat, kind):
    ids = tokenizer.encode("hello!")
    params = SamplingParams(max_tokens=9, logprobs=2, flat_logprobs=flat, output_kind=kind)
    processor, _record = start(model_folder, tokenizer, params)
    outputs = []
    for position, token_id in enumerate(ids):
        output = EngineCoreOutput(
            "r~0",
            [token_id],
            FinishReason.LENGTH if position == len(ids) - 1 else None,
            logprobs=TokenLogprobs([[token_id, 7, token_id]], [[-2.0, -0.5, -2.0]], [2]),
        )
        touched, _ = processor.process(EngineCoreOutputs(outputs=[output]), 1.0)
        outputs.append(touched[0].build_output().outputs[0])
    positions = (
        list(outputs[-1].logprobs) if kind is RequestOutputKind.CUMULATIVE else [p for o in outputs for p in o.logprobs]
    )
    assert len(positions) == len(ids)
    for token_id, position in zip(ids, positions, strict=True):
        assert list(position) == [token_id, 7]
        assert (position[token_id].logprob, position[token_id].rank) == (-2.0, 2)
        assert (position[7].logprob, position[7].rank) == (-0.5, 1)
        assert position[token_id].decoded_token == tokenizer.decode([token_id])
    assert outputs[-1].cumulative_logprob == -2.0 * len(ids)
    assert isinstance(outputs[-1].logprobs, FlatLogprobs) is flat


def test_prompt_logprobs_begin_with_none_and_arrive_in_chunks(model_folder, tokenizer):
    params = SamplingParams(max_tokens=9, prompt_logprobs=0)
    processor, _record = start(model_folder, tokenizer, params, prompt=[5, 6, 7, 8])
    for chunk in ([6, 7], [8]):
        output = EngineCoreOutput(
            "r~0",
            [] if chunk == [6, 7] else [9],
            prompt_logprobs=TokenLogprobs([[t] for t in chunk], [[-1.0] for _ in chunk], [3 for _ in chunk]),
        )
        touched, _ = processor.process(EngineCoreOutputs(outputs=[output]), 1.0)
    output = touched[0].build_output()
    assert output.prompt_logprobs[0] is None
    assert [next(iter(position)) for position in output.prompt_logprobs[1:]] == [6, 7, 8]
    assert output.prompt_logprobs[1][6].rank == 3


def test_siblings_become_one_output(model_folder, tokenizer):
    params = SamplingParams(n=2, max_tokens=9, seed=1, output_kind=RequestOutputKind.FINAL_ONLY)
    processor, record = start(model_folder, tokenizer, params)
    assert [sequence.core_id for sequence in record.sequences] == ["r~0.0", "r~0.1"]
    _, outputs = feed(processor, record, tokenizer.encode("one"), FinishReason.STOP, index=0)
    assert outputs == []
    _, outputs = feed(processor, record, tokenizer.encode("two"), FinishReason.LENGTH, index=1)
    assert [completion.index for completion in outputs[0].outputs] == [0, 1]
    assert outputs[0].outputs[1].text == "two"
    assert outputs[0].finished


def test_deltas_of_siblings_name_the_one_that_grew(model_folder, tokenizer):
    params = SamplingParams(n=2, max_tokens=9, seed=1, output_kind=RequestOutputKind.DELTA)
    processor, record = start(model_folder, tokenizer, params)
    _, outputs = feed(processor, record, tokenizer.encode("two"), index=1)
    assert {completion.index for output in outputs for completion in output.outputs} == {1}


def test_an_aborted_request_ends_with_abort_and_late_outputs_are_ignored(model_folder, tokenizer):
    processor, record = start(model_folder, tokenizer, SamplingParams(max_tokens=9))
    feed(processor, record, tokenizer.encode("on"))
    records, core_ids = processor.abort(["r", "unknown"], 5.0)
    assert (records, core_ids) == ([record], ["r~0"])
    assert record.build_output().outputs[0].finish_reason == "abort"
    assert processor.process(EngineCoreOutputs(plain_ids=["r~0"], plain_tokens=[5]), 6.0) == ([], [])


def test_a_refused_request_carries_the_error(model_folder, tokenizer):
    processor, _record = start(model_folder, tokenizer, SamplingParams(max_tokens=9))
    output = EngineCoreOutput("r~0", finish_reason=FinishReason.ERROR, error="does not fit")
    touched, _ = processor.process(EngineCoreOutputs(outputs=[output]), 1.0)
    output = touched[0].build_output()
    assert (output.error, output.outputs[0].finish_reason, output.finished) == ("does not fit", "error", True)


def test_two_requests_cannot_share_an_id(model_folder, tokenizer):
    processor, record = start(model_folder, tokenizer, SamplingParams(n=2, seed=1))
    with pytest.raises(RequestError, match="in use"):
        processor.add(record)


def test_hooks_hear_of_first_tokens_later_tokens_and_ends(model_folder, tokenizer):
    class Hook:
        def __init__(self):
            self.firsts, self.nexts, self.ends, self.steps = [], [], [], []

        def record_step(self, stats):
            self.steps.append(stats)

        def record_first_token(self, seconds, prompt_tokens):
            self.firsts.append(prompt_tokens)

        def record_next_tokens(self, seconds, count=1, times=1):
            self.nexts += [(seconds, count)] * times

        def record_finished(self, request):
            self.ends.append(request)

    processor, record = start(model_folder, tokenizer, SamplingParams(max_tokens=9), prompt=[5, 6, 7])
    hook = Hook()
    processor.hooks.append(hook)
    feed(processor, record, [9, 10, 11], FinishReason.LENGTH)
    assert hook.firsts == [3]
    assert hook.nexts == [(1.0, 1), (1.0, 1)]
    assert [(end.finish_reason, end.num_generation_tokens) for end in hook.ends] == [("length", 3)]


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.STOP])
@pytest.mark.parametrize("stop", [None, "STOP", "t. ", "no such"])
def test_a_reader_of_several_steps_can_tell_whose_text_is_whose(model_folder, tokenizer, finish, stop):
    """However seldom it is read, the tokens have the text that they had when each step was read."""
    ids = tokenizer.encode(TEXT)[: -1 if finish is FinishReason.STOP else None]

    def read(every: int) -> list[tuple[int, str, int, str | None]]:
        params = SamplingParams(max_tokens=200, output_kind=RequestOutputKind.DELTA, logprobs=0, stop=stop)
        processor, record = start(model_folder, tokenizer, params)
        told = []
        for position, token_id in enumerate(ids):
            told_of_it = TokenLogprobs([[token_id]], [[-1.0]], [1])
            end = finish if position == len(ids) - 1 else None
            output = EngineCoreOutput(record.sequences[0].core_id, [token_id], end, logprobs=told_of_it)
            processor.process(EngineCoreOutputs(outputs=[output]), float(position + 1))
            if position % every == 0 or record.is_finished:
                told.append(record.build_output())
            if record.is_finished:
                break
        parts = [part for output in told if output is not None for part in output.outputs[0].by_token()]
        assert all(list(part.logprobs[0]) == part.token_ids for part in parts)
        return [(*part.token_ids, part.text, part.finish_reason) for part in parts]

    each = read(1)
    assert len(each) > 5 and "".join(text for _, text, _ in each) in TEXT and each[-1][-1] is not None
    held = 0 if stop is None else len(stop) - 1  # a possible stop string waits, unless it is told later anyway
    for every in (2, 3, 7, 1000):
        parts = read(every)
        assert [(token, end) for token, _, end in parts] == [(token, end) for token, _, end in each]
        lengths = [
            len("".join(text for _, text, _ in told[:count])) for told in (each, parts) for count in range(len(each))
        ]
        sooner = zip(lengths[len(each) :], lengths[: len(each)], strict=True)
        assert all(0 <= ours - theirs <= held for ours, theirs in sooner)
