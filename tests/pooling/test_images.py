"""CLIP and SigLIP against Transformers: vectors of texts and of images, in one batch, in any steps, offline and over HTTP."""

import asyncio
import base64
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from tests.entrypoints.openai.conftest import serve
from tests.oracles.tiny_models import randomize, write_tiny_tokenizer
from tests.oracles.tiny_vision import draw_image

from quire import LLM, AsyncEngineArgs, AsyncLLMEngine
from quire.errors import RequestError

TEXT = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = TEXT | {"hidden_size": 48, "image_size": 28, "patch_size": 7}
CONFIGS = {
    "CLIPModel": {
        "text_config": TEXT | {"max_position_embeddings": 24, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 1},
        "vision_config": VISION,
        "projection_dim": 16,
    },
    "SiglipModel": {
        "text_config": TEXT | {"max_position_embeddings": 24, "projection_size": 48, "pad_token_id": 1},
        "vision_config": VISION,
    },
}
PROCESSORS = {
    "CLIPModel": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 28},
        "crop_size": {"height": 28, "width": 28},
    },
    "SiglipModel": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 28, "width": 28}},
}
SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 30, "num_gpu_blocks_override": 40}
TEXTS = [[0, 5, 6, 1], [0, 9, 8, 7, 44, 45, 46, 1], [0, 300, 1]]
IMAGES = [draw_image(seed, *size) for seed, size in enumerate([(30, 71), (64, 28), (28, 28)])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    import transformers

    made = {}

    def make(architecture):
        if architecture not in made:
            path = made[architecture] = tmp_path_factory.mktemp(architecture)
            model_class = getattr(transformers, architecture)
            model = model_class(model_class.config_class(**CONFIGS[architecture])).eval()
            randomize(model, 3)
            model.save_pretrained(path)
            write_tiny_tokenizer(path)
            (path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[architecture]))
        return made[architecture]

    return make


class Oracle:
    """Transformers' vectors of one length."""

    def __init__(self, path, architecture):
        import transformers

        self.model = getattr(transformers, architecture).from_pretrained(str(path), attn_implementation="eager").eval()
        self.processor = transformers.AutoImageProcessor.from_pretrained(str(path), backend="pil")
        self.length = self.model.config.text_config.max_position_embeddings if architecture == "SiglipModel" else 0

    @torch.no_grad()
    def text(self, token_ids):
        token_ids = token_ids + [1] * (self.length - len(token_ids))
        found = self.model.get_text_features(input_ids=torch.tensor([token_ids])).pooler_output[0]
        return torch.nn.functional.normalize(found, dim=0).numpy()

    @torch.no_grad()
    def image(self, pixels):
        given = self.processor([pixels], return_tensors="pt")
        return torch.nn.functional.normalize(self.model.get_image_features(**given).pooler_output[0], dim=0).numpy()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_texts_and_images_become_the_vectors_of_transformers(architecture, folders):
    path = folders(architecture)
    llm, oracle = LLM(model=str(path), **SETTINGS), Oracle(path, architecture)
    prompts = [{"prompt_token_ids": ids} for ids in TEXTS]
    prompts += [{"prompt": "", "multi_modal_data": {"image": pixels}} for pixels in IMAGES]
    expected = [oracle.text(ids) for ids in TEXTS] + [oracle.image(pixels) for pixels in IMAGES]
    for order in (1, -1):
        outputs = llm.embed(prompts[::order], use_tqdm=False)
        for output, vector in zip(outputs, expected[::order], strict=True):
            np.testing.assert_allclose(output.outputs.embedding, vector, atol=1e-4)
    for wrong in (
        {"prompt": "a", "multi_modal_data": {"image": IMAGES[0]}},
        {"prompt": "", "multi_modal_data": {"image": IMAGES}},
    ):
        with pytest.raises(RequestError, match=r"text or an image|one image, not 3"):
            llm.embed([wrong], use_tqdm=False)


def part_of(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def test_texts_and_images_are_scored(folders):
    path = folders("CLIPModel")
    oracle, shown = Oracle(path, "CLIPModel"), [part_of(pixels) for pixels in IMAGES]
    llm = LLM(model=str(path), **SETTINGS)
    asked = np.array(llm.embed("a cat", use_tqdm=False)[0].outputs.embedding)
    expected = [float(asked @ oracle.image(pixels)) for pixels in IMAGES]
    whole = {"content": shown}
    for data in (whole, shown, [{"content": [part]} for part in shown]):
        scores = [output.outputs.score for output in llm.score("a cat", data, use_tqdm=False)]
        np.testing.assert_allclose(scores, expected, atol=1e-4)
    (same,) = llm.score(shown[0], [{"content": [{"type": "image", "image": IMAGES[0]}]}], use_tqdm=False)
    assert same.outputs.score == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(RequestError, match="parts of a message"):
        llm.score("a cat", [{"image": IMAGES[0]}], use_tqdm=False)
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(path), **SETTINGS), core="inproc")
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

    async def main():
        async with serve(engine) as server:
            post = server.client.post
            return [
                await post("/score", json={"queries": "a cat", "documents": whole}),
                await post("/rerank", json={"query": "a cat", "documents": [*shown, {"text": "a cat"}]}),
                await post("/score", json={"text_1": "a cat", "text_2": [shown[0], broken]}),
            ]

    try:
        scored, ranked, refused = asyncio.run(main())
    finally:
        engine.shutdown()
    np.testing.assert_allclose([each["score"] for each in scored.json()["data"]], expected, atol=1e-4)
    first, second, *_ = ranked.json()["results"]
    assert first["index"] == 3 and first["document"]["text"] == "a cat"
    assert second["document"]["multi_modal"] == shown[second["index"]]
    assert second["index"] == int(np.argmax(expected))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "text_2[1]", refused.text


def test_an_image_comes_as_a_message(folders):
    path = folders("CLIPModel")
    image = part_of(IMAGES[0])
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(path), **SETTINGS), core="inproc")

    def message(content):
        return {"messages": [{"role": "user", "content": content}]}

    async def main():
        bodies = [
            message([image]),
            message("a cat"),
            {"input": "a cat"},
            message([{"type": "text", "text": "a"}, image]),
        ]
        bodies.append(message([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]))
        async with serve(engine) as server:
            return [await server.client.post("/v1/embeddings", json=body) for body in bodies]

    try:
        answers = asyncio.run(main())
    finally:
        engine.shutdown()
    assert [answer.status_code for answer in answers] == [200, 200, 200, 400, 400], [answer.text for answer in answers]
    seen, said, plain = (next(entry["embedding"] for entry in answer.json()["data"]) for answer in answers[:3])
    np.testing.assert_allclose(seen, Oracle(path, "CLIPModel").image(IMAGES[0]), atol=1e-4)
    np.testing.assert_allclose(said, plain, atol=1e-6)
    both, broken = (answer.json()["error"] for answer in answers[3:])
    assert "text or an image" in both["message"] and broken["param"] == "messages[0].content[0].image_url"
