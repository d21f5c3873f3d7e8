"""Opening tokenizers: the same ids, texts and special tokens as Transformers gives; clear errors for what is missing."""

import json
import subprocess
import sys

import pytest

from quire.errors import ConfigError, RequestError
from quire.tokenizers.loader import get_tokenizer, has_tokenizer

FAMILIES = ["byte_level", "sentencepiece", "unigram", "wordpiece"]
TEXTS = ["hello world", "Überraschung 你好 🙂", "a  b\n\tc", "<|im_start|>user\nhi<|im_end|>", ""]


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_texts_and_special_tokens_equal_those_of_transformers(tokenizer_folders, tokenizers_by_family, family):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tokenizer_folders[family]))
    ours = tokenizers_by_family[family]
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special) == ids
            assert ours.encode_batch([text, text], special) == [ids, ids]
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip) == expected
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, name + "_id") == getattr(theirs, name + "_id")
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)
    assert (ours.vocab_size, len(ours)) == (theirs.vocab_size, len(theirs))
    assert ours.get_vocab() == theirs.get_vocab()


def test_a_conversation_becomes_the_same_prompt_as_in_transformers(tokenizer_folders, tokenizers_by_family):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tokenizer_folders["byte_level"]))
    ours = tokenizers_by_family["byte_level"]
    chat = [{"role": "user", "content": "hello"}]
    text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == text
    assert ours.apply_chat_template(chat, add_generation_prompt=True) == theirs.encode(text, add_special_tokens=False)


def test_the_convenience_methods_agree_with_one_another(tokenizers_by_family):
    tokenizer = tokenizers_by_family["byte_level"]
    ids = tokenizer.encode("hello world")
    tokens = tokenizer.tokenize("hello world")
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.convert_tokens_to_ids(tokens) == ids
    assert tokenizer.convert_tokens_to_string(tokens) == "hello world"
    assert tokenizer("hello world") == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert tokenizer("hello world").input_ids == ids
    assert tokenizer("hello world").attention_mask == [1] * len(ids)
    assert tokenizer(["hello world", "hello"]).input_ids == [ids, tokenizer.encode("hello")]
    assert tokenizer("hello world", truncation=True, max_length=2).input_ids == ids[-2:]
    assert tokenizer.batch_decode([ids, ids]) == ["hello world"] * 2
    assert tokenizer.max_token_id == len(tokenizer) - 1
    assert tokenizer.model_max_length == 512


def test_transformers_serves_a_folder_without_tokenizer_json(tmp_path, tokenizers_by_family):
    pytest.importorskip("transformers")
    vocab = {"<|endoftext|>": 0, "h": 1, "i": 2, "hi": 3, "Ġ": 4, "Ġh": 5}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\nĠ h\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.encode("hi hi") == [3, 4, 3]
    assert tokenizer.decode([3, 4, 3]) == "hi hi"
    assert tokenizer.id_to_token(5) == "Ġh"


def test_a_folder_without_tokenizer_files_is_refused_with_the_way_out(tmp_path):
    assert not has_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="skip_tokenizer_init") as caught:
        get_tokenizer(str(tmp_path))
    assert caught.value.setting == "tokenizer"


def test_broken_files_are_config_errors(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        get_tokenizer(str(tmp_path))


def test_an_unknown_mode_is_refused(tokenizer_folders):
    with pytest.raises(ConfigError, match="tokenizer_mode is 'fats'"):
        get_tokenizer(str(tokenizer_folders["unigram"]), "fats")


def test_template_files_and_the_setting_come_before_the_config(tokenizer_folders, tmp_path):
    for file in tokenizer_folders["byte_level"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert get_tokenizer(str(tmp_path)).chat_template == "from the file"
    assert (
        get_tokenizer(str(tmp_path), chat_template="{{ 'from the setting' }}").chat_template
        == "{{ 'from the setting' }}"
    )
    other = tmp_path / "other.jinja"
    other.write_text("another file")
    assert get_tokenizer(str(tmp_path), chat_template=str(other)).chat_template == "another file"
    with pytest.raises(ConfigError, match="neither a template nor a readable file"):
        get_tokenizer(str(tmp_path), chat_template="no-such-file")


def test_add_bos_token_overrules_the_post_processor_of_llama_classes(tokenizer_folders, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folders["sentencepiece"] / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    for add_bos, add_eos in [(True, False), (False, False), (True, True), (False, True)]:
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({**config, "add_bos_token": add_bos, "add_eos_token": add_eos})
        )
        ids = get_tokenizer(str(tmp_path)).encode("hello")
        assert (ids[0] == 1, ids[-1] == 2) == (add_bos, add_eos)


def test_text_that_is_not_unicode_is_a_request_error(tokenizers_by_family):
    with pytest.raises(RequestError) as caught:
        tokenizers_by_family["byte_level"].encode("\ud800")
    assert caught.value.param == "prompt"


def test_opening_a_tokenizer_imports_neither_torch_nor_transformers(tokenizer_folders):
    code = (
        "import sys; from quire.tokenizers.loader import get_tokenizer; "
        f"get_tokenizer({str(tokenizer_folders['byte_level'])!r}); "
        "assert not {'torch', 'transformers', 'jinja2'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
