"""Models that hear against Transformers in float32, in the whole engine: in chunks, in batches, from caches, after preemption.

Prompts have no sound, one or three, of several lengths, some of them shared; text-only prompts run beside them.
"""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracles.media_parity import COMMON, FEW_PAGES, SETTINGS, ask, assert_parity, draw_prompts, largest_difference
from tests.oracles.tiny_encoder_decoder import draw_sound
from tests.oracles.tiny_gemma3n import ARCHITECTURE as GEMMA3N
from tests.oracles.tiny_listeners import AUDIO, CONFIGS, OMNI, OMNI3, HearingOracle, make_tiny_listener, oracle_of
from tests.oracles.tiny_video import draw_film
from tests.oracles.tiny_vision import draw_image

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError
from quire.multimodal import processor
from tokenizers import Tokenizer

SOUNDS = {
    name: draw_sound(seed, size)
    for seed, (name, size) in enumerate(
        {"whole": 16000, "half": 7953, "odd": 9121, "short": 1100, "long": 23000}.items()
    )
}
PROMPTS = draw_prompts(AUDIO, "half", ["whole", "odd", "short"], "short", "long")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def make(architecture):
        if architecture not in made:
            made[architecture] = make_tiny_listener(architecture, tmp_path_factory.mktemp("hearing") / architecture)
        return made[architecture]

    return make


def assert_hears(llm, oracle, prompts, max_tokens):
    """The engine goes on with these prompts, all at once, as Transformers does."""
    asked = [(ids, [SOUNDS[name] for name in names]) for ids, names in prompts]
    for (_, heard), output in zip(asked, ask(llm, "audio", AUDIO, asked, max_tokens), strict=True):
        assert len(output.outputs[0].token_ids) == max_tokens, output
        assert_parity(oracle, AUDIO, heard, output)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_engine_hears_what_transformers_hears(architecture, setting, folders):
    path, settings = folders(architecture), COMMON | SETTINGS[setting]
    if architecture == GEMMA3N:  # whose eyes need timm; its layers have two kinds of pages
        settings |= {"limit_mm_per_prompt": {"image": 0}} | (
            {"num_gpu_blocks_override": 32} if setting == FEW_PAGES else {}
        )
    llm, oracle = LLM(model=str(path), **settings), oracle_of(path)
    for order in (1, -1):  # the second time, from the other end, with whatever was kept
        assert_hears(llm, oracle, PROMPTS[::order], max_tokens=6)


def test_a_sound_that_fits_into_no_prompt_is_refused_before_it_is_processed(folders, monkeypatch):
    llm = LLM(model=str(folders("VoxtralForConditionalGeneration")), **(COMMON | {"max_model_len": 64}))
    monkeypatch.setattr(processor, "_of_one", lambda values: pytest.fail("it was processed"))
    sound = np.zeros(64 * 1280 + 1, np.float32)
    with pytest.raises(RequestError, match=r"audio 0 of the prompt is 5\.1 seconds long; at most 5\.1 fit"):
        llm.generate({"prompt_token_ids": [5, AUDIO], "multi_modal_data": {"audio": sound}}, use_tqdm=False)


def test_ultravox_may_have_a_marker_that_its_config_does_not_name(tmp_path):
    path = make_tiny_listener("UltravoxModel", tmp_path, audio_token_index=9000)  # which has no row
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|audio|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    llm, params = LLM(model=str(path), **COMMON), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    request = {"prompt": "a<|audio|>b", "multi_modal_data": {"audio": SOUNDS["half"]}}
    (output,) = llm.generate(request, params, use_tqdm=False)
    prompt, token_ids = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    assert prompt.count(0) == 4
    placed = [AUDIO if token == 0 else token for token in prompt]
    logprobs = HearingOracle(path).logprobs(placed + token_ids, [SOUNDS["half"]])[len(prompt) - 1 : -1]
    assert token_ids == logprobs.argmax(-1).tolist()


def test_embeddings_are_heard_as_the_sound_they_were_made_of(folders):
    path = folders("UltravoxModel")
    oracle, llm = HearingOracle(path), LLM(model=str(path), enable_mm_embeds=True, **COMMON)
    (mel,) = oracle._inputs([SOUNDS["long"]])["sounds"]
    with torch.no_grad():
        rows = oracle.model._hear(mel)
    for given in (rows, {"audio_embeds": rows}):
        (output,) = ask(llm, "audio", AUDIO, [([5, AUDIO, 9], [given])], 5)
        assert_parity(oracle, AUDIO, [SOUNDS["long"]], output)
    for given, why in (
        ({"audio_embeds": rows, "image_grid_thw": [1, 2, 2]}, "sounds have no image_grid_thw"),
        ({"audio_embeds": rows / 0.0}, "not finite"),
    ):
        with pytest.raises(RequestError, match=why):
            ask(llm, "audio", AUDIO, [([5, AUDIO, 9], [given])], 5)
    (output,) = ask(llm, "audio", AUDIO, [([5, AUDIO, 9], [{"audio_embeds": rows[:, :8]}])], 5)
    assert output.error == "audio_embeds has 8 columns; an item's embedding has 64"
    closed = LLM(model=str(path), **COMMON)
    with pytest.raises(RequestError, match="audio embeddings are off: start the engine with enable_mm_embeds"):
        ask(closed, "audio", AUDIO, [([5, AUDIO, 9], [{"audio_embeds": rows}])], 5)


def test_options_of_a_processor_that_leave_out_what_is_needed_are_refused(folders):
    llm = LLM(model=str(folders("Qwen2AudioForConditionalGeneration")), **COMMON)
    request = {"prompt_token_ids": [5, AUDIO], "multi_modal_data": {"audio": SOUNDS["half"]}}
    for options in ({"return_attention_mask": False}, {"sampling_rate": 8000}):
        with pytest.raises(RequestError, match="audio 0 of the prompt cannot be processed"):
            llm.generate(request | {"mm_processor_kwargs": options}, use_tqdm=False)


@pytest.mark.parametrize("is_mid", [False, True])
def test_both_projectors_of_ultravox_are_read_and_others_refused(is_mid, tmp_path):
    path = make_tiny_listener("UltravoxModel", tmp_path / "read", projector_ln_mid=is_mid)
    assert_hears(LLM(model=str(path), **COMMON), HearingOracle(path), [PROMPTS[2]], max_tokens=3)
    fields = json.loads((path / "config.json").read_bytes())
    (path / "config.json").write_text(json.dumps(fields | {"num_projector_layers": 2}))
    with pytest.raises(ConfigError, match="num_projector_layers=0"):
        LLM(model=str(path), **COMMON)


def test_parts_of_ultravox_may_be_checkpoints_of_their_own(folders, tmp_path):
    whole, path = folders("UltravoxModel"), tmp_path / "joined"
    shutil.copytree(whole, path)
    fields, tensors = json.loads((whole / "config.json").read_bytes()), load_file(whole / "model.safetensors")
    text, audio = fields.pop("text_config"), fields.pop("audio_config")
    parts = {"text": ("language_model.", "", text), "audio": ("audio_tower.", "model.encoder.", audio)}
    others = {
        "audio": {"model.decoder.layers.0.fc1.weight": torch.ones(4), "proj_out.weight": torch.ones(4)},
        "text": {},
    }
    for name, (prefix, own, config) in parts.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        kept = {own + key.removeprefix(prefix): tensors.pop(key) for key in list(tensors) if key.startswith(prefix)}
        save_file(kept | others[name], folder / "model.safetensors")
    save_file(tensors, path / "model.safetensors")
    named = {"text_model_id": str(tmp_path / "text"), "audio_model_id": str(tmp_path / "audio")}
    (path / "config.json").write_text(json.dumps(fields | named))
    assert_hears(LLM(model=str(path), **COMMON), HearingOracle(whole), [PROMPTS[2]], max_tokens=3)
    (path / "config.json").write_text(json.dumps(fields | named | {"text_model_id": str(tmp_path / "nowhere")}))
    with pytest.raises(ConfigError, match="nowhere"):
        LLM(model=str(path), **COMMON)


@pytest.mark.parametrize("architecture", [OMNI, OMNI3])
def test_omni_hears_and_sees_pictures_and_films_in_one_prompt_and_is_read_with_the_parts_that_speak(
    architecture, folders, tmp_path
):
    path = folders(architecture)
    (path / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": 1,
                "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2,
                "size": {"shortest_edge": 64, "longest_edge": 4096},
            }
        )
    )  # fmt: skip
    sound, image, film = (
        SOUNDS["half"],
        draw_image(3, 24, 40),
        draw_film(9, 4, 16, 24, 3.0 if architecture == OMNI else 2.0),
    )  # positions of the latter are whole then
    around = {"image": [AUDIO + 4, AUDIO + 3, AUDIO + 5], "audio": [AUDIO + 1, AUDIO, AUDIO + 2]}
    video = [AUDIO + 4, AUDIO + 6, AUDIO + 5]
    prompt = [5, 6, *around["image"], 7, *around["audio"], 8, *video, 3, *around["image"], 9]
    data = {"image": [image, image], "audio": sound, "video": film.given}
    request = {"prompt_token_ids": prompt, "multi_modal_data": data}
    params = SamplingParams(
        max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1, allowed_token_ids=list(range(AUDIO))
    )

    def answer(folder):
        return LLM(model=str(folder), **COMMON).generate(request, params, use_tqdm=False)[0]

    output, oracle = answer(path), HearingOracle(path)
    assert list(output.prompt_token_ids).count(AUDIO + 3) == 2 * 15
    assert list(output.prompt_token_ids).count(AUDIO + 6) == 2 * 6
    written = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    logprobs = oracle.logprobs(written, [sound], images=[image, image], film=film)[
        len(output.prompt_token_ids) - 1 : -1
    ]
    assert list(output.outputs[0].token_ids) == logprobs[:, :AUDIO].argmax(-1).tolist()
    assert largest_difference(logprobs, output) == pytest.approx(0.0, abs=1e-3)
    for_films = {"mm_processor_kwargs": {"use_audio_in_video": True}}
    with pytest.raises(RequestError, match="a film's sound is not heard"):
        LLM(model=str(path), **COMMON).generate(request | for_films, params, use_tqdm=False)
    spoken = answer(with_talker(path, tmp_path / "whole"))
    assert spoken.outputs[0].token_ids == output.outputs[0].token_ids


def with_talker(path, whole):
    """The checkpoint as it is published: a part of one that speaks, too."""
    shutil.copytree(path, whole)
    fields = json.loads((path / "config.json").read_bytes())
    kinds = {"qwen2_5_omni_thinker": ("Qwen2_5OmniModel", "token2wav.code2wav")}
    kind = fields["model_type"]
    name, wave = kinds.get(kind, ("Qwen3OmniMoeForConditionalGeneration", "code2wav.decoder.0"))
    outer = {"architectures": [name], "model_type": kind.removesuffix("_thinker"), "thinker_config": fields}
    (whole / "config.json").write_text(json.dumps(outer | {"talker_config": {"hidden_size": 8}}))
    tensors = {"thinker." + name: tensor for name, tensor in load_file(path / "model.safetensors").items()}
    tensors |= {"talker.model.norm.weight": torch.ones(8), wave + ".weight": torch.ones(8)}
    save_file(tensors, whole / "model.safetensors")
    return whole
