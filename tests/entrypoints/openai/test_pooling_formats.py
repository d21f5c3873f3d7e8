"""How routes of pooling models write numbers, where they cut prompts, and Cohere's form of embeddings."""

import base64
import json

import numpy as np
import pytest
from tests.entrypoints.openai.test_number_formats import of_torch
from tests.entrypoints.openai.test_pooling_routes import DOCUMENTS, QUERY, answer, embedder, folder, post, scores, start  # noqa: F401
from tests.oracles.tiny_models import make_tiny_model

INPUTS = {"/v1/embeddings": {}, "/pooling": {"task": "token_embed"}}
TEMPLATE = "{{ instruction or 'plain' }} {{ mark }} {{ messages[0]['content'] }} {{ messages[1]['content'] }}"


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    """An embedding model with prompts of its own."""
    path = make_tiny_model("Qwen3Model", tmp_path_factory.mktemp("prompted"))
    prompts = {"query": "ask: ", "passage": "told: ", "clustering": "group: "}
    (path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    engine = start(path, hf_overrides={"is_matryoshka": True})
    yield engine
    engine.shutdown()


def rows_of(body):
    """Every input's numbers, as JSON has them."""
    return [np.array(entry.get("embedding", entry.get("data")), dtype=np.float32) for entry in body["data"]]


@pytest.mark.parametrize("path", INPUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_base64_holds_the_numbers_in_the_type_that_is_asked_for(path, dtype, embedder):  # noqa: F811
    fields = INPUTS[path] | {"input": DOCUMENTS}
    expected = [of_torch(rows, dtype) for rows in rows_of(answer(embedder, path, **fields))]
    given = answer(embedder, path, **fields, encoding_format="base64", embed_dtype=dtype)["data"]
    assert [base64.b64decode(entry.get("embedding", entry.get("data"))) for entry in given] == expected


@pytest.mark.parametrize("path", INPUTS)
def test_bytes_lie_where_the_metadata_says(path, embedder):  # noqa: F811
    fields = INPUTS[path] | {"input": DOCUMENTS}
    plain = answer(embedder, path, **fields)
    given = post(embedder, path, **fields, encoding_format="bytes", embed_dtype="float16", endianness="big")
    metadata = json.loads(given.headers["metadata"])
    assert given.headers["content-type"] == "application/octet-stream"
    assert (metadata["model"], metadata["usage"]) == (plain["model"], plain["usage"])
    for index, (entry, rows) in enumerate(zip(metadata["data"], rows_of(plain), strict=True)):
        piece = given.content[entry["start"] : entry["end"]]
        assert (entry["index"], entry["embed_dtype"], entry["endianness"]) == (index, "float16", "big")
        np.testing.assert_array_equal(np.frombuffer(piece, ">f2").reshape(entry["shape"]), rows.astype(np.float16))
    assert metadata["data"][-1]["end"] == len(given.content)
    only = post(embedder, path, **fields, encoding_format="bytes_only", embed_dtype="float16", endianness="big")
    assert only.content == given.content and "metadata" not in only.headers


def test_a_header_that_no_client_reads_is_refused(embedder):  # noqa: F811
    refused = post(embedder, "/v1/embeddings", input=["a"] * 1000, encoding_format="bytes")
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "encoding_format" and "'bytes_only'" in error["message"]
    assert len(post(embedder, "/v1/embeddings", input=["a"] * 1000, encoding_format="bytes_only").content) == 256_000


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_prompts_are_cut_where_they_are_asked_to_be(path, embedder):  # noqa: F811
    tokens = list(range(10, 30))
    for side, kept in (("left", tokens[-5:]), ("right", tokens[:5]), (None, tokens[:5])):
        cut = answer(embedder, path, input=tokens, truncate_prompt_tokens=5, truncation_side=side)
        np.testing.assert_array_equal(rows_of(cut), rows_of(answer(embedder, path, input=kept)))


def test_a_template_reads_instructions_and_variables(folder):  # noqa: F811
    engine = start(folder, chat_template=TEMPLATE)
    try:
        for fields, before in (
            ({}, "plain "),
            ({"instruction": "judge"}, "judge "),
            ({"instruction": "judge", "chat_template_kwargs": {"mark": "!", "instruction": "not so"}}, "judge !"),
        ):
            found = scores(answer(engine, "/score", text_1=QUERY, text_2=DOCUMENTS, **fields))
            joined = answer(engine, "/classify", input=[f"{before} {QUERY} {document}" for document in DOCUMENTS])
            np.testing.assert_allclose(found, [entry["probs"][0] for entry in joined["data"]], atol=1e-6)
    finally:
        engine.shutdown()


def test_cohere_s_clients_get_every_type_they_ask_for(embedder):  # noqa: F811
    vectors = np.array(rows_of(answer(embedder, "/v1/embeddings", input=DOCUMENTS)))
    types = ["float", "base64", "ubinary", "binary"]
    body = answer(embedder, "/v2/embed", texts=DOCUMENTS, embedding_types=types, input_type="classification")
    told = body["embeddings"]
    np.testing.assert_allclose(told["float"], vectors, atol=1e-6)
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in told["base64"]]
    np.testing.assert_array_equal(decoded, np.array(told["float"], dtype=np.float32))
    bits = np.unpackbits(np.array(told["ubinary"], dtype=np.uint8), axis=1)
    np.testing.assert_array_equal(bits, vectors > 0)
    np.testing.assert_array_equal(np.array(told["binary"]) + 128, told["ubinary"])
    tokens = answer(embedder, "/v1/embeddings", input=DOCUMENTS)["usage"]["prompt_tokens"]
    assert (body["response_type"], body["texts"]) == ("embeddings_by_type", DOCUMENTS)
    assert body["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": tokens, "image_tokens": 0},
    }
    parts = [
        {"content": [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]} for text in DOCUMENTS
    ]
    assert answer(embedder, "/v2/embed", inputs=parts)["embeddings"] == {"float": told["float"]}


def test_what_a_text_is_for_must_be_a_known_word(embedder):  # noqa: F811
    response = post(embedder, "/v2/embed", texts=DOCUMENTS, input_type="search_querry")
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "input_type" and "search_query" in error["message"]


@pytest.mark.parametrize(
    ("input_type", "start_of"),
    [
        ("search_query", "ask: "),
        ("search_document", "told: "),
        ("clustering", "group: "),
        ("classification", ""),
        (None, ""),
    ],
)
def test_what_a_text_is_for_chooses_the_model_s_own_prompt(prompted, input_type, start_of):
    texts = [start_of + document for document in DOCUMENTS]
    expected = rows_of(answer(prompted, "/v1/embeddings", input=texts, dimensions=8))
    found = answer(prompted, "/v2/embed", texts=DOCUMENTS, input_type=input_type, output_dimension=8)
    np.testing.assert_allclose(found["embeddings"]["float"], expected, atol=1e-6)


@pytest.mark.parametrize(("truncate", "side"), [("END", "right"), ("START", "left"), (None, "right")])
def test_cohere_s_texts_are_cut_at_either_end(embedder, truncate, side):  # noqa: F811
    long = " ".join(map(str, range(200)))
    for fields, keep in (({}, -1), ({"max_tokens": 7}, 7)):
        found = answer(embedder, "/v2/embed", texts=[long], truncate=truncate, **fields)["embeddings"]["float"]
        cut = answer(embedder, "/v1/embeddings", input=long, truncate_prompt_tokens=keep, truncation_side=side)
        np.testing.assert_allclose(found, rows_of(cut), atol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v2/embed", {}, "texts"),
        ("/v2/embed", {"texts": [], "model": None}, "texts"),
        ("/v2/embed", {"texts": ["a"], "inputs": []}, "texts"),
        ("/v2/embed", {"inputs": [{"content": []}]}, "inputs[0].content"),
        ("/v2/embed", {"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0].content[0]"),
        ("/v2/embed", {"texts": ["a"], "images": ["data:"]}, "images"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["float", "int8"]}, "embedding_types"),
        ("/v2/embed", {"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ("/v2/embed", {"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        ("/v2/embed", {"texts": ["a " * 500], "truncate": "NONE"}, "texts"),
        ("/v2/embed", {"texts": ["a"], "output_dimension": 8}, "output_dimension"),
        ("/v2/embed", {"texts": ["a"], "output_dimension": 0}, "output_dimension"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "int4"}, "embed_dtype"),
        ("/v1/embeddings", {"input": "a", "truncation_side": "middle"}, "truncation_side"),
        ("/score", {"text_1": "a", "text_2": "b", "truncation_side": "left"}, "truncation_side"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "judge"}, "instruction"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(path, body, param, embedder):  # noqa: F811
    response = post(embedder, path, **body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param, response.text


@pytest.mark.parametrize("fields", [{"instruction": "judge"}, {"chat_template_kwargs": {"a": 1}}])
def test_without_a_template_nothing_reads_instructions(folder, fields):  # noqa: F811
    engine = start(folder)
    try:
        error = post(engine, "/score", text_1="a", text_2="b", **fields).json()["error"]
    finally:
        engine.shutdown()
    assert error["param"] == next(iter(fields)) and "--chat-template" in error["message"]
