"""Models that see through Transformers' own modules, against the whole of Transformers in float32: prompts are what its processor
makes of a text with its images, answers are its model's.
"""

import pytest
from tests.oracles.media_parity import CHUNKS, COMMON, FEW_PAGES, SETTINGS
from tests.oracles.tiny_borrowed import CONFIGS, NEEDS, OPTIONS, BorrowedOracle, make_tiny_borrowed
from tests.oracles.tiny_vision import IMAGE, draw_image

from quire import LLM, SamplingParams
from quire.errors import ConfigError

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


def assert_sees(llm, oracle, prompts, max_tokens):
    """The engine reads and answers these texts, all at once, as Transformers does."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, allowed_token_ids=list(range(IMAGE))
    )
    marker = oracle.processor.image_token
    asked = [(text.replace("<image>", marker), [IMAGES[name] for name in names]) for text, names in prompts]
    requests = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in asked]
    for (text, images), output in zip(asked, llm.generate(requests, params, use_tqdm=False), strict=True):
        inputs, (answer,) = oracle.inputs(text, images), output.outputs
        assert output.error is None, output.error
        assert list(output.prompt_token_ids) == inputs["input_ids"][0].tolist()
        expected = oracle.logprobs(inputs, answer.token_ids)
        assert list(answer.token_ids) == expected[:, :IMAGE].argmax(-1).tolist()
        for row, token, own in zip(expected, answer.token_ids, answer.logprobs, strict=True):
            assert own[token].logprob == pytest.approx(float(row[token]), abs=1e-3)


@pytest.mark.parametrize(
    ("architecture", "setting"), [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS)]
)
def test_the_engine_sees_what_transformers_sees(architecture, setting, folders):
    for library in NEEDS.get(architecture, ()):
        pytest.importorskip(library)
    path = folders(architecture)
    settings = COMMON | {"max_model_len": 400, "mm_processor_kwargs": OPTIONS.get(architecture)} | SETTINGS[setting]
    if setting == FEW_PAGES:
        settings |= {"max_model_len": 320, "num_gpu_blocks_override": 36}
    if architecture.startswith("DeepseekOcr2"):  # whose images have hundreds of embeddings
        settings |= {"max_model_len": 1000, "num_gpu_blocks_override": 80 if setting == FEW_PAGES else 300}
        settings["max_num_batched_tokens"] = 8 * settings["max_num_batched_tokens"]
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
