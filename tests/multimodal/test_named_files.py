"""Images and sounds that are named by the paths of their files, by who runs the engine in a program of one's own."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.oracles.tiny_vision import draw_image, make_tiny_vision

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.multimodal.media_source import open_named

PIXELS = draw_image(1, 30, 30)
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_tiny_vision("LlavaForConditionalGeneration", tmp_path_factory.mktemp("vision"))
    return LLM(model=str(folder), max_model_len=128, num_gpu_blocks_override=60, max_num_seqs=4)


def ask(llm, *images):
    request = {"prompt": "<image>" * len(images) + "x", "multi_modal_data": {"image": list(images)}}
    return llm.generate(request, PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def test_a_path_is_its_file_alone_and_beside_other_forms(llm, tmp_path):
    path = tmp_path / "turned ä.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(PIXELS)).save(path, exif=exif)  # the data say: turn it back
    assert ask(llm, str(path)) == ask(llm, path) == ask(llm, PIXELS)
    assert ask(llm, path, PIXELS) == ask(llm, Image.fromarray(PIXELS), str(path)) == ask(llm, PIXELS, PIXELS)
    one = {"prompt": "<image>x", "multi_modal_data": {"image": str(path)}}
    assert llm.generate(one, PARAMS, use_tqdm=False)[0].outputs[0].token_ids == ask(llm, PIXELS)


def test_in_a_conversation_a_path_is_an_object_and_a_text_is_a_url(llm, tmp_path):
    path = tmp_path / "one.png"
    Image.fromarray(PIXELS).save(path)

    def chat(image):
        part = {"type": "image", "image": image}
        return llm.chat([{"role": "user", "content": [part]}], PARAMS, use_tqdm=False)[0].outputs[0].token_ids

    assert chat(path) == chat(PIXELS)
    for text, why in ((str(path), "is not supported; give an image as"), (path.as_uri(), "local-media-path")):
        with pytest.raises(RequestError, match=why):
            chat(text)


def test_a_file_that_cannot_be_read_is_named(llm, tmp_path):
    (tmp_path / "text").write_text("no image")
    cases = {"missing": "No such file", ".": "Is a directory", "text": "cannot be decoded", "a\0b": "null"}
    for name, why in cases.items():
        with pytest.raises(RequestError, match=rf"image 1 of the prompt: .* cannot be read: .*{why}") as caught:
            ask(llm, PIXELS, str(tmp_path) + "/" + name)
        assert caught.value.param == "multi_modal_data"
    with pytest.raises(RequestError, match="cannot be read"):
        ask(llm, Path())


def test_sounds_are_read_at_their_own_rate_and_only_paths_are_opened(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    samples = np.sin(np.arange(800, dtype=np.float32)) / 2
    soundfile.write(tmp_path / "one.wav", samples, 8000, subtype="FLOAT")
    pair, array = (samples, 16000), np.zeros((4, 4, 3), np.uint8)
    opened = open_named({"audio": [tmp_path / "one.wav", pair], "image": array})
    (read, rate), kept = opened["audio"]
    assert rate == 8000 and (read == samples).all() and kept is pair and opened["image"] is array
    with pytest.raises(RequestError, match=r"audio 0 of the prompt: .* cannot be read: it cannot be read as sound"):
        open_named({"audio": __file__})
