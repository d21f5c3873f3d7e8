"""ViT against Transformers: the classes of images and their vectors, in batches of any size, offline and over HTTP."""

import asyncio
import base64
import json

import numpy as np
import pytest
import torch
from PIL import Image
from tests.entrypoints.openai.conftest import serve
from tests.oracles.odd_images import file_of
from tests.oracles.tiny_models import randomize
from tests.oracles.tiny_vision import draw_image

from quire import LLM, AsyncEngineArgs, AsyncLLMEngine
from quire.errors import RequestError

CONFIG = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 28,
    "patch_size": 7, "id2label": {0: "cat", 1: "dog", 2: "hen", 3: "eel"}, "label2id": {"cat": 0, "dog": 1, "hen": 2, "eel": 3},
}  # fmt: skip
PROCESSOR = {"image_processor_type": "ViTImageProcessor", "size": {"height": 28, "width": 28}}
SETTINGS = {"max_num_seqs": 3, "num_gpu_blocks_override": 30}
IMAGES = [draw_image(seed, *size) for seed, size in enumerate([(30, 71), (64, 28), (28, 28), (5, 90)])]
OLD_NAMES = {
    "vit.layers.": "vit.encoder.layer.", "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key", "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense", "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense",
}  # fmt: skip
"""Of published checkpoints."""


def make(path, architecture):
    import transformers

    model = getattr(transformers, architecture)(transformers.ViTConfig(**CONFIG)).eval()
    randomize(model, 11)
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("vit"), "ViTForImageClassification")


@torch.no_grad()
def expected(path, architecture, images):
    import transformers

    model = getattr(transformers, architecture).from_pretrained(str(path), attn_implementation="eager").eval()
    pixels = transformers.AutoImageProcessor.from_pretrained(str(path), backend="pil")(images, return_tensors="pt")
    return model(**pixels)


def prompts_of(images):
    return [{"prompt": "", "multi_modal_data": {"image": pixels}} for pixels in images]


def test_images_have_the_classes_of_transformers(folder):
    probabilities = expected(folder, "ViTForImageClassification", IMAGES).logits.softmax(-1).numpy()
    assert len({each.argmax() for each in probabilities}) > 1
    llm = LLM(model=str(folder), **SETTINGS)
    for order in (1, -1):
        outputs = llm.classify(prompts_of(IMAGES[::order]), use_tqdm=False)
        for output, probs in zip(outputs, probabilities[::order], strict=True):
            np.testing.assert_allclose(output.outputs.probs, probs, atol=1e-5)
    with pytest.raises(RequestError, match="28 x 14"):
        size = {"mm_processor_kwargs": {"size": {"height": 28, "width": 14}}}
        llm.classify([prompts_of(IMAGES)[0] | size], use_tqdm=False)
    with pytest.raises(RequestError, match="one image, not 2"):
        llm.classify(prompts_of([IMAGES[:2]]), use_tqdm=False)


def test_published_names_are_read(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    weights = load_file(folder / "model.safetensors")
    for ours, theirs in OLD_NAMES.items():
        weights = {name.replace(ours, theirs): tensor for name, tensor in weights.items()}
    save_file(weights, tmp_path / "model.safetensors")
    one, other = (LLM(model=str(path), **SETTINGS).classify(prompts_of(IMAGES[:1]))[0] for path in (folder, tmp_path))
    np.testing.assert_allclose(one.outputs.probs, other.outputs.probs, atol=1e-6)


def test_an_encoder_gives_an_images_vector_and_those_of_its_patches(tmp_path):
    path = make(tmp_path, "ViTModel")
    rows = torch.nn.functional.normalize(expected(path, "ViTModel", IMAGES).last_hidden_state, dim=-1).numpy()
    llm = LLM(model=str(path), **SETTINGS)
    for output, vectors in zip(llm.embed(prompts_of(IMAGES), use_tqdm=False), rows, strict=True):
        np.testing.assert_allclose(output.outputs.embedding, vectors[0], atol=1e-5)
    tokens = llm.encode(prompts_of(IMAGES), pooling_task="token_embed", use_tqdm=False)
    for output, vectors in zip(tokens, rows, strict=True):
        np.testing.assert_allclose(np.asarray(output.outputs.data), vectors, atol=1e-5)


def test_an_image_is_classified_over_http(folder):
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(folder), **SETTINGS), core="inproc")
    url = "data:image/png;base64," + base64.b64encode(file_of(Image.fromarray(IMAGES[1]))).decode()
    image = {"type": "image_url", "image_url": {"url": url}}

    async def main():
        bodies = [{"messages": [{"role": "user", "content": [image]}]}, {"input": "a cat"}, {"input": [0, 0]}]
        bodies.append({"messages": [{"role": "user", "content": [image, {"type": "text", "text": "a"}]}]})
        async with serve(engine) as server:
            return [await server.client.post("/classify", json=body) for body in bodies]

    try:
        answer, *refused = asyncio.run(main())
    finally:
        engine.shutdown()
    probabilities = expected(folder, "ViTForImageClassification", IMAGES[1:2]).logits.softmax(-1)[0].numpy()
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["data"]
    np.testing.assert_allclose(found["probs"], probabilities, atol=1e-5)
    assert found["label"] == CONFIG["id2label"][int(probabilities.argmax())]
    assert [each.status_code for each in refused] == [400, 400, 400], [each.text for each in refused]
