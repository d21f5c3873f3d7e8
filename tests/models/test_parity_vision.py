"""Models that see against Transformers in float32, in the whole engine: in chunks, in batches, from caches, after preemption.

Prompts have no image, one or three, of several sizes, some of them shared; text-only prompts run beside them.
"""

import pytest
from tests.oracles import tiny_deepseek_vl2, tiny_molmo
from tests.oracles.media_parity import CHUNKS, COMMON, FEW_PAGES, SETTINGS, ask, assert_parity, draw_prompts
from tests.oracles.tiny_vision import CONFIGS, IMAGE, PROCESSORS, SIGLIP, VisionOracle, draw_image, make_tiny_vision

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.layers.vision.tower import VisionTower

OWN_SETTINGS = {
    ("Gemma3ForConditionalGeneration", CHUNKS): {"max_num_batched_tokens": 12},
    **{
        (f"{name}ForConditionalGeneration", setting): values
        for name in ("Gemma4", "Gemma4Unified")
        for setting, values in (
            (CHUNKS, {"max_num_batched_tokens": 82}),
            (FEW_PAGES, {"max_model_len": 256, "num_gpu_blocks_override": 48}),
        )
    },
    ("PaliGemmaForConditionalGeneration", CHUNKS): {"max_num_batched_tokens": 88},
    ("Molmo2ForConditionalGeneration", CHUNKS): {"max_num_batched_tokens": 75},
    **{
        (f"{name}ForConditionalGeneration", FEW_PAGES): {"num_gpu_blocks_override": 40}
        for name in ("Gemma3", "Llama4", "PaliGemma")
    },
}
"""Where an image, or a prompt, is computed in one step, and where pages hold fewer tokens."""
IMAGES = {
    name: draw_image(seed, *size)
    for seed, (name, size) in enumerate(
        {"wide": (30, 71), "tall": (64, 28), "small": (29, 28), "thin": (5, 500)}.items()
    )
}
PROMPTS = draw_prompts(IMAGE, "wide", ["tall", "wide", "small"], "small", "tall")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def make(architecture):
        if architecture not in made:
            made[architecture] = make_tiny_vision(architecture, tmp_path_factory.mktemp("vision") / architecture)
        return made[architecture]

    return make


def assert_sees(llm, oracle, prompts, max_tokens):
    """The engine goes on with these prompts, all at once, as Transformers does."""
    asked = [(ids, [IMAGES[name] for name in names]) for ids, names in prompts]
    for (_, seen), output in zip(asked, ask(llm, "image", IMAGE, asked, max_tokens), strict=True):
        assert len(output.outputs[0].token_ids) == max_tokens, output
        assert_parity(oracle, IMAGE, seen, output)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_engine_sees_what_transformers_sees(architecture, setting, folders):
    path = folders(architecture)
    llm = LLM(model=str(path), **(COMMON | SETTINGS[setting] | OWN_SETTINGS.get((architecture, setting), {})))
    oracle = VisionOracle(path)
    for order in (1, -1):  # the second time, from the other end, with whatever was kept
        assert_sees(llm, oracle, PROMPTS[::order], max_tokens=6)


def test_squares_of_an_image_with_more_patches_than_embeddings_are_computed_in_several_batches(tmp_path, monkeypatch):
    """A thin image leaves most of its squares empty, and has few embeddings."""
    values = {"vision_config": SIGLIP, "vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    path = make_tiny_vision("LlavaNextForConditionalGeneration", tmp_path, **values)
    llm = LLM(model=str(path), **(COMMON | {"max_model_len": 44, "max_num_batched_tokens": 44}))
    run, batches = VisionTower._run, []
    monkeypatch.setattr(VisionTower, "_run", lambda tower, items: batches.append(len(items)) or run(tower, items))
    oracle = VisionOracle(path)
    assert_sees(llm, oracle, [([5, IMAGE, 9], ["thin"])], max_tokens=4)
    assert batches == [2, 1]
    assert_sees(llm, oracle, [([5, IMAGE, 9], ["thin"]), ([7, IMAGE, 8], ["small"])], max_tokens=4)


VARIANTS = {
    "SigLIP": (
        {"vision_config": SIGLIP, "vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 28, "width": 28}},
    ),
    "several layers": ({"vision_feature_layer": [-2, -3]}, {}),
    "Pixtral": (
        {
            "vision_config": CONFIGS["Mistral3ForConditionalGeneration"]["vision_config"],
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
        },
        PROCESSORS["Mistral3ForConditionalGeneration"],
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_llava_sees_with_other_encoders(variant, tmp_path):
    values, processor = VARIANTS[variant]
    path = make_tiny_vision("LlavaForConditionalGeneration", tmp_path, processor=processor, **values)
    oracle, llm = VisionOracle(path), LLM(model=str(path), **COMMON)
    assert_sees(llm, oracle, PROMPTS, max_tokens=4)


def test_paligemmas_images_stand_before_the_text(tmp_path):
    """Whether the prompt names them or not; a newline ends it."""
    path = make_tiny_vision("PaliGemmaForConditionalGeneration", tmp_path)
    llm, seen = LLM(model=str(path), **COMMON), [IMAGES["wide"], IMAGES["tall"]]
    (newline,), text = llm.get_tokenizer().encode("\n"), llm.get_tokenizer().encode("caption en")
    params = SamplingParams(temperature=0.0, max_tokens=3)
    prompts = ("caption en", "<image><image>caption en", "<|endoftext|><image><image>caption en\n")
    given = [{"prompt": prompt, "multi_modal_data": {"image": seen}} for prompt in prompts]
    message = [{"type": "image", "image": pixels} for pixels in seen] + [{"type": "text", "text": "caption en"}]
    template = "{% for part in messages[0]['content'] %}{{ part['text'] }}{% endfor %}"
    answers = llm.generate(given, params, use_tqdm=False)
    answers += llm.chat([{"role": "user", "content": message}], params, chat_template=template, use_tqdm=False)
    for answer in answers:
        assert list(answer.prompt_token_ids) == [IMAGE] * 50 + [0, *text, newline]
        assert answer.outputs[0].token_ids == answers[0].outputs[0].token_ids
    (plain,) = llm.generate(["caption en"], params, use_tqdm=False)
    assert list(plain.prompt_token_ids) == text
    with pytest.raises(RequestError, match="has 1 places for images"):
        llm.generate({"prompt": "<image>a", "multi_modal_data": {"image": seen}}, params, use_tqdm=False)
    long = {"prompt_token_ids": [5] * 107, "multi_modal_data": {"image": seen[:1]}}
    (refused,) = llm.generate(long, params, use_tqdm=False)
    assert "the whole prompt, has 134 tokens, which are computed in one step" in str(refused.error)


@pytest.mark.parametrize("language", ["DeepseekV3ForCausalLM", "DeepseekForCausalLM"])
def test_deepseek_vl2_sees_with_other_language_models_and_the_large_picture_first(language, tmp_path):
    fields = {"language_config": tiny_deepseek_vl2.LANGUAGES[language], "global_view_pos": "tail"}
    path = make_tiny_vision(tiny_deepseek_vl2.ARCHITECTURE, tmp_path, **fields)
    assert_sees(LLM(model=str(path), **(COMMON | SETTINGS["roomy"])), VisionOracle(path), PROMPTS[:5], max_tokens=4)


def test_molmo2_of_published_configs_with_olmos_layers(tmp_path):
    """Norms behind the halves and over all heads, a stretch in some layers, and the names that sections and fields have there."""
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    text = CONFIGS[tiny_molmo.ARCHITECTURE]["text_config"]
    text = text | {"qk_norm_type": "olmo", "norm_after": True, "rope_scaling_layers": [1], "rope_parameters": rope}
    path = make_tiny_vision(tiny_molmo.ARCHITECTURE, tmp_path, text_config=text)
    tiny_molmo.publish(path)
    assert_sees(LLM(model=str(path), **(COMMON | SETTINGS["roomy"])), VisionOracle(path), PROMPTS[1:3], max_tokens=3)
    (output,) = LLM(model=str(path), language_model_only=True, **COMMON).generate([{"prompt_token_ids": [5, 6]}])
    assert output.error is None


def test_gemma4_sees_without_bounds_and_shifts_and_token_by_token(tmp_path):
    config = CONFIGS["Gemma4ForConditionalGeneration"]
    plain = {"use_clipped_linears": False, "standardize": False}
    values = {"vision_config": config["vision_config"] | plain}
    values |= {"text_config": config["text_config"] | {"use_bidirectional_attention": None}}
    path = make_tiny_vision("Gemma4ForConditionalGeneration", tmp_path, **values)
    assert_sees(LLM(model=str(path), **(COMMON | SETTINGS[CHUNKS])), VisionOracle(path), PROMPTS[1:3], max_tokens=3)


def test_gemma3_sees_crops_of_an_image(tmp_path):
    crops = {
        "pan_and_scan_min_crop_size": 8,
        "pan_and_scan_max_num_crops": 3,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    processor = PROCESSORS["Gemma3ForConditionalGeneration"] | crops | {"do_pan_and_scan": True}
    path = make_tiny_vision("Gemma3ForConditionalGeneration", tmp_path, processor=processor)
    oracle, llm = (
        VisionOracle(path),
        LLM(model=str(path), **(COMMON | {"max_model_len": 512, "max_num_batched_tokens": 300, "max_num_seqs": 4})),
    )
    assert_sees(llm, oracle, [([5, IMAGE, 9], ["wide"]), ([IMAGE, 9, IMAGE], ["tall", "small"])], max_tokens=4)
