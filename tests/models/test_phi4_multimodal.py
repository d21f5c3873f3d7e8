"""Phi-4-multimodal: sounds beside images, long sounds, and Transformers' own processor of images."""

import json

import numpy as np
import pytest
import torch
from tests.oracles.media_parity import COMMON, largest_difference
from tests.oracles.peft_adapters import PeftOracle, make_adapter
from tests.oracles.tiny_encoder_decoder import draw_sound
from tests.oracles.tiny_listeners import AUDIO, make_tiny_listener
from tests.oracles.tiny_phi4 import ARCHITECTURE, PATCH, SIDE, SquaresProcessor, phi4_embeddings
from tests.oracles.tiny_vision import draw_image, register_tiles

from quire import LLM, LoRARequest, SamplingParams
from quire.config.hf_config import HFConfig
from quire.errors import ConfigError, RequestError
from quire.multimodal.image_families import EMBEDDED, PHI4

IMAGE = AUDIO + 3
PARAMS = SamplingParams(
    max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=1, allowed_token_ids=list(range(AUDIO)), detokenize=False
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    register_tiles()
    made = make_tiny_listener(ARCHITECTURE, tmp_path_factory.mktemp("phi4") / "model")
    fields = json.loads((made / "preprocessor_config.json").read_bytes())
    (made / "preprocessor_config.json").write_text(json.dumps(fields | {"image_processor_type": "Squares"}))
    return made


def assert_goes_on(path, output, images=(), sounds=(), adapter=None):
    """The answer is that of Transformers, to which each sound is given by itself."""
    from transformers import AutoFeatureExtractor

    model = PeftOracle(path, adapter).model
    model, extract = (
        model if adapter is None else model.merge_and_unload(),
        AutoFeatureExtractor.from_pretrained(str(path)),
    )
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    with torch.no_grad():
        seen = SquaresProcessor()(list(images), return_tensors="pt") if images else {}
        heard = [extract(sound, sampling_rate=16000, return_tensors="pt") for sound in sounds]
        embeds = phi4_embeddings(model, torch.tensor([ids]), seen, heard)
        logprobs = model(inputs_embeds=embeds).logits[0].log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
    assert list(output.outputs[0].token_ids) == logprobs[:, :AUDIO].argmax(-1).tolist()
    assert largest_difference(logprobs, output) == pytest.approx(0.0, abs=1e-3)


def test_a_sound_is_heard_otherwise_beside_an_image(path):
    """In one engine, and at once: neither takes what is kept of the other."""
    llm, image, sound, other = (
        LLM(model=str(path), **COMMON),
        draw_image(3, 30, 71),
        draw_sound(5, 9000),
        draw_sound(6, 5000),
    )
    media = [([image], [sound]), ([], [sound]), ([image], [other, sound]), ([image], [])]
    prompts = [
        {
            "prompt_token_ids": [5, *[IMAGE] * len(images), 7, *[AUDIO] * len(sounds), 9],
            "multi_modal_data": {"image": images, "audio": sounds},
        }
        for images, sounds in media
    ]
    for order in (1, -1):
        outputs = llm.generate(prompts[::order], PARAMS, use_tqdm=False)
        for output, (images, sounds) in zip(outputs, media[::order], strict=True):
            assert_goes_on(path, output, images, sounds)


def test_requests_that_name_no_adapter_have_that_of_their_media(path, tmp_path):
    modules = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]  # as in the published adapters
    folders = {
        name: make_adapter(
            path, tmp_path / name, seed, r=4, target_modules=rf"model\.layers\..*\.({'|'.join(modules)})"
        )
        for seed, name in enumerate(("vision", "speech"))
    }
    by_media = {"image": str(folders["vision"]), "audio": str(folders["speech"])}
    llm = LLM(model=str(path), enable_lora=True, default_mm_loras=by_media, **COMMON)
    image, sound, text = draw_image(3, 30, 71), draw_sound(5, 9000), [5, 6, 7]
    prompts = [
        {"prompt_token_ids": text},
        {"prompt_token_ids": [5, IMAGE, 9], "multi_modal_data": {"image": image}},
        {"prompt_token_ids": [5, AUDIO, 9], "multi_modal_data": {"audio": sound}},
        {"prompt_token_ids": [5, AUDIO, IMAGE, 9], "multi_modal_data": {"audio": sound, "image": image}},
    ]
    named = LoRARequest("other", 7, by_media["audio"])
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    outputs += llm.generate(prompts[1:2], PARAMS, lora_request=named, use_tqdm=False)
    seen = [((), ()), ((image,), ()), ((), (sound,)), ((image,), (sound,)), ((image,), ())]
    for output, media, adapter in zip(outputs, seen, (None, "vision", "speech", "vision", "speech"), strict=True):
        assert_goes_on(path, output, *media, adapter=adapter and folders[adapter])
    with pytest.raises(ConfigError, match="it needs enable_lora"):
        LLM(model=str(path), default_mm_loras=by_media, **COMMON)


def test_a_sound_of_more_rows_than_are_seen_at_once_is_heard_in_parts(path):
    sound = np.tile(draw_sound(7, 16000), 41)
    llm = LLM(model=str(path), **(COMMON | {"max_model_len": 600, "max_num_batched_tokens": 200}))
    prompt = {"prompt_token_ids": [5, AUDIO, 9], "multi_modal_data": {"audio": sound}}
    (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
    assert list(output.prompt_token_ids).count(AUDIO) == 513
    assert_goes_on(path, output, sounds=[sound])
    prompt["multi_modal_data"] = {"audio": np.tile(sound, 2)}
    with pytest.raises(RequestError, match=r"82\.0 seconds long; at most 48\.0 fit"):
        llm.generate(prompt, PARAMS, use_tqdm=False)


@pytest.mark.parametrize(
    ("section", "values", "why"),
    [
        ("vision_config", {"image_size": 12}, "odd number of patches"),
        ("audio_config", {"downsample_rate": 2}, "downsample_rate=1"),
    ],
)
def test_what_is_not_read_is_refused(section, values, why, path, tmp_path):
    fields = json.loads((path / "config.json").read_bytes())
    fields[section] |= values
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=why):
        LLM(model=str(tmp_path), load_format="dummy", **COMMON)


@pytest.mark.parametrize("size", [(30, 71), (64, 28), (16, 16), (200, 31), (13, 190), (500, 400)])
def test_images_stand_in_a_prompt_as_transformers_processor_says(size):
    pytest.importorskip("torchvision")
    from transformers import Phi4MultimodalImageProcessor

    image, hf = draw_image(4, *size), HFConfig({"vision_config": {"patch_size": PATCH}})
    options = {"size": {"height": SIDE, "width": SIDE}, "patch_size": PATCH}
    theirs = Phi4MultimodalImageProcessor(**options)(image, return_tensors="np", input_data_format="channels_last")
    arrays = {name: np.asarray(value)[0] for name, value in theirs.items()}
    found = PHI4.expand(hf, arrays, lambda text: [])
    usual = 256 + 16  # of a square of 32 patches, which their processor counts for squares of any size
    assert found.token_ids == [EMBEDDED] * (int(arrays["num_img_tokens"]) - usual + 2 * 2 + 2)
    if max(size) <= 71:  # of more squares theirs takes fewer
        ours = SquaresProcessor()(image)
        for name in ("image_attention_mask", "image_sizes"):
            assert (np.asarray(ours[name][0]) == arrays[name]).all()
