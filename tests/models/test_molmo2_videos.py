"""Molmo 2's videos against Transformers in float32: which frames are seen, their pixels and places in a prompt, and answers."""

import numpy as np
import pytest
import torch
from tests.oracles.media_parity import CHUNKS, COMMON, FEW_PAGES, SETTINGS, largest_difference
from tests.oracles.tiny_molmo import ARCHITECTURE, VIDEOS, film_logprobs, read_film, video_processor
from tests.oracles.tiny_video import Film, draw_film
from tests.oracles.tiny_vision import IMAGE, VisionOracle, draw_image, make_tiny_vision

from quire import LLM, SamplingParams
from quire.config.hf_config import HFConfig
from quire.errors import RequestError
from quire.multimodal import processor
from quire.multimodal.video import Video
from quire.multimodal.video_families import MOLMO_VIDEO, between_pixels

FILMS = {
    "short": draw_film(1, 2, 14, 28, 2.0),
    "long": draw_film(3, 4, 56, 14, 1.5),
    "untold": draw_film(2, 3, 7, 112),
    "still": draw_film(4, 1, 28, 28, 10.0),
}
"""Of sizes whose pixels have no other numbers where they are added in another order."""
PICTURE = draw_image(5, 30, 41)
PROMPTS = [
    ("four words of text", None),
    ("ab\n<|video|> cd", "long"),
    ("<|video|>what is this", "short"),
    ("ab\n<|video|> ce", "long"),
    ("see <|image|> x", "picture"),
    ("when?\n<|video|>", "untold"),
    ("ab\n<|video|> cd", "still"),
    ("a text that is longer than the others, of many tokens", None),
]
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1, detokenize=False, allowed_token_ids=list(range(IMAGE))
)
OWN = {CHUNKS: {"max_num_batched_tokens": 75}, FEW_PAGES: {"num_gpu_blocks_override": 30}}
"""All frames of a video see one another, so that they are computed in one step."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_vision(ARCHITECTURE, tmp_path_factory.mktemp("molmo2") / "model")


@pytest.fixture(scope="module")
def oracle(path):
    return VisionOracle(path)


def request(text, name):
    if name is None:
        return text
    film = FILMS.get(name)
    data = {"image": [PICTURE]} if film is None else {"video": film.given}
    return {"prompt": text, "multi_modal_data": data}


def assert_goes_on(oracle, output, text, film):
    """The prompt is what Transformers' processor makes of it, and the answer Transformers'."""
    rate = film.rate or VIDEOS["max_fps"]
    times = [number / rate for number in range(len(film.frames))]
    answer = list(output.outputs[0].token_ids)
    ids, expected = film_logprobs(oracle.model, oracle.processor, text, film.frames, times, answer)
    assert list(output.prompt_token_ids) == [token if token < IMAGE else 0 for token in ids]
    assert answer == expected[:, :IMAGE].argmax(-1).tolist()
    assert largest_difference(expected, output) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_engine_sees_the_videos_that_transformers_sees(setting, path, oracle):
    llm = LLM(model=str(path), **(COMMON | SETTINGS[setting] | OWN.get(setting, {})))
    for order in (1, -1):  # the second time, from the other end, with whatever was kept
        prompts = PROMPTS[::order]
        outputs = llm.generate([request(*each) for each in prompts], PARAMS, use_tqdm=False)
        for (text, name), output in zip(prompts, outputs, strict=True):
            assert output.error is None, output.error
            if name in FILMS:
                assert_goes_on(oracle, output, text, FILMS[name])


def test_a_processor_that_cannot_be_read_is_a_requests_error(path, monkeypatch):
    def read(path):
        raise ValueError("it needs torchvision")

    llm = LLM(model=str(path), **COMMON)
    monkeypatch.setattr(processor, "whole_processor", read)
    with pytest.raises(RequestError, match="the model's processor cannot be read: it needs torchvision"):
        llm.generate(request(*PROMPTS[2]), PARAMS, use_tqdm=False)


@pytest.mark.parametrize("rate", [None, 24.0, 2.0, 1.3, 29.97])
@pytest.mark.parametrize("asked", [{}, {"num_frames": 7}, {"fps": 1.5}])
def test_frames_of_a_whole_film_are_those_that_transformers_takes(rate, asked):
    from transformers.video_utils import VideoMetadata

    for total in (*range(1, 24), 100, 311):
        theirs = video_processor().sample_frames(VideoMetadata(total_num_frames=total, fps=rate), **asked)
        theirs = theirs[theirs < total]  # where steps do not sum up exactly, it takes one behind the last one
        film = Video(np.zeros((total, 1, 1, 3), np.uint8), np.arange(total), rate, total, is_whole=True)
        seen = []

        def encode(text, seen=seen):
            seen.append(text)
            return [len(seen)]

        parts = MOLMO_VIDEO.expansions(film, asked, VIDEOS, HFConfig({"text_config": HFConfig({})}), encode)
        own = rate or asked.get("fps") or VIDEOS["max_fps"]
        times = [f"{' ' if number else ''}{place / own:.1f} " for number, place in enumerate(theirs.tolist())]
        assert seen == times and len(parts) == len(theirs), total


@pytest.mark.parametrize("size", [(46, 24), (480, 640), (100, 57), (28, 30), (7, 99), (1, 1)])
def test_frames_have_the_pixels_that_torch_gives_but_for_one_step_in_a_few(size):
    frame = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    for side in (28, 378):
        given = torch.from_numpy(frame).permute(2, 0, 1)[None].float()
        theirs = torch.nn.functional.interpolate(given, (side, side), mode="bilinear")[0].round().permute(1, 2, 0)
        apart = np.abs(between_pixels(frame, side, side).astype(int) - theirs.numpy().astype(int))
        assert apart.max() <= 1 and (apart > 0).mean() < 1e-3


def test_patches_and_groups_are_those_of_transformers():
    film = Film(np.random.default_rng(2).integers(0, 256, (3, 50, 41, 3), dtype=np.uint8), 2.0)
    theirs = read_film(film.frames)
    video = Video(film.frames, np.arange(3), film.rate, 3)
    parts = MOLMO_VIDEO.expansions(video, {}, VIDEOS, HFConfig({"text_config": HFConfig({})}), lambda text: [1])
    pixels = np.stack([part.arrays["pixels"] for part in parts]).reshape(3, 3, 4, 7, 4, 7)
    patches = pixels.transpose(0, 2, 4, 3, 5, 1).reshape(3, 16, -1)
    assert np.abs(patches - theirs["pixel_values_videos"].numpy()).max() < 0.01  # a step of brightness
    groups = np.concatenate(
        [part.arrays["groups"] + 16 * number * (part.arrays["groups"] >= 0) for number, part in enumerate(parts)]
    )
    assert groups.tolist() == theirs["video_token_pooling"].tolist()
