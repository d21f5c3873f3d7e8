"""The requests of a load: lengths, sharing, files, what is refused."""

import argparse
import json

import pytest

from quire.benchmarks import datasets
from quire.engine.arg_parser import ArgumentParser, add_flags
from quire.errors import ConfigError


def parse(*words: str) -> argparse.Namespace:
    parser = ArgumentParser(prog="t")
    add_flags(parser, datasets.flags(num_prompts=6, input_len=20, output_len=5))
    return parser.parse_args(list(words))


def load(*words: str, seed: int = 0, count=len) -> list[datasets.Sample]:
    return datasets.load_samples(parse(*words), seed, 500, count)


def test_random_prompts_have_exact_lengths_and_their_seed():
    samples = load()
    assert [(len(one.prompt), one.prompt_len, one.output_len) for one in samples] == [(20, 20, 5)] * 6
    assert all(10 <= token < 490 for one in samples for token in one.prompt)
    assert samples == load() != load(seed=1)
    assert len({tuple(one.prompt[:4]) for one in samples}) == 6


def test_a_shared_prefix_comes_before_the_rest():
    samples = load("--random-prefix-len", "8", "--random-input-len", "4")
    assert {one.prompt_len for one in samples} == {12} and len({tuple(one.prompt[:8]) for one in samples}) == 1
    assert len({tuple(one.prompt[8:]) for one in samples}) == 6


def test_lengths_vary_within_their_range():
    samples = load("--num-prompts", "200", "--random-range-ratio", "0.5", "--random-output-len", "10")
    inputs, outputs = {one.prompt_len for one in samples}, {one.output_len for one in samples}
    assert min(inputs) == 10 and max(inputs) == 30 and min(outputs) == 5 and max(outputs) == 15


def test_general_lengths_win_over_a_data_sets_own():
    assert (
        load("--input-len", "3", "--random-input-len", "9", "--output-len", "2")[0]
        == load("--random-input-len", "3", "--random-output-len", "2")[0]
    )


def test_prefix_repetition_uses_each_prefix_equally_often():
    flags = ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "3"]
    samples = load(*flags, "--prefix-repetition-prefix-len", "7", "--prefix-repetition-suffix-len", "2")
    prefixes = [tuple(one.prompt[:7]) for one in samples]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [2, 2, 2]
    assert {(one.prompt_len, one.output_len) for one in samples} == {(9, 128)}


def test_warm_ups_have_the_length_and_not_the_beginning():
    one = load()[0]
    warm = [one.altered(number) for number in range(2)]
    assert [len(sample.prompt) for sample in warm] == [20, 20] and warm[0].prompt[:2] != one.prompt[:2]
    text = datasets.Sample("abc", None, 4)
    assert text.altered(1).prompt.endswith("abc") and text.altered(1).prompt != "abc"
    chat = datasets.Sample([{"role": "user", "content": "x"}], None, 4)
    assert len(chat.altered(0).prompt) == 2 and chat.altered(0).prompt[1:] == chat.prompt


@pytest.fixture
def sharegpt(tmp_path):
    def talk(*values: str) -> dict:
        return {"conversations": [{"from": "human", "value": value} for value in values]}

    entries = [talk("four", "answer!"), talk("alone"), talk("abc", "short"), talk("x" * 1025, "long enough")]
    entries += [talk("fine prompt", "abc"), talk("another one", "y" * 40), talk("z" * 1000, "w" * 1049)]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(entries))
    return str(path)


def test_sharegpt_takes_first_turns_and_the_answers_lengths(sharegpt):
    flags = ["--dataset-name", "sharegpt", "--dataset-path", sharegpt, "--disable-shuffle"]
    samples = load(*flags, "--no-oversample")
    assert [(one.prompt, one.prompt_len, one.output_len) for one in samples] == [
        ("four", 4, 7),
        ("another one", 11, 40),
    ]
    assert len(load(*flags)) == 6 and set(load(*flags)) == set(samples)
    fixed = load(*flags, "--no-oversample", "--sharegpt-output-len", "3")
    assert [(one.prompt[:4], one.output_len) for one in fixed] == [("four", 3), ("fine", 3), ("anot", 3), ("zzzz", 3)]


def test_sharegpt_without_a_tokenizer_names_the_flag(sharegpt):
    with pytest.raises(ConfigError, match="--tokenizer"):
        load("--dataset-name", "sharegpt", "--dataset-path", sharegpt, count=None)


def test_custom_lines_are_texts_ids_or_messages(tmp_path):
    path = tmp_path / "own.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "a"}, {"prompt": [4, 5], "output_tokens": 9}, {"messages": messages, "output_tokens": 2}]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle", "--no-oversample"]
    samples = load(*flags, "--custom-output-len", "7")
    assert [(one.prompt, one.prompt_len, one.output_len) for one in samples] == [
        ("a", None, 7),
        ([4, 5], 2, 7),
        (messages, None, 7),
    ]
    with pytest.raises(ConfigError, match=r"output_tokens.*line 1"):
        load(*flags, "--custom-output-len", "-1")
    path.write_text("\n".join(map(json.dumps, lines[1:])))
    assert [one.output_len for one in load(*flags, "--custom-output-len", "-1")] == [9, 2]


def test_shuffling_follows_the_seed(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": str(number)}) for number in range(30)))
    flags = ["--dataset-name", "custom", "--dataset-path", str(path)]
    first = [one.prompt for one in load(*flags)]
    assert first == [one.prompt for one in load(*flags)] != [one.prompt for one in load(*flags, seed=1)]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), ("{broken", "JSON lines"), ('{"text": "x"}', "neither"), ("", "no usable entry")],
)
def test_files_that_cannot_be_used_are_refused(tmp_path, content, message):
    path = tmp_path / "own.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message) as refusal:
        load("--dataset-name", "custom", "--dataset-path", str(path))
    assert refusal.value.setting == "dataset_path"


def test_a_file_must_be_named_and_a_share_be_one():
    with pytest.raises(ConfigError, match="--dataset-path"):
        load("--dataset-name", "custom")
    with pytest.raises(ConfigError, match="share"):
        parse("--random-range-ratio", "1.5")
