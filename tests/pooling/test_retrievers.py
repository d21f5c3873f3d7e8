"""Models that make a vector of each token of texts and of images, and decoders that embed images, against Transformers."""

import asyncio
import base64
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from tests.entrypoints.openai.conftest import serve
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.oracles.odd_images import file_of
from tests.oracles.tiny_models import randomize
from tests.oracles.tiny_vision import CONFIGS, IMAGE, draw_image, make_tiny_vision

from quire import LLM, AsyncEngineArgs, AsyncLLMEngine
from quire.executor import selector
from quire.tokenizers.loader import get_tokenizer

SEES = CONFIGS["Qwen2VLForConditionalGeneration"] | {"tie_word_embeddings": False}
SIZES = [(30, 71), (64, 28), (28, 28)]
IMAGES = [draw_image(seed, *size) for seed, size in enumerate(SIZES)]
PROMPTS = [
    ([5, 6, 7, 8], []),
    ([302, IMAGE, 303, 9, 10], [0]),
    ([11, 302, IMAGE, 303, 12, 302, IMAGE, 303, 14], [1, 2]),
    ([302, IMAGE, 303, 9, 11], [0]),
    ([21 + number for number in range(30)], []),
]
SETTINGS = {"max_model_len": 256, "num_gpu_blocks_override": 80, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return make_tiny_vision("Qwen2VLForConditionalGeneration", tmp_path_factory.mktemp("qwen2_vl"), seed=4)


@pytest.fixture(scope="module")
def folder(decoder, tmp_path_factory):
    """A retriever, with the decoder's tokenizer and processor."""
    import transformers

    path = tmp_path_factory.mktemp("colqwen2") / "model"
    shutil.copytree(decoder, path)
    config = transformers.ColQwen2Config(vlm_config=SEES | {"model_type": "qwen2_vl"}, embedding_dim=16)
    model = transformers.ColQwen2ForRetrieval(config).eval()
    randomize(model, 3)
    model.save_pretrained(path)
    return path


class Oracle:
    """Transformers' vectors of each token of one prompt."""

    def __init__(self, path, model_class):
        import transformers

        self.model = getattr(transformers, model_class).from_pretrained(str(path), attn_implementation="eager").eval()
        self.processor = transformers.AutoImageProcessor.from_pretrained(str(path), backend="pil")

    def given(self, token_ids, pixels):
        """What the model reads of a prompt."""
        if not pixels:
            return {"input_ids": torch.tensor([token_ids])}
        seen = self.processor(pixels, return_tensors="pt")
        counts = iter((seen["image_grid_thw"].prod(-1) // 4).tolist())
        expanded = [each for token in token_ids for each in [token] * (next(counts) if token == IMAGE else 1)]
        ids = torch.tensor([expanded])
        return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), **seen}


class RetrieverOracle(Oracle):
    @torch.no_grad()
    def vectors(self, token_ids, pixels):
        given = self.given(token_ids, pixels)
        if pixels:  # its forward wants each image's patches filled up to the longest's, one image a prompt
            vlm = self.model.vlm(**given)
            found = self.model.embedding_proj_layer(vlm.last_hidden_state)
            return torch.nn.functional.normalize(found, dim=-1)[0].numpy()
        return self.model(**given).embeddings[0].numpy()


def prompt_of(token_ids, numbers):
    images = [IMAGES[number] for number in numbers]
    return {"prompt_token_ids": token_ids} | ({"multi_modal_data": {"image": images}} if images else {})


@pytest.mark.parametrize(("chunk", "is_beside"), [(256, False), (23, False), (64, True)])
def test_each_token_of_texts_and_images_becomes_the_vector_of_transformers(folder, chunk, is_beside, monkeypatch):
    """Also on a device that works beside the host."""
    if is_beside:
        platform = AsyncCpuPlatform()
        monkeypatch.setattr(selector, "current_platform", lambda _name: platform)
    oracle, prompts = RetrieverOracle(folder, "ColQwen2ForRetrieval"), [prompt_of(*each) for each in PROMPTS]
    expected = [oracle.vectors(ids, [IMAGES[number] for number in numbers]) for ids, numbers in PROMPTS]
    llm = LLM(model=str(folder), max_num_batched_tokens=chunk, **SETTINGS)
    for order in (1, -1):
        for output, vectors in zip(llm.encode(prompts[::order], use_tqdm=False), expected[::order], strict=True):
            np.testing.assert_allclose(np.asarray(output.outputs.data), vectors, atol=1e-4)
    [output] = llm.embed(prompts[:1], use_tqdm=False)
    np.testing.assert_allclose(output.outputs.data, expected[0], atol=1e-4)


def test_colpali_sees_in_both_directions(tmp_path):
    """Texts and pages of one batch."""
    import transformers

    path = make_tiny_vision("PaliGemmaForConditionalGeneration", tmp_path, seed=4)
    vlm = transformers.PaliGemmaConfig(**CONFIGS["PaliGemmaForConditionalGeneration"])
    model = transformers.ColPaliForRetrieval(transformers.ColPaliConfig(vlm_config=vlm.to_dict(), embedding_dim=16))
    randomize(model.eval(), 3)
    model.save_pretrained(path)
    oracle, llm = Oracle(path, "ColPaliForRetrieval"), LLM(model=str(path), **SETTINGS)
    (newline,) = llm.get_tokenizer().encode("\n")
    prompts = [([5, 6, 7, 8], None), ([21, 22], 0), ([], 1), ([9, 10, 11], 0)]
    given = [prompt_of([0, *ids], [] if number is None else [number]) for ids, number in prompts]
    for order in (1, -1):
        outputs = llm.encode(given[::order], use_tqdm=False)
        for output, (ids, number) in zip(outputs, prompts[::order], strict=True):
            whole = [0, *ids] if number is None else [IMAGE] * 25 + [0, *ids, newline]
            seen = {} if number is None else oracle.processor([IMAGES[number]], return_tensors="pt")
            tokens = torch.tensor([whole])
            with torch.no_grad():
                vectors = oracle.model(input_ids=tokens, token_type_ids=torch.zeros_like(tokens), **seen).embeddings[0]
            np.testing.assert_allclose(np.asarray(output.outputs.data), vectors.numpy(), atol=1e-4)


def test_a_decoder_that_sees_embeds_images(decoder):
    oracle, llm = (
        Oracle(decoder, "Qwen2VLForConditionalGeneration"),
        LLM(model=str(decoder), runner="pooling", **SETTINGS),
    )
    outputs = llm.embed([prompt_of(*each) for each in PROMPTS], use_tqdm=False)
    for output, (ids, numbers) in zip(outputs, PROMPTS, strict=True):
        with torch.no_grad():
            hidden = oracle.model.model(**oracle.given(ids, [IMAGES[n] for n in numbers])).last_hidden_state[0, -1]
        vector = torch.nn.functional.normalize(hidden, dim=0).numpy()
        np.testing.assert_allclose(output.outputs.embedding, vector, atol=1e-4)


def test_a_message_shows_an_image_in_the_models_own_template(folder):
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(folder), **SETTINGS), core="inproc")
    url = "data:image/png;base64," + base64.b64encode(file_of(Image.fromarray(IMAGES[0]))).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "see"}]
    broken = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url[:200]}}]

    async def main():
        async with serve(engine) as server:
            bodies = [{"messages": [{"role": "user", "content": each}]} for each in (parts, broken)]
            answers = [await server.client.post("/pooling", json=body) for body in bodies]
            body = {"query": "see", "documents": [{"content": parts}, "sea"]}
            return [*answers, await server.client.post("/rerank", json=body)]

    try:
        answer, refused, ranked = asyncio.run(main())
    finally:
        engine.shutdown()
    assert answer.status_code == 200, answer.text
    ids = get_tokenizer(str(folder)).encode("<|im_start|>user\n<image>see<|im_end|>\n", add_special_tokens=True)
    expected = RetrieverOracle(folder, "ColQwen2ForRetrieval").vectors(ids, [IMAGES[0]])
    np.testing.assert_allclose(answer.json()["data"][0]["data"], expected, atol=1e-4)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages[0].content[1].image_url"
    llm = LLM(model=str(folder), **SETTINGS)
    asked, other = (np.asarray(each.outputs.data) for each in llm.encode(["see", "sea"], use_tqdm=False))
    scores = [float((asked @ found.T).max(1).sum()) for found in (expected, other)]
    results = {each["index"]: each["relevance_score"] for each in ranked.json()["results"]}
    np.testing.assert_allclose([results[0], results[1]], scores, atol=1e-3)
    offline = llm.score("see", [{"content": parts}, "sea"], use_tqdm=False)
    np.testing.assert_allclose([each.outputs.score for each in offline], scores, atol=1e-3)
