"""Models that hear against Transformers in float32, in the whole engine: in chunks, in batches, from caches, after preemption.

Prompts have no sound, one or three, of several lengths, some of them shared; text-only prompts run beside them.
"""

import json

import numpy as np
import pytest
from tests.oracles.media_parity import COMMON, SETTINGS, ask, assert_parity, draw_prompts
from tests.oracles.tiny_encoder_decoder import draw_sound
from tests.oracles.tiny_listeners import AUDIO, CONFIGS, HearingOracle, make_tiny_listener

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
    path = folders(architecture)
    llm, oracle = LLM(model=str(path), **(COMMON | SETTINGS[setting])), HearingOracle(path)
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
    for other, why in (
        ({"num_projector_layers": 2}, "num_projector_layers=0"),
        ({"text_model_id": "a/b"}, "save the model whole"),
    ):
        (path / "config.json").write_text(json.dumps(fields | other))
        with pytest.raises(ConfigError, match=why):
            LLM(model=str(path), **COMMON)
