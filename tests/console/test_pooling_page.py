"""The first tab of a server whose model embeds or scores."""

import pytest
from tests.oracles.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def embedder(start_server, tmp_path_factory):
    return start_server(
        "--model", str(make_tiny_model("Qwen3Model", tmp_path_factory.mktemp("embedder"))), "--max-model-len", "128"
    )


@pytest.fixture(scope="module")
def ranker(start_server, tmp_path_factory):
    path = make_tiny_model("BertForSequenceClassification", tmp_path_factory.mktemp("ranker"), num_labels=1)
    return start_server("--model", str(path), "--max-model-len", "128")


def test_texts_are_compared_and_embedded(open_page, embedder):
    page = open_page(embedder.url)
    assert page.get_by_role("radio", name="Chat").count() == 0
    page.get_by_label("Texts to compare").fill("one two\nthree\none two")
    page.get_by_role("button", name="Compare").click()
    cells = page.locator(".near td")
    cells.first.wait_for()
    values = [float(text) for text in cells.all_inner_texts()]
    assert len(values) == 9 and values[0] == values[2] == 1.0 and values[1] == values[3] < 1.0
    page.get_by_label("Texts to compare").fill("one two\nthree " + "and so on " * 9 + "\none two")
    page.set_viewport_size({"width": 390, "height": 780})
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("and so on").last.wait_for()
    assert page.evaluate("(box => box.scrollWidth <= box.clientWidth)(document.querySelector('.table-box'))")
    page.get_by_role("radio", name="Embed").click()
    page.get_by_role("button", name="Embed").click()
    page.get_by_text("64 numbers each").wait_for()
    page.get_by_role("button", name="Code").click()
    assert "/v1/embeddings" in page.get_by_role("dialog").inner_text()


def test_documents_are_ranked_as_the_server_ranks_them(open_page, ranker):
    page = open_page(ranker.url)
    documents = ["a b", "c d e", "f"]
    page.get_by_label("Question").fill("a")
    page.get_by_label("Documents").fill("\n".join(documents))
    page.get_by_role("button", name="Rank").click()
    page.locator(".ranked li").first.wait_for()
    shown = page.locator(".ranked li > span:first-child").all_inner_texts()
    ranked = ranker.client.post("/v1/rerank", json={"query": "a", "documents": documents}).json()["results"]
    assert shown == [documents[each["index"]] for each in ranked]


def test_scores_above_1_have_bars_of_their_own_lengths(open_page, start_server, tmp_path):
    model, task = str(make_tiny_model("Qwen3Model", tmp_path)), '{"task": "token_embed"}'
    server = start_server("--model", model, "--max-model-len", "128", "--pooler-config", task)
    page = open_page(server.url)
    page.get_by_role("button", name="Rank").click()
    page.locator(".ranked li").first.wait_for()
    assert float(page.locator(".ranked-score").first.inner_text()) > 1
    shares = page.locator(".ranked-bar").evaluate_all("bars => bars.map(bar => bar.style.getPropertyValue('--share'))")
    assert shares[0] == "100%" and len(set(shares)) == 3


def test_what_the_server_refuses_is_told_in_its_words(open_page, embedder):
    page = open_page(embedder.url, expect_errors=True)
    page.get_by_label("Texts to compare").fill("word " * 400)
    page.get_by_role("button", name="Compare").click()
    page.locator(".notice.bad:visible").wait_for()
    assert "maximum context length" in page.locator(".notice.bad:visible").inner_text()
