"""Models that see through Transformers' own modules, against the whole of Transformers in float32: prompts are what its processor
makes of a text with its images, answers are its model's.
"""

import json
import math

import numpy as np
import pytest
import torch
from tests.oracles.media_parity import CHUNKS, COMMON, FEW_PAGES, SETTINGS, largest_difference
from tests.oracles.tiny_borrowed import CONFIGS, OPTIONS, BorrowedOracle, lacks, make_tiny_borrowed
from tests.oracles.tiny_vision import IMAGE, VisionOracle, draw_image, make_tiny_vision

from quire import LLM, SamplingParams
from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.layers.interface import ModelContext
from quire.layers.vision.borrowed_tower import BorrowedTower

DEFAULT = "DeepseekVLHybridForConditionalGeneration"
IMAGES = {
    name: draw_image(seed, *size)
    for seed, (name, size) in enumerate({"wide": (30, 71), "tall": (64, 28), "small": (29, 28)}.items())
}
PROMPTS = [
    ("four words of text", []),
    ("ab <image> cd", ["wide"]),
    ("<image> x <image> and <image> yz", ["tall", "wide", "small"]),
    ("ab <image> ce", ["wide"]),
    ("what <image> , what <image>", ["small", "small"]),
    ("ab <image> cd", ["tall"]),
    ("a text that is longer than the others, of many tokens", []),
]
CASES = [(DEFAULT, setting) for setting in SETTINGS]
CASES += [
    (f"{name}ForConditionalGeneration", CHUNKS)
    for name in ("Idefics2", "LlavaNextVideo", "Ovis2", "MiniCPMV4_6", "Lfm2Vl", "Kimi_K25", "Aria")
]
OTHERS = [(name, setting) for name in CONFIGS for setting in SETTINGS if (name, setting) not in CASES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def make(architecture):
        if architecture not in made:
            made[architecture] = make_tiny_borrowed(architecture, tmp_path_factory.mktemp("borrowed") / architecture)
        return made[architecture]

    return make


def settings_of(architecture, setting):
    """Of an engine, by one of `SETTINGS`."""
    settings = COMMON | {"max_model_len": 400, "mm_processor_kwargs": OPTIONS.get(architecture)} | SETTINGS[setting]
    if setting == FEW_PAGES:
        settings |= {"max_model_len": 320, "num_gpu_blocks_override": 36}
    if architecture.startswith("DeepseekOcr2"):  # whose images have hundreds of embeddings
        settings |= {"max_model_len": 1000, "num_gpu_blocks_override": 80 if setting == FEW_PAGES else 300}
        settings["max_num_batched_tokens"] = 8 * settings["max_num_batched_tokens"]
    return settings


def ask_and_compare(llm, oracle, prompts, max_tokens):
    """Of each text: what Transformers' processor makes of it, the engine's output, and Transformers' logprobs of the answer."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, allowed_token_ids=list(range(IMAGE))
    )
    marker = oracle.processor.image_token
    asked = [(text.replace("<image>", marker), [IMAGES[name] for name in names]) for text, names in prompts]
    requests = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in asked]
    for (text, images), output in zip(asked, llm.generate(requests, params, use_tqdm=False), strict=True):
        inputs = oracle.inputs(text, images)
        assert output.error is None, output.error
        yield inputs["input_ids"][0].tolist(), output, oracle.logprobs(inputs, output.outputs[0].token_ids)


def assert_sees(llm, oracle, prompts, max_tokens):
    """The engine reads and answers these texts, all at once, as Transformers does."""
    for ids, output, expected in ask_and_compare(llm, oracle, prompts, max_tokens):
        assert list(output.prompt_token_ids) == ids
        assert list(output.outputs[0].token_ids) == expected[:, :IMAGE].argmax(-1).tolist()
        assert largest_difference(expected, output) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(
    ("architecture", "setting"), [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS)]
)
def test_the_engine_sees_what_transformers_sees(architecture, setting, folders):
    if missing := lacks(architecture):
        pytest.skip(f"{', '.join(missing)} is not installed")
    path = folders(architecture)
    settings = settings_of(architecture, setting)
    llm, oracle = LLM(model=str(path), **settings), BorrowedOracle(path, OPTIONS.get(architecture))
    for order in (1, -1):  # the second time, from the other end, with whatever was kept
        assert_sees(llm, oracle, PROMPTS[::order], max_tokens=5)


def test_the_language_model_alone_needs_no_processor(folders):
    path = folders(DEFAULT)
    llm = LLM(model=str(path), language_model_only=True, **COMMON)
    plain, seen = (llm.generate(each, SamplingParams(max_tokens=1), use_tqdm=False)[0] for each in ("text", "<image>"))
    assert plain.error is None and len(seen.prompt_token_ids) == 1


def test_a_model_that_lacks_weights_of_its_eyes_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    path = make_tiny_borrowed(DEFAULT, tmp_path)
    tensors = load_file(path / "model.safetensors")
    lacking = {name: tensor for name, tensor in tensors.items() if "aligner" not in name}
    save_file(lacking, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"the checkpoint lacks weights of what sees: model\.aligner"):
        LLM(model=str(path), **COMMON)


def test_random_weights_see_something(tmp_path):
    path = make_tiny_borrowed(DEFAULT, tmp_path)
    (path / "model.safetensors").unlink()
    llm = LLM(model=str(path), load_format="dummy", **COMMON)
    text, names = PROMPTS[1]
    (output,) = llm.generate(
        {"prompt": text, "multi_modal_data": {"image": [IMAGES[names[0]]]}}, SamplingParams(max_tokens=3)
    )
    assert output.error is None and len(output.outputs[0].token_ids) == 3


REFUSED = {
    "Qwen2VLForConditionalGeneration": "the positions of its tokens are not their numbers",
    "Qwen3VLForConditionalGeneration": "its language model reads deepstack_visual_embeds, visual_pos_masks, too",
    "Gemma3ForConditionalGeneration": "its language model has a mask of its own",
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_images_that_are_more_than_embeddings_are_refused(architecture, tmp_path):
    """The models' own specs see; their modules through the generic way would not."""
    path = make_tiny_vision(architecture, tmp_path)
    oracle, values = VisionOracle(path), json.loads((path / "config.json").read_bytes())
    numbers = dict.fromkeys(("dtype", "kv_dtype", "activation_dtype"), torch.float32)
    sizes = {"block_size": 16, "max_tokens": 8, "max_logits": 1}
    context = ModelContext(**numbers, **sizes, backend=None, path=str(path), hf=HFConfig(values))
    tower = BorrowedTower(context, is_random=False)
    tower.post_load()
    given = {name: np.asarray(each) for name, each in oracle.processor(IMAGES["wide"], return_tensors="np").items()}
    embedded = oracle.model.config.image_token_id
    count = math.prod(given["image_grid_thw"][0]) // 4 if "image_grid_thw" in given else 9
    tokens = np.array([[5, *[embedded] * count, 7]])
    kinds = (tokens == embedded).astype(np.int64)
    given |= {"input_ids": tokens, "places": np.flatnonzero(kinds), "mm_token_type_ids": kinds, "token_type_ids": kinds}
    with pytest.raises(ConfigError, match=REFUSED[architecture]):
        tower.check(given)
