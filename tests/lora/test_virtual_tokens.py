"""Adapters of virtual tokens: prompt tuning, P-tuning and prefix tuning give what PEFT gives; what they cannot do is refused."""

import json
import shutil
from pathlib import Path

import pytest
from tests.lora.conftest import PROMPTS, TOLERANCE, assert_parity, request, run, worst_difference
from tests.oracles.peft_adapters import PeftOracle, make_adapter, make_virtual
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, SamplingParams
from quire.errors import RequestError

SETTINGS = {"dtype": "float32", "enable_lora": True, "max_model_len": 64, "max_num_seqs": 16, "max_logprobs": -1}
KINDS = {
    "PROMPT_TUNING": {},
    "P_TUNING": {"encoder_hidden_size": 32, "encoder_reparameterization_type": "LSTM"},
    "PREFIX_TUNING": {"prefix_projection": True, "encoder_hidden_size": 32},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def virtual(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("virtual")
    return {
        kind: make_virtual(llama, folder / kind, kind, seed, tokens=4 + seed, **more)
        for seed, (kind, more) in enumerate(KINDS.items())
    }


def test_a_batch_of_all_kinds_beside_the_base_and_lora_equals_peft(
    llama: Path, virtual: dict[str, Path], tmp_path: Path
):
    lora = make_adapter(llama, tmp_path / "lora", 2, r=4, target_modules="all-linear")
    llm = LLM(str(llama), max_num_batched_tokens=16, **SETTINGS)  # prompts are computed in chunks
    assert_parity(llm, llama, [None, *virtual.values(), lora], prompts=PROMPTS[::2], max_tokens=3)


FAMILIES = {
    "GPT2LMHeadModel": ("PROMPT_TUNING", "PREFIX_TUNING"),  # learned positions
    "GPTJForCausalLM": ("PREFIX_TUNING",),  # turns neighbouring values, and some of a head alone
    "Gemma3ForCausalLM": ("PROMPT_TUNING",),  # multiplies embeddings of tokens, not those that are given
    "GraniteForCausalLM": ("P_TUNING", "PREFIX_TUNING"),  # multiplies both
    "MistralForCausalLM": ("PREFIX_TUNING",),  # windows
}
MORE_FAMILIES = {
    "GemmaForCausalLM": ("PROMPT_TUNING", "PREFIX_TUNING"),
    "Gemma2ForCausalLM": ("PROMPT_TUNING", "PREFIX_TUNING"),
    "Qwen2ForCausalLM": ("PROMPT_TUNING", "PREFIX_TUNING"),
    "Qwen3ForCausalLM": ("PROMPT_TUNING",),
    "PhiForCausalLM": ("PROMPT_TUNING", "PREFIX_TUNING"),
    "Phi3ForCausalLM": ("PROMPT_TUNING", "PREFIX_TUNING"),
    "GPTNeoXForCausalLM": ("PROMPT_TUNING", "PREFIX_TUNING"),
    "OPTForCausalLM": ("PROMPT_TUNING", "PREFIX_TUNING"),
    "FalconForCausalLM": ("PROMPT_TUNING",),
    "CohereForCausalLM": ("PREFIX_TUNING",),
    "StableLmForCausalLM": ("PROMPT_TUNING",),
    "Starcoder2ForCausalLM": ("PREFIX_TUNING",),
    "DeepseekV3ForCausalLM": ("PROMPT_TUNING",),
    "MambaForCausalLM": ("PROMPT_TUNING",),
    "Qwen3NextForCausalLM": ("PROMPT_TUNING",),
}


AS_MANY_KEYS = ("GPT2LMHeadModel", "GPTJForCausalLM", "GPTNeoXForCausalLM", "OPTForCausalLM")
"""Those that have as many heads of keys as of queries, whatever their configuration says; PEFT believes that."""


def check_family(architecture: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    overrides = {"num_key_value_heads": 4} if architecture in AS_MANY_KEYS else {}
    base = make_tiny_model(architecture, tmp_path / "base", **overrides)
    paths = [make_virtual(base, tmp_path / kind, kind, seed) for seed, kind in enumerate(kinds)]
    assert_parity(LLM(str(base), **SETTINGS), base, [*paths, None], prompts=PROMPTS[:2], max_tokens=3)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_of_decoders_equals_peft(architecture: str, tmp_path: Path):
    check_family(architecture, FAMILIES[architecture], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", MORE_FAMILIES)
def test_more_families_equal_peft(architecture: str, tmp_path: Path):
    check_family(architecture, MORE_FAMILIES[architecture], tmp_path)


def test_virtual_tokens_are_found_in_the_prefix_cache_and_are_none_of_the_users(llama: Path, virtual: dict[str, Path]):
    llm = LLM(str(llama), **SETTINGS)
    prompt = list(range(20, 60))
    for number, (kind, path) in enumerate(virtual.items(), 1):
        adapter, oracle = request(path, number), PeftOracle(llama, path)
        (first,), (again,) = run(llm, [prompt], [adapter]), run(llm, [prompt], [adapter])
        assert first.prompt_token_ids == again.prompt_token_ids == prompt
        count = again.lora_request.num_virtual_tokens
        assert count == 3 + number and (first.num_cached_tokens, again.num_cached_tokens) == (0, 32 - count)
        assert max(worst_difference(output, oracle) for output in (first, again)) < TOLERANCE, kind


def test_there_is_room_for_virtual_tokens_and_for_one_token_behind_the_prompt(llama: Path, virtual: dict[str, Path]):
    llm, adapter = LLM(str(llama), **SETTINGS), request(virtual["PROMPT_TUNING"])
    (output,) = run(llm, [[3] * 58], [adapter], max_tokens=40)
    assert len(output.outputs[0].token_ids) == 64 - 4 - 58
    with pytest.raises(RequestError, match="60 tokens, and the adapter 4 virtual ones, but max_model_len is 64"):
        run(llm, [[3] * 60], [adapter])


def test_an_adapter_whose_files_have_changed_has_its_new_virtual_tokens(
    llama: Path, virtual: dict[str, Path], tmp_path: Path
):
    path = tmp_path / "changing"
    shutil.copytree(virtual["PROMPT_TUNING"], path)
    llm = LLM(str(llama), **SETTINGS)
    run(llm, [PROMPTS[0]], [request(path)])
    shutil.rmtree(path)
    shutil.copytree(virtual["P_TUNING"], path)
    anew = request(path)
    (output,) = run(llm, [PROMPTS[0]], [type(anew)(anew.lora_name, 1, anew.lora_path, load_inplace=True)])
    assert worst_difference(output, PeftOracle(llama, path)) < TOLERANCE


def test_what_virtual_tokens_cannot_do_is_refused_in_words(llama: Path, virtual: dict[str, Path], tmp_path: Path):
    adapter = request(virtual["PROMPT_TUNING"])
    llm = LLM(str(llama), **SETTINGS)
    given = [{"prompt_token_ids": PROMPTS[0]}]
    with pytest.raises(RequestError, match="prompt_logprobs are not computed"):
        llm.generate(given, SamplingParams(prompt_logprobs=1), lora_request=adapter)
    pooler = LLM(str(llama), dtype="float32", enable_lora=True, runner="pooling", convert="embed", max_model_len=64)
    with pytest.raises(RequestError, match="models that pool do not take"):
        pooler.embed(given, lora_request=adapter, use_tqdm=False)
    normed = make_tiny_model("Qwen3ForCausalLM", tmp_path / "normed")
    keys = make_virtual(llama, tmp_path / "keys", "PREFIX_TUNING")
    params = SamplingParams(max_tokens=1)
    (output,) = LLM(str(normed), **SETTINGS).generate(given, params, lora_request=request(keys), use_tqdm=False)
    assert "keys and values for layer 0, which norms its keys" in output.error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_virtual_tokens": 0}, "num_virtual_tokens is 0 in adapter_config.json; 1 to 512"),
        ({"num_virtual_tokens": 5}, "must have 'prompt_embeddings' alone, with 5 rows"),
        ({"num_transformer_submodules": 2}, "are of an encoder and a decoder"),
        (
            {"peft_type": "PREFIX_TUNING"},
            "has 64 numbers for a virtual token, and the model has 3 layers x 2 x 2 heads x 16",
        ),
        ({"peft_type": "CPT"}, "peft_type is 'CPT'; LORA, TRAINABLE_TOKENS, IA3"),
    ],
)
def test_a_folder_that_is_not_what_it_says_is_refused(
    change: dict[str, object], message: str, llama: Path, virtual: dict[str, Path], tmp_path: Path
):
    path = tmp_path / "wrong"
    shutil.copytree(virtual["PROMPT_TUNING"], path)
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    llm = LLM(str(llama), **SETTINGS)
    with pytest.raises(RequestError) as refused:
        llm.add_lora(request(path))
    assert message in str(refused.value)
