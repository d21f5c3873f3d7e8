"""LoRA against PEFT in float32: kinds of adapters, families of models, batches that mix adapters."""

from pathlib import Path

import pytest
from tests.lora.conftest import PROMPTS, TOLERANCE, assert_parity, request, run, worst_difference
from tests.oracles.peft_adapters import PeftOracle, make_adapter
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, SamplingParams
from quire.kernels import cpu

QV = ["q_proj", "v_proj"]


def make_llm(base: Path, **settings: object) -> LLM:
    return LLM(
        str(base), dtype="float32", enable_lora=True, max_model_len=64, max_num_seqs=16, max_logprobs=-1, **settings
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(llama: Path) -> LLM:
    return make_llm(llama)


def test_a_batch_that_mixes_adapters_equals_peft_row_by_row(llm: LLM, llama: Path, tmp_path: Path):
    first = make_adapter(llama, tmp_path / "all", 1, r=8, lora_alpha=16, target_modules="all-linear")
    second = make_adapter(llama, tmp_path / "qv", 2, r=5, lora_alpha=3, target_modules=QV, use_rslora=True)
    third = make_adapter(llama, tmp_path / "deep", 3, r=64, target_modules=["down_proj", "k_proj"])
    assert_parity(llm, llama, [None, first, second, third])


def test_ranks_and_scales_by_pattern_and_targets_by_regular_expression(llm: LLM, llama: Path, tmp_path: Path):
    adapter = make_adapter(
        llama,
        tmp_path / "patterns",
        r=4,
        lora_alpha=8,
        target_modules=r".*\.(0|1)\.(self_attn\.[qk]_proj|mlp\.up_proj)",
        rank_pattern={"k_proj": 9, r"layers\.1\.mlp\.up_proj": 2},
        alpha_pattern={"q_proj": 1},
    )
    assert_parity(llm, llama, [adapter])


def test_embeddings_and_the_head_are_adapted(llm: LLM, llama: Path, tmp_path: Path):
    adapter = make_adapter(llama, tmp_path / "ends", r=6, target_modules=["embed_tokens", "lm_head", "o_proj"])
    assert_parity(llm, llama, [adapter, None])


def test_rows_are_the_same_alone_and_in_a_mixed_batch(llm: LLM, llama: Path, tmp_path: Path):
    paths = [make_adapter(llama, tmp_path / str(n), n, r=2 + n, target_modules="all-linear") for n in range(5)]
    adapters = [None, *(request(path) for path in paths)]
    together = run(llm, [PROMPTS[0]] * len(adapters), adapters)
    for adapter, output in zip(adapters, together, strict=True):
        (alone,) = run(llm, [PROMPTS[0]], [adapter])
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    assert len({tuple(output.outputs[0].token_ids) for output in together}) == len(together)


def test_pages_of_one_adapter_are_not_found_by_another(llm: LLM, llama: Path, tmp_path: Path):
    adapter = request(make_adapter(llama, tmp_path / "pages", 4, r=4, target_modules="all-linear"))
    prompt = list(range(20, 60))
    (plain,) = run(llm, [prompt], [None])
    (first,) = run(llm, [prompt], [adapter])
    (again,) = run(llm, [prompt], [adapter])
    assert first.num_cached_tokens == 0 and again.num_cached_tokens == 32
    assert first.outputs[0].token_ids == again.outputs[0].token_ids != plain.outputs[0].token_ids
    assert worst_difference(again, PeftOracle(llama, Path(adapter.lora_path))) < TOLERANCE


FAMILIES = {
    "Qwen2ForCausalLM": "all-linear",
    "Gemma3ForCausalLM": ["q_proj", "o_proj", "gate_proj", "down_proj", "embed_tokens"],
    "Phi3ForCausalLM": "all-linear",
    "GPTNeoXForCausalLM": "all-linear",
    "GPT2LMHeadModel": ["c_attn", "c_proj", "c_fc"],
}
MORE_FAMILIES = dict.fromkeys(
    (
        "Qwen3ForCausalLM",
        "Gemma2ForCausalLM",
        "CohereForCausalLM",
        "FalconForCausalLM",
        "Olmo2ForCausalLM",
        "GraniteForCausalLM",
        "StableLmForCausalLM",
        "OPTForCausalLM",
        "BloomForCausalLM",
        "PhiForCausalLM",
        "GPTJForCausalLM",
        "MptForCausalLM",
        "Starcoder2ForCausalLM",
        "SmolLM3ForCausalLM",
        "Glm4ForCausalLM",
    ),
    "all-linear",
)


def check_family(architecture: str, targets: object, tmp_path: Path) -> None:
    base = make_tiny_model(architecture, tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", r=4, lora_alpha=8, target_modules=targets)
    assert_parity(make_llm(base), base, [None, adapter])


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_of_decoders_equals_peft(architecture: str, tmp_path: Path):
    check_family(architecture, FAMILIES[architecture], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", MORE_FAMILIES)
def test_more_families_equal_peft(architecture: str, tmp_path: Path):
    check_family(architecture, MORE_FAMILIES[architecture], tmp_path)


def test_dora_stretches_the_rows_of_matrix_and_update(llm: LLM, llama: Path, tmp_path: Path):
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj", "o_proj"]
    dora = make_adapter(llama, tmp_path / "dora", 1, r=6, lora_alpha=9, target_modules=targets, use_dora=True)
    plain = make_adapter(llama, tmp_path / "plain", 2, r=4, target_modules="all-linear")
    assert_parity(llm, llama, [dora, None, plain])
    assert_parity(llm, llama, [dora])  # once more, from the host's copy or the same place


def test_whole_matrices_and_biases_take_the_place_of_the_bases(tmp_path: Path):
    base = make_tiny_model("Qwen2ForCausalLM", tmp_path / "base", tie_word_embeddings=False)
    llm = make_llm(base)
    saved = make_adapter(base, tmp_path / "s", 1, r=4, target_modules=QV, modules_to_save=["lm_head", "embed_tokens"])
    biased = make_adapter(base, tmp_path / "b", 2, r=4, target_modules=QV, bias="all")
    inner = make_adapter(base, tmp_path / "i", 3, r=4, target_modules=["k_proj"], lora_bias=True, use_dora=False)
    assert_parity(llm, base, [None, saved, biased, inner])


def test_prompt_logprobs_are_those_of_each_requests_adapter(llm: LLM, llama: Path, tmp_path: Path):
    head = make_adapter(llama, tmp_path / "head", 1, r=6, target_modules=["lm_head"])
    every = make_adapter(llama, tmp_path / "every", 2, r=3, target_modules="all-linear")
    adapters = [None, head, every]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    prompts = [{"prompt_token_ids": [7, 9, 11 + number, *range(20, 44)]} for number in range(len(adapters))]
    requests = [None if path is None else request(path, number) for number, path in enumerate(adapters)]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
    for path, prompt, output in zip(adapters, prompts, outputs, strict=True):
        token_ids = prompt["prompt_token_ids"]
        expected = PeftOracle(llama, path).logprobs(token_ids)
        for position, token_id in enumerate(token_ids[1:], 1):
            ours = output.prompt_logprobs[position][token_id].logprob
            assert abs(ours - float(expected[position - 1, token_id])) < TOLERANCE


@pytest.mark.skipif(not cpu.library_status()[0], reason="the native kernels are not built here")
def test_steps_with_adapters_are_recorded(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.kernels.cpu.recording.logger.propagate", True)
    caplog.set_level("INFO")
    adapter = request(make_adapter(llama, tmp_path / "all", 1, r=8, target_modules="all-linear"))
    run(make_llm(llama), [[3, 4, 5]], [adapter])
    assert "not recorded" not in caplog.text
