"""Images that are given as embeddings: the same answers as to their pixels, offline and over HTTP."""

import base64
from typing import Any

import pytest
import torch
from safetensors.torch import save
from starlette.testclient import TestClient
from tests.models.test_parity_vision import IMAGES
from tests.oracles.media_parity import COMMON, assert_parity
from tests.oracles.tiny_vision import IMAGE, VisionOracle, make_tiny_vision

from quire import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app
from quire.errors import RequestError

PARAMS = SamplingParams(
    temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1, detokenize=False, allowed_token_ids=list(range(IMAGE))
)
GRID = "image_grid_thw"


@torch.no_grad()
def embeds_of(oracle: VisionOracle, pixels: Any) -> Any:
    """What Transformers' encoder makes of an image, as users give it."""
    given = oracle.processor([pixels], return_tensors="pt")
    if GRID not in given:
        return oracle.model.model.get_image_features(**given).pooler_output[0]
    seen = oracle.model.model.get_image_features(**given)
    joined = [each[0] if isinstance(each, tuple) else each for each in getattr(seen, "deepstack_features", None) or ()]
    rows = torch.cat([seen.pooler_output[0], *joined], dim=1)
    return {"image_embeds": rows, GRID: given[GRID]}


@pytest.mark.parametrize(
    "architecture",
    ["LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"],
)
def test_embeddings_are_seen_as_the_image_they_were_made_of(architecture, tmp_path):
    path = make_tiny_vision(architecture, tmp_path)
    oracle, llm = VisionOracle(path), LLM(model=str(path), enable_mm_embeds=True, **COMMON)
    wide, small = IMAGES["wide"], IMAGES["small"]
    prompts: list[Any] = [
        ([5, IMAGE, 9], [embeds_of(oracle, wide)], [wide]),
        ([5, IMAGE, 9, IMAGE, 11], [embeds_of(oracle, wide), small], [wide, small]),
        ([7, IMAGE], [embeds_of(oracle, small)], [small]),
    ]
    requests = [{"prompt_token_ids": ids, "multi_modal_data": {"image": given}} for ids, given, _ in prompts]
    for _ in range(2):  # the second time over the prefix cache
        for (_, _, images), output in zip(prompts, llm.generate(requests, PARAMS, use_tqdm=False), strict=True):
            assert_parity(oracle, IMAGE, images, output)


def test_embeddings_that_cannot_be_an_image_are_refused_in_words(tmp_path):
    llava = make_tiny_vision("LlavaForConditionalGeneration", tmp_path / "llava")
    qwen = make_tiny_vision("Qwen2_5_VLForConditionalGeneration", tmp_path / "qwen")
    mistral = make_tiny_vision("Mistral3ForConditionalGeneration", tmp_path / "mistral")
    rows, engines = torch.zeros(16, 64), {}
    for path, given, why in [
        (llava, rows / 0.0, "not finite"),
        (llava, {"image_embeds": rows, GRID: [1, 8, 8]}, "have no image_grid_thw"),
        (llava, {"image_embeds": "text"}, "is no tensor of numbers"),
        (llava, torch.zeros(300, 64), "makes 300 embeddings; at most 256"),
        (qwen, rows, "needs image_grid_thw"),
        (qwen, {"image_embeds": rows, GRID: [1, 8, 6]}, r"16 embeddings are not those of image_grid_thw=\[1, 8, 6\]"),
        (qwen, {"image_embeds": rows, GRID: [1, 64]}, "must be three numbers"),
        (mistral, rows, "reads images as pixels"),
    ]:
        if path not in engines:
            engines[path] = LLM(model=str(path), enable_mm_embeds=True, **COMMON)
        prompt = {"prompt_token_ids": [5, IMAGE], "multi_modal_data": {"image": [given]}}
        with pytest.raises(RequestError, match=why):
            engines[path].generate(prompt, PARAMS, use_tqdm=False)
    closed = LLM(model=str(llava), **COMMON)
    with pytest.raises(RequestError, match="start the engine with enable_mm_embeds"):
        closed.generate({"prompt_token_ids": [5, IMAGE], "multi_modal_data": {"image": rows}}, PARAMS, use_tqdm=False)


def test_a_client_sends_embeddings_as_safetensors(tmp_path):
    path = make_tiny_vision("LlavaForConditionalGeneration", tmp_path)
    oracle = VisionOracle(path)
    text = base64.b64encode(save({"embeds": embeds_of(oracle, IMAGES["wide"]).contiguous()})).decode()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(path), enable_mm_embeds=True, **COMMON))
    with TestClient(build_app(ServerState(ServerSettings(), engine))) as client:

        def ask(part: dict[str, Any]) -> Any:
            body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4, "temperature": 0}
            extra = {"return_token_ids": True, "allowed_token_ids": list(range(3, IMAGE)), "ignore_eos": True}
            return client.post("/v1/chat/completions", json=body | extra)

        for given in (text, {"image_embeds": text}):
            answer = ask({"type": "image_embeds", "image_embeds": given}).json()
            prompt, token_ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
            logprobs = oracle.logprobs(prompt + token_ids, [IMAGES["wide"]])[len(prompt) - 1 : -1]
            assert token_ids == [3 + int(row[3:IMAGE].argmax()) for row in logprobs]
        pickled = base64.b64encode(b"PK\x03\x04rest").decode()
        for given, why in [
            ("@", "must be base64"),
            (pickled, "a pickle"),
            (5, "expected base64"),
            ({GRID: 5}, "expected"),
        ]:
            refused = ask({"type": "image_embeds", "image_embeds": given})
            error = refused.json()["error"]
            assert refused.status_code == 400 and error["param"] == "messages[0].content[0].image_embeds", error
            assert why in error["message"]
        narrow = base64.b64encode(save({"embeds": torch.zeros(16, 63)})).decode()
        refused = ask({"type": "image_embeds", "image_embeds": narrow})
        assert refused.status_code == 400
        assert "image_embeds has 63 columns; an item's embedding has 64" in refused.json()["error"]["message"]
    engine.shutdown()
