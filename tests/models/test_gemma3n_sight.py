"""Gemma 3n's images, alone and beside its sounds, against Transformers in float32, in the whole engine."""

import json
import shutil
import sys
from types import ModuleType

import pytest
from tests.oracles.media_parity import CHUNKS, COMMON, FEW_PAGES, SETTINGS, largest_difference
from tests.oracles.tiny_encoder_decoder import draw_sound
from tests.oracles.tiny_gemma3n import ARCHITECTURE, BOA, BOI, EARS, EYES, HAS_TIMM, Gemma3nOracle
from tests.oracles.tiny_listeners import AUDIO, make_tiny_listener
from tests.oracles.tiny_vision import draw_image

from quire import LLM, SamplingParams
from quire.errors import ConfigError

IMAGE = AUDIO + 3
SEEN = {"wide": draw_image(1, 30, 71), "tall": draw_image(2, 164, 28), "small": draw_image(3, 7, 5)}
HEARD = {"half": draw_sound(1, 7953), "short": draw_sound(3, 1100)}
PROMPTS = [
    ([5, 6, 7, 8], [], []),
    ([5, IMAGE, 9, 10], ["wide"], []),
    ([IMAGE, 14, IMAGE, 8, IMAGE, 12, 13], ["tall", "wide", "small"], []),
    ([5, IMAGE, 9, 11, 17], ["wide"], []),
    ([21, AUDIO, 23, IMAGE, 24], ["small"], ["half"]),
    ([5, IMAGE, AUDIO, IMAGE, 9, AUDIO], ["small", "small"], ["short", "half"]),
    ([5, AUDIO, 9, 10], [], ["half"]),
    ([31 + number for number in range(40)], [], []),
    ([7, EYES, EARS + 3, 9, EYES + 5], [], []),  # tokens of images' and sounds' kinds that no item brings
]
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1, detokenize=False, allowed_token_ids=list(range(AUDIO))
)


@pytest.fixture
def _timm(monkeypatch):
    """The library, or a name in its place where other eyes are."""
    if not HAS_TIMM:
        monkeypatch.setitem(sys.modules, "timm", ModuleType("timm"))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_listener(ARCHITECTURE, tmp_path_factory.mktemp("gemma3n"))


@pytest.fixture(scope="module")
def oracle(path):
    return Gemma3nOracle(path)


def ask(llm, prompts):
    """The engine's answers, with the images and the sounds of each."""
    asked = [(ids, [SEEN[name] for name in seen], [HEARD[name] for name in heard]) for ids, seen, heard in prompts]
    given = [{"image": images, "audio": sounds} for _, images, sounds in asked]
    requests = [
        {"prompt_token_ids": ids, "multi_modal_data": {kind: items for kind, items in data.items() if items}}
        for (ids, _, _), data in zip(asked, given, strict=True)
    ]
    outputs = llm.generate(requests, PARAMS, use_tqdm=False)
    return [(output, images, sounds) for output, (_, images, sounds) in zip(outputs, asked, strict=True)]


def assert_goes_on(oracle, output, images, sounds):
    assert output.error is None, output.error
    prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    assert (prompt.count(IMAGE), prompt.count(AUDIO)) == (9 * len(images), 20 * len(sounds))
    expected = oracle.logprobs(prompt + answer, sounds, images=images)[len(prompt) - 1 : -1]
    assert answer == expected[:, :AUDIO].argmax(-1).tolist()
    assert largest_difference(expected, output) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.usefixtures("_timm")
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_engine_sees_and_hears_what_transformers_does(setting, path, oracle):
    settings = COMMON | SETTINGS[setting]
    if setting == FEW_PAGES:  # its layers have two kinds of pages
        settings["num_gpu_blocks_override"] = 32
    llm = LLM(model=str(path), **settings)
    for order in (1, -1):  # the second time, from the other end, with whatever was kept
        for output, images, sounds in ask(llm, PROMPTS[::order]):
            assert_goes_on(oracle, output, images, sounds)


@pytest.mark.usefixtures("_timm")
def test_an_image_that_was_seen_is_found_again(path, oracle):
    llm = LLM(model=str(path), **COMMON)
    ids = [*range(5, 30), IMAGE, 9, 10]
    ask(llm, [(ids, ["wide"], [])])
    for name, is_known in (("wide", True), ("tall", False)):
        ((output, images, sounds),) = ask(llm, [(ids, [name], [])])
        assert_goes_on(oracle, output, images, sounds)
        assert (output.num_cached_tokens or 0) == (32 if is_known else 16)


@pytest.mark.usefixtures("_timm")
def test_prompts_with_images_and_sounds_are_those_of_transformers_processor(path):
    from transformers import AutoFeatureExtractor, AutoImageProcessor, Gemma3nProcessor, PreTrainedTokenizerFast

    from tokenizers import Tokenizer

    llm = LLM(model=str(path), **COMMON)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([f"<after{number}>" for number in range(EARS + 1 - tokenizer.get_vocab_size())])
    kinds = {"image": IMAGE, "audio": AUDIO, "boi": BOI, "eoi": EYES, "boa": BOA, "eoa": EARS}
    names = {f"{kind}_token": tokenizer.id_to_token(token) for kind, token in kinds.items()}
    theirs = Gemma3nProcessor(
        AutoFeatureExtractor.from_pretrained(path),
        AutoImageProcessor.from_pretrained(path, backend="pil"),
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=names),
        audio_seq_length=20,
        image_seq_length=9,
    )
    data = {"image": [SEEN["wide"], SEEN["small"]], "audio": [HEARD["half"]]}
    text = "see {image_token} and\n{image_token}\n\nhear {audio_token}\n, what?".format(**names)
    given = theirs(text=text, images=[data["image"]], audio=data["audio"])
    (output,) = llm.generate({"prompt": text, "multi_modal_data": data}, PARAMS, use_tqdm=False)
    assert list(output.prompt_token_ids) == list(given["input_ids"][0])


def test_without_timm_the_error_says_what_to_install_and_sounds_are_heard(path, oracle, tmp_path, monkeypatch):
    own = shutil.copytree(path, tmp_path / "own")
    fields = json.loads((own / "config.json").read_bytes())
    (own / "config.json").write_text(json.dumps(fields | {"name": "of no other test"}))
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"sees through timm .*pip install 'timm>=") as raised:
        LLM(model=str(own), **COMMON)
    assert "limit_mm_per_prompt={'image': 0}" in str(raised.value)
    llm = LLM(model=str(own), limit_mm_per_prompt={"image": 0}, **COMMON)
    for output, images, sounds in ask(llm, [PROMPTS[6], PROMPTS[8]]):
        assert_goes_on(oracle, output, images, sounds)


@pytest.mark.usefixtures("_timm")
def test_drawn_weights_see(path, tmp_path):
    own = shutil.copytree(path, tmp_path / "own")
    (own / "model.safetensors").unlink()
    llm = LLM(model=str(own), load_format="dummy", **(COMMON | SETTINGS[CHUNKS]))
    ((output, _, _),) = ask(llm, [PROMPTS[4]])
    assert output.error is None and len(output.outputs[0].token_ids) == 5
