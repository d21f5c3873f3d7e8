"""Text that is made while the device works is the text that would have been made at the end."""

import pytest
from tests.engine.builders import make_config, make_record, process

from quire.engine.output_processor import DETOKENIZE_EVERY, OutputProcessor
from quire.request import EngineCoreOutput, EngineCoreOutputs, FinishReason
from quire.sampling_params import RequestOutputKind, SamplingParams

TEXT = "hello world, this is a test. 你好 foo bar über alles 好 and more of it, so that several rounds are needed " * 2


def generate(folder, tokenizer, ids_of: dict[str, list[int]], finish: FinishReason, *, ahead: bool, **fields):
    """Feed every request's tokens, all in step; texts and tokens at their ends, and the most that was made before."""
    processor = OutputProcessor()
    records = {}
    params = SamplingParams(max_tokens=250, output_kind=RequestOutputKind.FINAL_ONLY, **fields)
    for request_id in ids_of:
        records[request_id] = make_record(process(make_config(folder), "hi", params, request_id), tokenizer)
        processor.add(records[request_id])
    sequences = {request_id: record.sequences[0] for request_id, record in records.items()}
    most = 0
    for position in range(max(map(len, ids_of.values()))):
        news = EngineCoreOutputs(plain_ids=[], plain_tokens=[], outputs=[])
        for request_id, ids in ids_of.items():
            core_id = sequences[request_id].core_id
            if position == len(ids) - 1:
                news.outputs.append(EngineCoreOutput(core_id, [ids[position]], finish))
            elif position < len(ids):
                news.plain_ids.append(core_id)
                news.plain_tokens.append(ids[position])
        touched, _ = processor.process(news, float(position + 1))
        if ahead:
            processor.detokenize_some()
        most = max(most, *(len(sequence.text) for sequence in sequences.values()))
        for record in touched:
            record.build_output()
    results = {request_id: (sequence.text, sequence.token_ids) for request_id, sequence in sequences.items()}
    return results, most, processor


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.STOP])
def test_it_is_the_same_text_wherever_requests_end(model_folder, tokenizer, finish):
    ids = tokenizer.encode(TEXT)
    assert len(ids) > 3 * DETOKENIZE_EVERY
    ids_of = {f"r{cut}": ids[: len(ids) - cut] for cut in range(40)}
    ahead, most, processor = generate(model_folder, tokenizer, ids_of, finish, ahead=True)
    late, _, _ = generate(model_folder, tokenizer, ids_of, finish, ahead=False)
    assert ahead == late
    assert most > 0 and len(processor) == 0


def test_most_of_the_text_is_there_before_the_end(model_folder, tokenizer):
    ids = tokenizer.encode(TEXT)
    processor = OutputProcessor()
    params = SamplingParams(max_tokens=250, output_kind=RequestOutputKind.FINAL_ONLY)
    record = make_record(process(make_config(model_folder), "hi", params), tokenizer)
    processor.add(record)
    sequence = record.sequences[0]
    for token_id in ids:
        processor.process(EngineCoreOutputs(plain_ids=[sequence.core_id], plain_tokens=[token_id]), 1.0)
        processor.detokenize_some()
    assert len(sequence.text) > 0.8 * len(TEXT) and TEXT.startswith(sequence.text)


def test_nothing_is_made_where_no_text_is_wanted_or_a_reader_makes_it(model_folder, tokenizer):
    for fields in ({"detokenize": False}, {"output_kind": RequestOutputKind.DELTA}):
        processor = OutputProcessor()
        params = SamplingParams(**{"max_tokens": 250, "output_kind": RequestOutputKind.FINAL_ONLY, **fields})
        record = make_record(process(make_config(model_folder), "hi", params), tokenizer)
        processor.add(record)
        sequence = record.sequences[0]
        for token_id in tokenizer.encode(TEXT):
            processor.process(EngineCoreOutputs(plain_ids=[sequence.core_id], plain_tokens=[token_id]), 1.0)
            processor.detokenize_some()
        assert sequence.text == ""
