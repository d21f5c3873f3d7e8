"""Models with an encoder beside their decoder against Transformers in float32, in the whole engine: in batches of several
lengths, in chunks, with halves that requests share, after preemption.
"""

import json
from typing import Any

import pytest
from tests.oracles.tiny_encoder_decoder import (
    CONFIGS,
    PROCESSORS,
    START,
    EncoderDecoderOracle,
    draw_sound,
    make_tiny_encoder_decoder,
)
from tests.oracles.tiny_vision import draw_image

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError
from quire.sampling_params import BeamSearchParams

DONUT, FLORENCE = "VisionEncoderDecoderModel", "Florence2ForConditionalGeneration"
SETTINGS = {
    "roomy": {"max_num_seqs": 8},
    "chunks, few rows": {"max_num_batched_tokens": 8, "max_num_seqs": 3},
    "few pages, so that requests are preempted": {"max_num_seqs": 8, "num_gpu_blocks_override": 9},
    "no prefix cache, eager": {"enable_prefix_caching": False, "max_num_seqs": 3, "enforce_eager": True},
}
COMMON = {"num_gpu_blocks_override": 80, "max_num_batched_tokens": 128}
HALVES = [
    (draw_sound(1, 16000), draw_image(1, 60, 40), list(range(30, 52))),
    (draw_sound(2, 5000), draw_image(2, 20, 20), [30]),
    (draw_sound(3, 12000), draw_image(3, 50, 50), [31, 32, 33]),
    (draw_sound(4, 700), draw_image(4, 31, 90), list(range(40, 57))),
]
"""What encoders of sounds, of images and of text read."""
REQUESTS = [
    (0, [START, 7, 9]),
    (1, [START, *range(20, 50)]),
    (0, [START, *range(20, 50)]),
    (2, [START]),
    (3, [START, *range(20, 39)]),
    (0, [START, 7, 9]),
    (2, [START, *range(20, 50), 51, 52]),
    (1, [START, *range(20, 50)]),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def make(architecture):
        if architecture not in made:
            folder = tmp_path_factory.mktemp("halves") / architecture
            made[architecture] = make_tiny_encoder_decoder(architecture, folder)
        return made[architecture]

    return make


def hears(architecture):
    return "num_mel_bins" in CONFIGS[architecture]


def request_of(architecture, half, decoder_ids):
    sound, image, ids = HALVES[half]
    encoder = {"prompt_token_ids": ids} if architecture != DONUT else {}
    if hears(architecture):
        encoder = {"multi_modal_data": {"audio": (sound, 16000)}}
    if architecture in PROCESSORS:
        encoder["multi_modal_data"] = {"image": image}
    return {"encoder_prompt": encoder, "decoder_prompt": {"prompt_token_ids": decoder_ids}}


def beside(architecture, half):
    sound, image, ids = HALVES[half]
    if architecture in PROCESSORS:
        return {"image": image} | ({"ids": ids} if architecture != DONUT else {})
    return {"sound": sound} if hears(architecture) else {"ids": ids}


def assert_parity(oracle, output, **half):
    completion, prompt = output.outputs[0], list(output.prompt_token_ids)
    token_ids = list(completion.token_ids)
    logprobs = oracle.logprobs(prompt + token_ids, **half)[len(prompt) - 1 : -1]
    assert token_ids == logprobs.argmax(-1).tolist()
    for position, token in enumerate(token_ids):
        found = completion.logprobs[position][token].logprob
        assert found == pytest.approx(float(logprobs[position, token]), abs=1e-3)


def assert_continues(llm, oracle, architecture, requests, max_tokens=9):
    """The engine goes on with these requests, all at once, as Transformers does."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, detokenize=False)
    prompts = [request_of(architecture, *request) for request in requests]
    for (half, decoder_ids), output in zip(requests, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert list(output.prompt_token_ids) == decoder_ids
        assert_parity(oracle, output, **beside(architecture, half))


WHISPER, BART, T5 = "WhisperForConditionalGeneration", "BartForConditionalGeneration", "T5ForConditionalGeneration"
FULL = (WHISPER, BART, T5, DONUT, FLORENCE)
CASES = [(architecture, setting) for architecture in FULL for setting in SETTINGS]
CASES += [(architecture, "chunks, few rows") for architecture in CONFIGS if architecture not in FULL]


@pytest.mark.parametrize(("architecture", "setting"), CASES)
def test_the_engine_goes_on_as_transformers_does(architecture, setting, folders):
    path = folders(architecture)
    llm = LLM(model=str(path), **(COMMON | SETTINGS[setting]))
    oracle = EncoderDecoderOracle(path)
    for order in (1, -1):  # the second time, from the other end, with whatever was kept
        assert_continues(llm, oracle, architecture, REQUESTS[::order])


@pytest.mark.parametrize("is_said", [True, False])
@pytest.mark.parametrize("architecture", [T5, "MT5ForConditionalGeneration"])
def test_a_head_of_its_own_is_used_whatever_the_config_says_of_it(architecture, is_said, tmp_path):
    from safetensors.torch import load_file, save_file

    path = make_tiny_encoder_decoder(architecture, tmp_path / "model", tie_word_embeddings=False)
    weights, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    weights["lm_head.weight"] = weights["shared.weight"].flip(0).clone()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    if is_said:  # as checkpoints have it that are older than Transformers 5
        config.pop("scale_decoder_outputs", None)
        (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert_continues(LLM(str(path), **COMMON), EncoderDecoderOracle(path), architecture, REQUESTS[:3], max_tokens=4)


def test_a_prompt_may_be_the_decoders_with_a_sound_beside_it(folders):
    llm, oracle = LLM(model=str(folders(WHISPER)), **COMMON), EncoderDecoderOracle(folders(WHISPER))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
    sound = HALVES[0][0]
    prompts: list[Any] = [
        {"prompt_token_ids": [START, 8], "multi_modal_data": {"audio": (sound, 16000)}},
        {"prompt_token_ids": [8], "multi_modal_data": {"audio": [(sound, 16000)]}},
        {"prompt": "", "multi_modal_data": {"audio": sound}},
        {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": sound}}, "decoder_prompt": None},
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [list(output.prompt_token_ids or ()) for output in outputs] == [[START, 8], [START, 8], [START], [START]]
    message: Any = {"role": "user", "content": [{"type": "audio", "audio": (sound, 16000)}]}
    outputs += llm.chat([message], params, chat_template="the", use_tqdm=False)
    for output in outputs:
        assert_parity(oracle, output, sound=sound)


def test_a_text_is_the_encoders_prompt(folders):
    llm, oracle = LLM(model=str(folders(BART)), **COMMON), EncoderDecoderOracle(folders(BART))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
    ids = llm.get_tokenizer().encode("the quick brown fox")
    forms = ["the quick brown fox", {"prompt": "the quick brown fox"}, ids, {"prompt_token_ids": ids}]
    forms += [{"encoder_prompt": "the quick brown fox", "decoder_prompt": None}]
    for output in llm.generate(forms, params, use_tqdm=False):
        assert list(output.prompt_token_ids or ()) == [START]
        assert_parity(oracle, output, ids=ids)
    with pytest.raises(RequestError, match="it may have 1 to 96"):
        llm.generate({"prompt_token_ids": [7] * 97}, params, use_tqdm=False)


def test_a_beam_search_reads_what_stands_beside_it(folders):
    llm, oracle = LLM(model=str(folders(BART)), **COMMON), EncoderDecoderOracle(folders(BART))
    (output,) = llm.beam_search([{"prompt_token_ids": [30, 31, 32, 33]}], BeamSearchParams(beam_width=3, max_tokens=5))
    best = output.sequences[0]
    logprobs = oracle.logprobs(best.tokens, ids=[30, 31, 32, 33])[:-1]
    total = sum(float(row[token]) for row, token in zip(logprobs, best.tokens[1:], strict=True))
    assert best.tokens[0] == START and best.cum_logprob == pytest.approx(total, abs=1e-3)


def test_one_sound_is_encoded_once_for_all_sequences_that_hear_it(folders, monkeypatch):
    from quire.layers.encoder.encoder import Encoder

    llm = LLM(model=str(folders(WHISPER)), **COMMON)
    counts, encode = [], Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda encoder, items: counts.append(len(items)) or encode(encoder, items))
    params = SamplingParams(n=3, temperature=1.0, max_tokens=4, seed=1)
    request: Any = request_of(WHISPER, 0, [START])
    other: Any = request_of(WHISPER, 1, [START])
    llm.generate([request, request], params, use_tqdm=False)
    llm.generate([request, other], params, use_tqdm=False)
    assert counts == [1, 1]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "words"}, "hears"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"audio": []}}, "one sound, not 0"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"audio": [0.0] * 10 + [float("nan")]}}, "not finite"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": [0.0]}}, "dict with 'audio'"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"audio": ([0.1], 3)}}, "samples a second"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"audio": "sound.wav"}}, "cannot be read"),
    ],
)
def test_what_is_no_sound_is_refused(prompt, message, folders):
    llm = LLM(model=str(folders(WHISPER)), **COMMON)
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize("setting", [{"enable_lora": True}, {"spec_method": "ngram"}, {"swap_space": 1}])
def test_a_setting_that_such_a_model_does_not_have_is_refused(setting, folders):
    with pytest.raises(ConfigError, match="encoder beside its decoder"):
        LLM(model=str(folders(WHISPER)), **COMMON, **setting)
