"""Encoders of images beside a decoder: which prompts they take, what they are made of, and what is refused. That each goes on
as Transformers does is tested in `test_parity_encoder_decoder`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.models.test_parity_encoder_decoder import COMMON, DONUT, FLORENCE, assert_parity
from tests.oracles.tiny_encoder_decoder import CONFIGS, IMAGE, START, EncoderDecoderOracle, make_tiny_encoder_decoder
from tests.oracles.tiny_vision import draw_image

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError
from quire.layers.encoder.encoder import Encoder
from quire.multimodal.florence_tasks import TASKS, spell
from quire.sampling_params import BeamSearchParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1)
PIXELS = draw_image(7, 50, 70)
TEMPLATE = "{% for part in messages[0]['content'] %}{{ part['text'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("seeing")
    return {name: make_tiny_encoder_decoder(name, root / name) for name in (DONUT, FLORENCE)}


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> dict[str, LLM]:
    return {name: LLM(model=str(path), limit_mm_per_prompt={"image": 1}, **COMMON) for name, path in folders.items()}


def ask(llm: LLM, *prompts: Any) -> list[Any]:
    return llm.generate(list(prompts), PARAMS, use_tqdm=False)


def test_an_image_stands_beside_the_decoders_prompt(folders, engines):
    llm, oracle, media = engines[DONUT], EncoderDecoderOracle(folders[DONUT]), {"image": Image.fromarray(PIXELS)}
    words, ids = "the quick", engines[DONUT].get_tokenizer().encode("the quick", add_special_tokens=False)
    message: Any = [{"type": "image", "image": PIXELS}, {"type": "text", "text": words}]
    outputs = ask(
        llm,
        {"encoder_prompt": {"prompt": "", "multi_modal_data": media}, "decoder_prompt": words},
        {"prompt": words, "multi_modal_data": media},
        {"prompt_token_ids": ids, "multi_modal_data": {"image": [PIXELS]}},
    )
    outputs += llm.chat([{"role": "user", "content": message}], PARAMS, chat_template=TEMPLATE, use_tqdm=False)
    assert [list(output.prompt_token_ids) for output in outputs] == [
        ids
    ] * 4  # Donut's begin with no token of the model
    (bare,) = ask(llm, {"prompt": "", "multi_modal_data": media})
    assert list(bare.prompt_token_ids) == [START]
    for output in (*outputs, bare):
        assert_parity(oracle, output, image=PIXELS)


def test_florences_task_stands_behind_the_image(folders, engines):
    llm, oracle, media = engines[FLORENCE], EncoderDecoderOracle(folders[FLORENCE]), {"image": PIXELS}
    ids = llm.get_tokenizer().encode(TASKS["<OD>"])
    message: Any = [{"type": "image", "image": PIXELS}, {"type": "text", "text": "<OD>"}]
    outputs = ask(
        llm,
        {"prompt": "<OD>", "multi_modal_data": media},
        {"encoder_prompt": {"prompt": "<OD>", "multi_modal_data": media}, "decoder_prompt": None},
        {"encoder_prompt": {"prompt_token_ids": ids, "multi_modal_data": media}, "decoder_prompt": [START]},
    )
    outputs += llm.chat([{"role": "user", "content": message}], PARAMS, chat_template=TEMPLATE, use_tqdm=False)
    for output in outputs:
        assert list(output.prompt_token_ids) == [START]
        assert_parity(oracle, output, image=PIXELS, ids=ids)
    plain = llm.get_tokenizer().encode("no image")
    assert_parity(oracle, ask(llm, "no image")[0], ids=plain)
    other = ask(llm, {"prompt": "<OD>", "multi_modal_data": {"image": draw_image(8, 50, 70)}})[0]
    assert other.outputs[0].cumulative_logprob != pytest.approx(outputs[0].outputs[0].cumulative_logprob, abs=1e-3)


def test_florences_tasks_are_those_of_transformers(folders, engines):
    """Its processor makes the same token ids of a task and an image."""
    from transformers import CLIPImageProcessor, Florence2Processor, PreTrainedTokenizerFast

    path, half = folders[FLORENCE], engines[FLORENCE].llm_engine.input_processor.halves
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    tokenizer.image_token, tokenizer.image_token_id = "<image>", IMAGE
    images = CLIPImageProcessor(size={"height": 40, "width": 32}, do_center_crop=False)
    images.image_seq_length = 0
    processor = Florence2Processor(images, tokenizer)
    known = {**processor.task_prompts_without_inputs, **processor.task_prompts_with_input}
    assert {task: words.replace("{rest}", "{input}") for task, words in TASKS.items()} == known
    for text in ("<OD>", "<CAPTION_TO_PHRASE_GROUNDING> a {cat}", "words alone"):
        assert processor._construct_prompts(text) == [spell(text)]
    assert half is not None
    item = half.read({"prompt": "<CAPTION>", "multi_modal_data": {"image": PIXELS}})[2]
    ids = item.tensors["token_ids"].to_array().tolist()
    assert item.num_embeds == len(ids) and ids.count(-1) == 21  # of 5 x 4 rows, and their mean
    assert ids[21:] == engines[FLORENCE].get_tokenizer().encode(TASKS["<CAPTION>"])


def test_a_beam_search_and_several_sequences_read_one_image(folders, engines, monkeypatch):
    counts, encode = [], Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda encoder, items: counts.append(len(items)) or encode(encoder, items))
    llm, media = engines[DONUT], {"image": draw_image(9, 44, 36)}
    prompt: Any = {"prompt_token_ids": [START], "multi_modal_data": media}
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=4))
    llm.generate([prompt] * 2, SamplingParams(n=3, temperature=1.0, max_tokens=4, seed=1), use_tqdm=False)
    assert counts == [1]
    best, oracle = output.sequences[0], EncoderDecoderOracle(folders[DONUT])
    logprobs = oracle.logprobs(best.tokens, image=media["image"])[:-1]
    total = sum(float(row[token]) for row, token in zip(logprobs, best.tokens[1:], strict=True))
    assert best.cum_logprob == pytest.approx(total, abs=1e-3)


def test_rows_of_another_width_go_through_a_matrix(tmp_path):
    path = make_tiny_encoder_decoder(DONUT, tmp_path, decoder=CONFIGS[DONUT]["decoder"] | {"d_model": 40})
    (output,) = ask(LLM(str(path), **COMMON), {"prompt_token_ids": [START, 8], "multi_modal_data": {"image": PIXELS}})
    assert_parity(EncoderDecoderOracle(path), output, image=PIXELS)


def test_a_head_of_its_own_is_used_and_the_answer_is_that_of_transformers_generate(tmp_path):
    decoder = CONFIGS[DONUT]["decoder"] | {"d_model": 48, "tie_word_embeddings": False}
    path = make_tiny_encoder_decoder(DONUT, tmp_path, decoder=decoder)
    oracle = EncoderDecoderOracle(path)
    pixels = oracle.processor(PIXELS, return_tensors="pt", input_data_format="channels_last").pixel_values
    # Without a cache: that of Transformers has as many layers as mBART's encoder would have. It forces an end at last.
    expected = oracle.model.generate(
        pixel_values=pixels, max_new_tokens=12, do_sample=False, num_beams=1, use_cache=False
    )[0, 1:-1].tolist()
    (output,) = LLM(str(path), **COMMON).generate(
        {"prompt": "", "multi_modal_data": {"image": PIXELS}}, SamplingParams(temperature=0.0, max_tokens=11)
    )
    assert len({*expected}) > 2 and list(output.outputs[0].token_ids)[: len(expected)] == expected


IMAGES = {"image": PIXELS}
REFUSED = {
    "no image": (DONUT, {"prompt": "words"}, "the model's encoder sees"),
    "two": (DONUT, {"prompt": "a", "multi_modal_data": {"image": [PIXELS, PIXELS]}}, "prompt has 2 images"),
    "none": (FLORENCE, {"prompt": "a", "multi_modal_data": {"image": []}}, "has one image, not 0"),
    "a sound": (FLORENCE, {"prompt": "a", "multi_modal_data": {"audio": PIXELS}}, "a dict with 'image'"),
    "no file": (DONUT, {"prompt": "a", "multi_modal_data": {"image": "/no.png"}}, "cannot be read"),
    "floats": (DONUT, {"prompt": "a", "multi_modal_data": {"image": np.zeros((4, 4, 3))}}, "its numbers are float64"),
    "another size": (
        DONUT,
        {"prompt": "a", "multi_modal_data": IMAGES, "mm_processor_kwargs": {"size": {"height": 12, "width": 20}}},
        r"make it 12 x 20; encoder.image_size is \[44, 36\]",
    ),
    "more than a task": (FLORENCE, {"prompt": "<OD> cats", "multi_modal_data": IMAGES}, "the task <OD> stands alone"),
    "too long": (
        FLORENCE,
        {"prompt_token_ids": [7] * 76, "multi_modal_data": IMAGES},
        r"the image with the text behind it \(76 tokens\) makes 97 rows; the encoder reads 96",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused(case, engines):
    architecture, prompt, message = REFUSED[case]
    with pytest.raises(RequestError, match=message):
        ask(engines[architecture], prompt)
    conversation: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    with pytest.raises(RequestError, match="the model's encoder sees"):
        engines[DONUT].chat(conversation, PARAMS, chat_template=TEMPLATE, use_tqdm=False)


@pytest.mark.parametrize(("section", "kind"), [("encoder", "vit"), ("decoder", "trocr")])
def test_other_halves_are_refused(section, kind, folders, tmp_path):
    config = json.loads((folders[DONUT] / "config.json").read_bytes())
    config[section]["model_type"] = kind
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"{section}.model_type='{kind}'"):
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, **COMMON)


def test_florence_in_microsofts_format_is_refused(folders, tmp_path):
    config = json.loads((folders[FLORENCE] / "config.json").read_bytes())
    config["vision_config"]["dim_embed"] = config["vision_config"].pop("embed_dim")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="Microsoft's own format"):
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, **COMMON)
