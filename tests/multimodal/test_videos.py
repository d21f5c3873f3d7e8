"""Videos as users give them, and how they stand in a prompt."""

import contextlib
import importlib.util
import json

import numpy as np
import pytest
import torch
from PIL import Image
from tests.oracles.film_files import film_file, grey_frames
from tests.oracles.tiny_video import VIDEO, draw_film
from tests.oracles.tiny_vision import IMAGE, draw_image, make_tiny_vision

from quire import LLM, SamplingParams
from quire.config.hf_config import HFConfig
from quire.errors import ConfigError, RequestError
from quire.multimodal.video import Video, as_videos, read_video
from quire.multimodal.video_families import VIDEO_FAMILIES, in_words

FILM = draw_film(1, 6, 24, 32)
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SETTINGS = {"max_model_len": 512, "num_gpu_blocks_override": 120, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_vision("Qwen2_5_VLForConditionalGeneration", tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(model=str(folder), **SETTINGS)


def ask(llm, video, **others):
    given = {"prompt_token_ids": [5, VIDEO, 6], "multi_modal_data": {"video": video}, **others}
    output = llm.generate(given, PARAMS, use_tqdm=False)[0]
    return output.prompt_token_ids.count(VIDEO), output.outputs[0].token_ids


def test_one_video_or_several_in_each_form_is_a_list_of_them():
    frames, pictures = FILM.frames, [Image.fromarray(frame) for frame in FILM.frames]
    pair = (frames, {"fps": 2.0})
    for one in (frames, torch.from_numpy(frames), pictures, list(frames), tuple(pictures), pair, "film.mp4"):
        assert len(as_videos(one)) == 1
    for several in ([frames, frames], [pair, pair], np.stack([frames, frames]), [pictures, frames], ["a.mp4", "b.mp4"]):
        assert len(as_videos(several)) == 2
    assert as_videos([None]) == [None] and as_videos([]) == []


def test_every_form_is_the_same_video(llm, tmp_path):
    frames = FILM.frames
    expected = ask(llm, frames)
    pictures = [Image.fromarray(frame) for frame in frames]
    forms = (torch.from_numpy(frames), frames.transpose(0, 3, 1, 2), pictures, list(frames), [frames], (pictures, {}))
    assert all(ask(llm, form) == expected for form in forms)
    file = tmp_path / "film.mp4"
    file.write_bytes(film_file(grey_frames(50), rate=10))
    assert ask(llm, file) == ask(llm, str(file)) == ask(llm, [str(file)])
    assert ask(llm, file)[0] == ask(llm, grey_frames(32))[0]
    assert ask(llm, file, media_io_kwargs={"video": {"num_frames": 4}})[0] == ask(llm, grey_frames(4))[0]


def test_what_is_no_video_is_named(llm):
    frames = FILM.frames
    cases = {
        "it is a int": 3,
        "its shape is [24, 32, 3]": np.stack([frames[0]])[0],
        "it has 0 frames": np.zeros((0, 8, 8, 3), np.uint8),
        "several sizes": [Image.fromarray(frames[0]), Image.fromarray(frames[0, :9])],
        "its numbers are float32": frames.astype(np.float32),
        "what is known of it cannot be used": (frames, {"fps": "fast"}),
        "a list stands beside its frames": (frames, []),
    }
    for why, given in cases.items():
        with pytest.raises(RequestError) as caught:
            read_video(given, "video 0 of the prompt")
        assert why in str(caught.value) and "video 0 of the prompt" in str(caught.value)
    with pytest.raises(RequestError, match=r"1 places for videos .* has 2 videos"):
        ask(llm, [frames, frames])
    with pytest.raises(RequestError, match="fps='x' must be a number"):
        ask(llm, frames, mm_processor_kwargs={"fps": "x"})


def test_a_video_that_is_too_large_is_refused_and_its_frames_may_be_thinned(llm):
    film = draw_film(7, 60, 40, 40).frames  # 25 embeddings of each two
    with pytest.raises(RequestError, match="makes 750 embeddings; at most 512 can be computed at once"):
        ask(llm, film)
    assert ask(llm, film, mm_processor_kwargs={"num_frames": 8})[0] == 4 * 25
    known = (film, {"fps": 10.0})
    assert ask(llm, known, mm_processor_kwargs={"fps": 2})[0] == 6 * 25
    assert ask(llm, known, mm_processor_kwargs={"fps": 2, "max_pixels": 256, "min_pixels": 64})[0] == 6 * 4
    image = {"prompt_token_ids": [5, IMAGE], "multi_modal_data": {"image": draw_image(1, 30, 30)}}
    assert llm.generate(image, PARAMS, use_tqdm=False, mm_processor_kwargs={"fps": 2})[0].outputs[0].token_ids


def test_the_time_between_frames_counts(llm):
    frames = draw_film(3, 8, 16, 24).frames
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)

    def logprob(known, **options):
        given = {"prompt_token_ids": [5, VIDEO, 6], "multi_modal_data": {"video": (frames, known)}}
        output = llm.generate(given, params, use_tqdm=False, mm_processor_kwargs=options)[0].outputs[0]
        return next(iter(output.logprobs[0].values())).logprob

    slow, fast = logprob({"fps": 1.0}), logprob({"fps": 4.0})
    assert slow != fast
    assert logprob({}, fps=1.0) == pytest.approx(slow, abs=1e-5)
    halves = {"fps": 2.0, "frames_indices": range(0, 16, 2), "total_num_frames": 16}
    assert logprob(halves) == pytest.approx(slow, abs=1e-5)


def test_a_video_may_be_named_and_is_kept_by_its_content(folder):
    llm = LLM(model=str(folder), **SETTINGS)
    cache = llm.llm_engine.input_processor.media.cache
    names = {"multi_modal_uuids": {"video": ["first"]}}
    assert ask(llm, FILM.frames, **names) == ask(llm, [None], **names) == ask(llm, FILM.frames) == ask(llm, FILM.frames)
    assert cache.num_hits == 2 and cache.num_bytes > 0
    ask(llm, (FILM.frames, {"fps": 3.0}))
    assert cache.num_hits == 2  # frames at other times are another video
    with pytest.raises(RequestError, match="'second' is not known"):
        ask(llm, [None], multi_modal_uuids={"video": ["second"]})


def test_limits_and_options_are_settings(folder):
    limited = LLM(
        model=str(folder), limit_mm_per_prompt={"video": {"count": 1, "num_frames": 8}, "image": 0}, **SETTINGS
    )
    assert ask(limited, FILM.frames) == ask(limited, FILM.frames)
    two = {"prompt_token_ids": [VIDEO, VIDEO], "multi_modal_data": {"video": [FILM.frames] * 2}}
    with pytest.raises(RequestError, match="the prompt has 2 videos; limit_mm_per_prompt allows 1"):
        limited.generate(two, PARAMS, use_tqdm=False)
    with pytest.raises(RequestError, match="'image'"):
        limited.generate({"prompt_token_ids": [IMAGE], "multi_modal_data": {"image": draw_image(1, 9, 9)}}, PARAMS)
    with pytest.raises(ConfigError, match=r"media_io_kwargs: video\.num_frames=0"):
        LLM(model=str(folder), media_io_kwargs={"video": {"num_frames": 0}})
    with pytest.raises(RequestError, match="'video'"):
        LLM(model=str(folder), limit_mm_per_prompt={"video": 0}, **SETTINGS).generate(two, PARAMS)


def _texts(architecture, options, film=FILM, asked=None):
    """The text before and behind each part of a video."""
    values = {"vision_config": {"patch_size": 4, "spatial_merge_size": 2, "image_size": 24}}
    video = Video(film.frames, np.arange(len(film.frames)), film.rate, len(film.frames))
    given = {
        "patch_size": 4,
        "size": {"shortest_edge": 256, "longest_edge": 1600, "height": 24, "width": 24},
        **options,
    }
    said = []
    VIDEO_FAMILIES[architecture].expansions(
        video, asked or {}, given, HFConfig(values), lambda text: said.append(text) or [len(said)]
    )
    return said


def test_frames_have_their_times_and_numbers_in_words():
    film = draw_film(2, 5, 24, 32, 2.0)
    starts = [f"<{seconds} seconds><|vision_start|>" for seconds in (0.2, 1.2, 2.0)]
    expected = [text for start in starts for text in (start, "<|vision_end|>")]
    assert _texts("Qwen3VLForConditionalGeneration", {}, film) == expected
    glm = _texts("Glm4vForConditionalGeneration", {}, film)
    assert glm[:4] == ["<|begin_of_image|>", "<|end_of_image|>0", "<|begin_of_image|>", "<|end_of_image|>1"]
    later = _texts("Glm4vMoeForConditionalGeneration", {"video_processor_type": "Glm46VVideoProcessor"}, film)
    assert later[3] == "<|end_of_image|>1.0 seconds"
    intern = [text for text in _texts("InternVLForConditionalGeneration", {}, film) if "Frame" in text]
    assert intern == ["Frame1: ", *(f"\nFrame{number}: " for number in range(2, 6))]


def test_what_stands_around_a_marker_stands_around_each_frame_instead(tmp_path):
    path = make_tiny_vision("Qwen3VLForConditionalGeneration", tmp_path)
    names = json.loads((path / "tokenizer.json").read_bytes())
    start, end = 310, 311
    names["added_tokens"] = [
        {**token, "content": {start: "<|vision_start|>", end: "<|vision_end|>"}.get(token["id"], token["content"])}
        for token in names["added_tokens"]
    ]
    (path / "tokenizer.json").write_text(json.dumps(names))
    llm = LLM(model=str(path), **SETTINGS)

    def prompt(*token_ids):
        given = {"prompt_token_ids": list(token_ids), "multi_modal_data": {"video": FILM.frames}}
        return llm.generate(given, PARAMS, use_tqdm=False)[0].prompt_token_ids

    around = prompt(5, start, VIDEO, end, 6)
    assert around.count(start) == around.count(end) == 3 and around[0] == 5 and around[-1] == 6
    assert prompt(5, VIDEO, 6) == around
    assert prompt(5, start, VIDEO, 6) == [5, start, *around[1:]]


PROCESSORS = {
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLVideoProcessor",
        {"size": {"shortest_edge": 256, "longest_edge": 1600}},
    ),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VLVideoProcessor",
        {"size": {"shortest_edge": 256, "longest_edge": 9600}},
    ),
    "Glm4vForConditionalGeneration": ("Glm4vVideoProcessor", {"size": {"shortest_edge": 256, "longest_edge": 9600}}),
    "InternVLForConditionalGeneration": ("InternVLVideoProcessor", {"size": {"height": 24, "width": 24}}),
    "LlavaOnevisionForConditionalGeneration": ("LlavaOnevisionVideoProcessor", {"size": {"height": 24, "width": 24}}),
}


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="Transformers' own processors need torchvision"
)
@pytest.mark.parametrize("architecture", PROCESSORS)
def test_frames_are_prepared_as_by_transformers(architecture):
    """Pillow's resizing and torchvision's differ by a step of brightness here and there, and by more at few sharp edges."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    with contextlib.suppress(
        RuntimeError
    ):  # its wheels for GPUs leave these out beside a torch for CPUs; nobody calls them
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import transformers

    name, options = PROCESSORS[architecture]
    is_cut = "shortest_edge" in options["size"]
    options = options | ({"patch_size": 4, "merge_size": 2} if is_cut else {})
    processor, family = getattr(transformers, name)(**options), VIDEO_FAMILIES[architecture]
    values = {"vision_config": {"patch_size": 4, "spatial_merge_size": 2, "image_size": 24}}
    for film in (draw_film(2, 5, 40, 70), draw_film(3, 8, 24, 24), draw_film(4, 2, 9, 50), draw_film(5, 31, 64, 40)):
        expected = processor([film.frames], return_tensors="np", do_sample_frames=False)["pixel_values_videos"]
        video = Video(film.frames, np.arange(len(film.frames)), film.rate, len(film.frames))
        parts = family.expansions(video, {}, options, HFConfig(values), lambda text: [1])
        pixels = np.concatenate(
            [part.arrays["pixels"].reshape(-1, *expected.shape[-1 - 2 * (not is_cut) :]) for part in parts]
        )
        step = 1 / 255 / min(processor.image_std)
        difference = np.abs(pixels.reshape(expected.shape) - expected)
        assert (difference > 1.01 * step).mean() < 0.02 and difference.mean() < 0.5 * step


def test_what_smolvlm_reads_of_a_film_in_words():
    family = VIDEO_FAMILIES["SmolVLMForConditionalGeneration"]
    film = Video(np.zeros((21, 2, 2, 3), np.uint8), np.arange(21), 0.25, 21)
    intro = "You are provided the following series of twenty-one frames from a 0:01:24 [H:MM:SS] video.\n"
    assert family.ends(film) == (intro, "\n\n")
    assert family.label is not None and family.label({}, [83.9], 3) == ("\nFrame from 01:23:", "")
    assert [in_words(count) for count in (0, 19, 30, 99, 100)] == ["zero", "nineteen", "thirty", "ninety-nine", "100"]


@pytest.mark.parametrize(("height", "width"), [(30, 71), (5, 900), (900, 3), (1080, 1920), (64, 64)])
def test_gemma4s_frames_have_the_size_that_transformers_gives_them(height, width):
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    family = VIDEO_FAMILIES["Gemma4ForConditionalGeneration"]
    theirs = get_aspect_ratio_preserving_size(height, width, patch_size=16, max_patches=70 * 9, pooling_kernel_size=3)
    assert family.size(family.preset, 1, height, width) == theirs
