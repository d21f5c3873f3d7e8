"""Scores, ranks, classes and the pooler's own numbers over HTTP, of real (tiny) models."""

import asyncio
import base64

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.entrypoints.openai.conftest import serve
from tests.entrypoints.openai.test_openai_fuzz import JSON
from tests.oracles.fake_async_llm import FakeAsyncLLM
from tests.oracles.tiny_models import make_tiny_model

from quire import AsyncEngineArgs, AsyncLLMEngine
from quire.entrypoints.pooling_api.pooling_protocol import (
    ClassificationRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)

SETTINGS = {
    "max_model_len": 128,
    "num_gpu_blocks_override": 200,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
QUERY = "how tall"
DOCUMENTS = ["three hundred metres", "a river", "tall", "nobody knows it"]
TEMPLATE = "{{ messages[1]['content'] }} answers {{ messages[0]['content'] }}"


def start(path, **settings):
    args = AsyncEngineArgs(model=str(path), **SETTINGS | settings)
    return AsyncLLMEngine.from_engine_args(args, core="inproc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("Qwen3ForSequenceClassification", tmp_path_factory.mktemp("cross"), num_labels=1)


@pytest.fixture(scope="module")
def cross_encoder(folder):
    engine = start(folder)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    engine = start(make_tiny_model("Qwen3Model", tmp_path_factory.mktemp("embeds")))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    labels = {0: "bad", 1: "fair", 2: "good"}
    path = make_tiny_model("Qwen3ForSequenceClassification", tmp_path_factory.mktemp("classes"), id2label=labels)
    engine = start(path)
    yield engine
    engine.shutdown()


def post(engine, path, **body):
    async def main():
        async with serve(engine) as server:
            return await server.client.post(path, json=body)

    return asyncio.run(main())


def answer(engine, path, **body):
    response = post(engine, path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def scores(body):
    assert [entry["index"] for entry in body["data"]] == list(range(len(body["data"])))
    return [entry["score"] for entry in body["data"]]


def test_a_cross_encoder_scores_the_joined_pair(cross_encoder):
    body = answer(cross_encoder, "/score", text_1=QUERY, text_2=DOCUMENTS)
    joined = [cross_encoder.get_tokenizer().encode_pair(QUERY, document)[0] for document in DOCUMENTS]
    classes = answer(cross_encoder, "/classify", input=joined)
    np.testing.assert_allclose(scores(body), [entry["probs"][0] for entry in classes["data"]], atol=1e-6)
    assert len(set(scores(body))) == 4 and body["id"].startswith("score-") and body["object"] == "list"
    assert body["usage"] == classes["usage"] and body["usage"]["prompt_tokens"] == sum(map(len, joined))
    raw = np.array(scores(answer(cross_encoder, "/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False)))
    np.testing.assert_allclose(1 / (1 + np.exp(-raw)), scores(body), atol=1e-5)


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
)
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_every_pair_of_names_gives_the_same_scores(names, path, cross_encoder):
    one = answer(cross_encoder, path, **{names[0]: QUERY, names[1]: DOCUMENTS})
    many = answer(cross_encoder, path, **{names[0]: [QUERY] * 4, names[1]: DOCUMENTS})
    expected = scores(answer(cross_encoder, "/score", text_1=QUERY, text_2=DOCUMENTS))
    np.testing.assert_allclose([scores(one), scores(many)], [expected] * 2, atol=1e-6)


def test_of_an_embedding_model_a_score_is_the_cosine(embedder):
    found = scores(answer(embedder, "/score", text_1=QUERY, text_2=DOCUMENTS))
    vectors = np.array(
        [entry["embedding"] for entry in answer(embedder, "/v1/embeddings", input=[QUERY, *DOCUMENTS])["data"]]
    )
    np.testing.assert_allclose(found, vectors[1:] @ vectors[0], atol=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("kind", ["cross_encoder", "embedder"])
def test_documents_are_ranked_by_their_scores(path, kind, request):
    engine = request.getfixturevalue(kind)
    expected = scores(answer(engine, "/score", text_1=QUERY, text_2=DOCUMENTS))
    results = answer(engine, path, query=QUERY, documents=DOCUMENTS)["results"]
    order = sorted(range(4), key=lambda index: -expected[index])
    assert [result["index"] for result in results] == order
    np.testing.assert_allclose([result["relevance_score"] for result in results], sorted(expected)[::-1], atol=1e-6)
    assert [result["document"]["text"] for result in results] == [DOCUMENTS[index] for index in order]
    as_objects = [{"text": document, "title": "x"} for document in DOCUMENTS]
    best = answer(engine, path, query=QUERY, documents=as_objects, top_n=2, return_documents=False)["results"]
    assert [set(result) for result in best] == [{"index", "relevance_score"}] * 2
    assert [result["index"] for result in best] == order[:2]


def test_queries_and_documents_may_be_cut_each(cross_encoder):
    tokenizer = cross_encoder.get_tokenizer()
    cut = [tokenizer.decode(tokenizer.encode(document, add_special_tokens=False)[:4]) for document in DOCUMENTS]
    short_query = tokenizer.decode(tokenizer.encode(QUERY, add_special_tokens=False)[:3])
    expected = scores(answer(cross_encoder, "/score", text_1=short_query, text_2=cut))
    found = answer(
        cross_encoder, "/score", text_1=QUERY, text_2=DOCUMENTS, max_tokens_per_doc=4, max_tokens_per_query=3
    )
    np.testing.assert_allclose(scores(found), expected, atol=1e-6)
    uncut = answer(
        cross_encoder, "/score", text_1=QUERY, text_2=DOCUMENTS, max_tokens_per_doc=0, max_tokens_per_query=0
    )
    whole = answer(cross_encoder, "/score", text_1=QUERY, text_2=DOCUMENTS)
    np.testing.assert_allclose(scores(uncut), scores(whole), atol=1e-6)


def test_the_operators_template_joins_pairs(folder):
    engine = start(folder, chat_template=TEMPLATE)
    try:
        found = scores(answer(engine, "/score", text_1=QUERY, text_2=DOCUMENTS))
        joined = answer(engine, "/classify", input=[f"{document} answers {QUERY}" for document in DOCUMENTS])
    finally:
        engine.shutdown()
    np.testing.assert_allclose(found, [entry["probs"][0] for entry in joined["data"]], atol=1e-6)


def test_a_classifier_tells_the_likeliest_label(classifier):
    body = answer(classifier, "/classify", input=DOCUMENTS)
    assert body["id"].startswith("classify-") and [entry["index"] for entry in body["data"]] == [0, 1, 2, 3]
    for entry in body["data"]:
        assert entry["num_classes"] == len(entry["probs"]) == 3 and abs(sum(entry["probs"]) - 1) < 1e-5
        assert entry["label"] == ["bad", "fair", "good"][int(np.argmax(entry["probs"]))]
    raw = answer(classifier, "/classify", input=DOCUMENTS[0], use_activation=False)["data"][0]["probs"]
    assert abs(sum(raw) - 1) > 1e-3


def test_a_conversation_is_an_input(classifier, embedder):
    messages = [{"role": "user", "content": "hello"}]
    for engine, path in ((classifier, "/classify"), (classifier, "/pooling"), (embedder, "/v1/embeddings")):
        tokens = answer(engine, "/tokenize", messages=messages, add_generation_prompt=False)["tokens"]
        of_tokens, of_messages = answer(engine, path, input=tokens), answer(engine, path, messages=messages)
        assert of_tokens["usage"] == of_messages["usage"]
        values = [
            np.hstack([np.ravel(body["data"][0].get(name, [])) for name in ("probs", "data", "embedding")])
            for body in (of_tokens, of_messages)
        ]
        np.testing.assert_allclose(*values, atol=1e-6)


def test_pooling_gives_rows_or_a_vector_as_the_task_says(embedder):
    vector = answer(embedder, "/pooling", input=DOCUMENTS[0], task="embed")["data"][0]
    same = answer(embedder, "/v1/embeddings", input=DOCUMENTS[0])["data"][0]
    assert vector["object"] == "pooling" and vector["data"] == same["embedding"]
    rows = answer(embedder, "/pooling", input=DOCUMENTS[0], task="token_embed")
    assert np.array(rows["data"][0]["data"]).shape == (rows["usage"]["prompt_tokens"], 64)
    encoded = answer(embedder, "/pooling", input=DOCUMENTS[0], task="token_embed", encoding_format="base64")
    decoded = np.frombuffer(base64.b64decode(encoded["data"][0]["data"]), dtype="<f4").reshape(-1, 64)
    np.testing.assert_allclose(decoded, rows["data"][0]["data"], atol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_1": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": "b", "data_1": "a", "data_2": "b"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_2"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["b", 5]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b" * 1000}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2000}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 1000}, "truncate_prompt_tokens"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"title": "x"}]}, "documents[0].text"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/classify", {}, "input"),
        ("/classify", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ("/classify", {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
        ("/pooling", {"input": "a", "task": "sing"}, "task"),
        ("/pooling", {"input": "a", "task": "embed"}, "task"),
        ("/v1/embeddings", {"input": "a"}, "task"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(path, body, param, cross_encoder):
    response = post(cross_encoder, path, **body)
    error = response.json()["error"]
    assert response.status_code == 400 and (error["param"] or "").startswith(param), response.text
    assert scores(answer(cross_encoder, "/score", text_1="a", text_2="b"))


def test_an_input_that_is_too_long_is_refused_in_chats_words(embedder):
    limit = embedder.config.model.max_model_len
    error = post(embedder, "/v1/embeddings", input=[[5] * (limit + 1)]).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "input"
    assert f"maximum context length is {limit} tokens" in error["message"]


@pytest.mark.parametrize("path", ["/score", "/rerank"])
def test_a_classifier_of_several_labels_does_not_score(path, classifier):
    names = ("text_1", "text_2") if path == "/score" else ("query", "documents")
    response = post(classifier, path, **{names[0]: "a", names[1]: ["b"]})
    assert response.status_code == 400 and "3 labels" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}),
        ("/classify", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_a_model_that_generates_refuses_to_pool(path, body):
    response = post(FakeAsyncLLM(), path, **body)
    error = response.json()["error"]
    assert response.status_code == 400 and "--runner pooling" in error["message"] and error["code"] == "not_supported"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_model_that_pools_refuses_to_generate(path, classifier):
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    response = post(classifier, path, **body, max_tokens=2)
    assert response.status_code == 400 and "runs as a pooling model" in response.json()["error"]["message"]


SERVED = {
    "/score": (ScoreRequest, {"text_1": "a", "text_2": ["b"]}),
    "/rerank": (RerankRequest, {"query": "a", "documents": ["b"]}),
    "/classify": (ClassificationRequest, {"input": "a"}),
    "/pooling": (PoolingRequest, {"input": "a"}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "a"}),
    "/v2/embed": (CohereEmbedRequest, {"texts": ["a"]}),
}


@pytest.mark.parametrize("path", SERVED)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_json_in_any_field_is_served_or_refused(path, cross_encoder, data):
    kind, good = SERVED[path]
    fields = st.sampled_from([*kind.__struct_encode_fields__, "unknown"])
    body = good | data.draw(st.dictionaries(fields, JSON, max_size=3))
    response = post(cross_encoder, path, **body)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert scores(answer(cross_encoder, "/score", text_1="a", text_2="b"))
