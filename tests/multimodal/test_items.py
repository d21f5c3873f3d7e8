"""Items of a prompt: their way between processes, their keys, and what a frontend keeps of them."""

import numpy as np
import pytest
from tests.oracles.tiny_listeners import make_tiny_listener
from tests.oracles.tiny_vision import draw_image, make_tiny_vision

from quire import LLM, SamplingParams
from quire.codec import encode
from quire.engine.messages import AddRequests, decoder_at_core
from quire.errors import ConfigError, RequestError
from quire.media import MediaItem, MediaTensor
from quire.multimodal.processor_cache import Processed, ProcessorCache
from quire.request import EngineRequest

SETTINGS = {"max_model_len": 128, "num_gpu_blocks_override": 60, "max_num_seqs": 4}
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_vision("LlavaForConditionalGeneration", tmp_path_factory.mktemp("vision"))


def test_an_item_comes_to_the_core_as_it_was_sent():
    pixels = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    grid = np.array([1, 2, 3])
    tensors = {"pixels": MediaTensor.from_array(pixels), "grid": MediaTensor.from_array(grid)}
    item = MediaItem("key", "image", 3, 6, 300, 6, [1, 2, 3], tensors)
    sent = EngineRequest("r", [1] * 12, SamplingParams(), media=[item])
    (got,) = decoder_at_core()(encode(AddRequests([sent]))).requests
    assert got.media == [item]
    assert (got.media[0].tensors["pixels"].to_array() == pixels).all()
    assert (got.media[0].tensors["grid"].to_array() == grid).all()


def test_a_frontend_keeps_what_was_used_last_within_its_bytes():
    def processed(size):
        return Processed([], [1], [], 1, [], {"pixels": MediaTensor("uint8", [size], bytes(size))}, "image")

    cache = ProcessorCache(100)
    for key in "abc":
        cache.put(key, processed(40))
        assert cache.get("a") is not None or key == "c"
        assert cache.num_bytes <= 100
    assert cache.get("a") is not None and cache.get("b") is None and cache.get("c") is not None
    cache.put("d", processed(101))
    assert cache.get("d") is None and cache.num_bytes == 80
    cache.clear()
    assert cache.get("a") is None and cache.num_bytes == 0


def test_an_image_may_be_named_and_then_left_out(folder):
    llm = LLM(model=str(folder), **SETTINGS)
    image = draw_image(1, 30, 30)

    def ask(given, name):
        request = {"prompt": "<image>x", "multi_modal_data": {"image": [given]}, "multi_modal_uuids": {"image": [name]}}
        return llm.generate(request, PARAMS, use_tqdm=False)[0].outputs[0].token_ids

    assert ask(image, "first") == ask(None, "first") == ask(image, None)
    with pytest.raises(RequestError, match="'second' is not known"):
        ask(None, "second")


def test_a_model_that_is_to_read_text_alone_loads_no_encoder_and_refuses_images(folder):
    request = {"prompt": "<image>x", "multi_modal_data": {"image": draw_image(1, 30, 30)}}
    whole = LLM(model=str(folder), **SETTINGS)
    for settings in ({"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0}}):
        llm = LLM(model=str(folder), **SETTINGS, **settings)
        assert not llm.model_config.is_multimodal_model and whole.model_config.is_multimodal_model
        with pytest.raises(RequestError, match="reads no media here"):
            llm.generate(request, PARAMS, use_tqdm=False)
        text = [engine.generate("some text", PARAMS, use_tqdm=False)[0].outputs[0].token_ids for engine in (llm, whole)]
        assert text[0] == text[1]


@pytest.mark.parametrize(
    ("architecture", "make"),
    [
        ("Gemma4UnifiedForConditionalGeneration", make_tiny_vision),
        ("JanusForConditionalGeneration", make_tiny_vision),
        ("GraniteSpeechForConditionalGeneration", make_tiny_listener),
    ],
)
def test_the_parts_that_see_or_hear_may_be_left_where_they_are(architecture, make, tmp_path):
    llm = LLM(model=str(make(architecture, tmp_path)), language_model_only=True, **SETTINGS)
    assert not llm.model_config.is_multimodal_model
    assert len(llm.generate("some text", PARAMS, use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_a_limit_that_is_no_number_is_refused_at_the_start(folder):
    with pytest.raises(ConfigError, match=r"limit_mm_per_prompt\.image='two'"):
        LLM(model=str(folder), limit_mm_per_prompt={"image": "two"})


def test_random_weights_see_too(folder):
    llm = LLM(model=str(folder), load_format="dummy", **SETTINGS)
    images = [draw_image(seed, 30, 30) for seed in (1, 2)]
    prompts = [{"prompt": "<image>x", "multi_modal_data": {"image": image}} for image in images]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
    one, two = (output.outputs[0].logprobs[0] for output in llm.generate(prompts, params, use_tqdm=False))
    assert {token: entry.logprob for token, entry in one.items()} != {t: entry.logprob for t, entry in two.items()}


def test_a_processor_takes_a_requests_options(folder):
    llm = LLM(model=str(folder), **SETTINGS)
    prompt = {"prompt": "<image>x", "multi_modal_data": {"image": draw_image(1, 30, 30)}}
    options = {"image_mean": [0.0, 0.0, 0.0]}
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    plain, same, other = (
        next(
            iter(
                llm.generate(prompt, params, use_tqdm=False, mm_processor_kwargs=given)[0]
                .outputs[0]
                .logprobs[0]
                .values()
            )
        )
        for given in (None, {}, options)
    )
    assert plain.logprob == same.logprob != other.logprob


def test_what_is_kept_of_images_can_be_forgotten_and_they_are_seen_again(folder):
    llm = LLM(model=str(folder), enable_prefix_caching=False, **SETTINGS)
    prompt = {"prompt": "<image>x", "multi_modal_data": {"image": draw_image(1, 30, 30)}}
    processor = llm.llm_engine.input_processor.media
    assert processor is not None

    def ask():
        return llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids

    first, again = ask(), ask()
    assert (processor.cache.num_queries, processor.cache.num_hits) == (2, 1)
    llm.reset_mm_cache()
    llm.reset_encoder_cache()
    assert first == again == ask()
    assert (processor.cache.num_queries, processor.cache.num_hits) == (3, 1)


def test_requests_go_on_with_their_images_in_a_core_that_takes_the_place_of_one_that_was_killed(
    folder, monkeypatch, tmp_path
):
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    images = [draw_image(seed, 30, 30 + seed) for seed in range(3)]
    prompts: list = [{"prompt": "<image>x", "multi_modal_data": {"image": image}} for image in images]
    prompts += [{"prompt": "<image> <image>", "multi_modal_data": {"image": images[1:]}}, "some text"]

    def ask(llm):
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    expected = ask(LLM(model=str(folder), **SETTINGS))
    now = tmp_path / "now"
    monkeypatch.setenv("QUIRE_FAULTS", f"before-execute@core:kill:5:{now}")
    llm = LLM(model=str(folder), recovery=True, **SETTINGS)
    now.touch()  # some requests have computed their images by then, others wait
    try:
        assert ask(llm) == expected
        assert not now.exists()
        assert ask(llm) == expected
    finally:
        llm.shutdown()
