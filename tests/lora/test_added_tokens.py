"""Adapters of a base that has grown by new tokens: they exist for their requests, and for no others; the oracle is PEFT."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.lora.conftest import PROMPTS, TOLERANCE, request, run
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.oracles.gguf_models import write_gguf
from tests.oracles.peft_adapters import make_adapter, randomize
from tests.oracles.tiny_listeners import HearingOracle, make_tiny_listener
from tests.oracles.tiny_models import VOCAB_SIZE, load_oracle, make_tiny_model
from tests.oracles.tiny_vision import VisionOracle, draw_image, make_tiny_vision

from quire import LLM, LoRARequest, SamplingParams
from quire.engine import arg_utils
from quire.errors import RequestError
from quire.executor import selector
from quire.outputs import RequestOutput

ADDED, ROOM = 5, 8
LAST = VOCAB_SIZE + ADDED - 1
SETTINGS = {
    "dtype": "float32",
    "enable_lora": True,
    "max_model_len": 64,
    "max_num_seqs": 16,
    "max_logprobs": -1,
    "lora_extra_vocab_size": ROOM,
}
KINDS: dict[str, dict[str, Any]] = {
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "untrained": {},  # PEFT saves both matrices of a base that was resized
    "low rank": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "tokens": {"trainable_token_indices": [3, LAST - 1, LAST]},
}
OWN = [[200, 17, 90, 33, LAST, 5, VOCAB_SIZE], PROMPTS[1]]


def grown_oracle(base: Path) -> Any:
    oracle = load_oracle(base)
    torch.manual_seed(1)
    oracle.resize_token_embeddings(VOCAB_SIZE + ADDED, mean_resizing=False)
    for matrix in {id(each): each for each in (oracle.get_input_embeddings(), oracle.get_output_embeddings())}.values():
        matrix.weight.data[VOCAB_SIZE:] = torch.randn(ADDED, matrix.weight.shape[1]) * matrix.weight.std()
    return oracle


def make_grown(base: Path, path: Path, seed: int) -> Path:
    config = peft.LoraConfig(**{"r": 3, "target_modules": ["q_proj"], **KINDS[path.name]})
    model = peft.get_peft_model(grown_oracle(base), config)
    randomize(model, seed, 0.3)
    model.save_pretrained(str(path))
    return path


def assert_as(output: Any, oracle: Any, name: str) -> None:
    """Logprobs of all tokens that an adapter has are the oracle's, and it has no others."""
    (completion,), prompt = output.outputs, output.prompt_token_ids
    with torch.no_grad():
        logits = oracle(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
    for position, row in zip(completion.logprobs, logits.float().log_softmax(-1), strict=True):
        ours = {token: entry.logprob for token, entry in position.items()}
        expected = {token: value for token, value in enumerate(row.tolist()) if value > -math.inf}
        assert max(abs(ours[token] - value) for token, value in expected.items()) < TOLERANCE, name
        assert all(
            ours.get(token, -math.inf) == -math.inf for token in range(VOCAB_SIZE + ROOM) if token not in expected
        ), name


def assert_grown(llm: LLM, base: Path, grown: Sequence[Path], plain: Path | None = None) -> list[RequestOutput]:
    """A batch with the base, a plain adapter, and adapters with tokens of their own equals PEFT."""
    asked = [(prompt, path) for path in grown for prompt in OWN] + [(PROMPTS[1], None), (PROMPTS[1], plain)]
    adapters = [None if path is None else request(path, 1 + [*grown, plain].index(path)) for _, path in asked]
    outputs = run(llm, [prompt for prompt, _ in asked], adapters, max_tokens=3)
    for output, (_, path) in zip(outputs, asked, strict=True):
        oracle = load_oracle(base) if path in (None, plain) else grown_oracle(base)
        oracle = oracle if path is None else peft.PeftModel.from_pretrained(oracle, str(path)).eval()
        assert_as(output, oracle, str(path))
    return outputs


@pytest.mark.parametrize("is_tied", [False, True])
def test_added_tokens_are_the_adapters_alone(is_tied: bool, tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base", tie_word_embeddings=is_tied)
    names = [name for name in KINDS if name != ("low rank" if is_tied else "embedding")]
    grown = [make_grown(base, tmp_path / name, seed) for seed, name in enumerate(names)]
    plain = make_adapter(base, tmp_path / "plain", 9, r=4, target_modules=["v_proj", "embed_tokens"])
    llm = LLM(str(base), **SETTINGS)
    outputs = assert_grown(llm, base, grown, plain)
    alone = run(llm, [OWN[0]], [request(grown[0])], 3)[0]
    assert alone.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    prompts = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in OWN],
        SamplingParams(max_tokens=1, prompt_logprobs=1),
        use_tqdm=False,
        lora_request=request(grown[0]),
    )
    oracle = peft.PeftModel.from_pretrained(grown_oracle(base), str(grown[0])).eval()
    for prompt, output in zip(OWN, prompts, strict=True):
        expected = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for at, position in enumerate(output.prompt_logprobs[1:], 1):
            assert abs(position[prompt[at]].logprob - float(expected[at - 1, prompt[at]])) < TOLERANCE


def test_a_device_beside_the_host_has_added_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_selection: None
):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base", tie_word_embeddings=True)
    platform = AsyncCpuPlatform()
    for module in (selector, arg_utils):
        monkeypatch.setattr(module, "current_platform", lambda _name: platform)
    llm = LLM(str(base), kv_cache_memory_bytes=1 << 24, block_size=16, **SETTINGS)
    assert_grown(llm, base, [make_grown(base, tmp_path / name, 1) for name in ("saved", "tokens")])


def test_two_ranks_share_added_tokens(tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base", tie_word_embeddings=False)
    llm = LLM(str(base), tensor_parallel_size=2, **SETTINGS)
    assert_grown(llm, base, [make_grown(base, tmp_path / name, 1) for name in ("low rank", "tokens")])


def test_tables_of_tokens_in_a_number_format_have_added_tokens(tmp_path: Path):
    wide: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    made = make_tiny_model("LlamaForCausalLM", tmp_path / "made", tie_word_embeddings=False, **wide)
    file, base = write_gguf(made, tmp_path, "llama", {"": "Q8_0"}), tmp_path / "worth"
    llm = LLM(str(file), deterministic=True, **SETTINGS)
    assert_grown(llm, base, [make_grown(base, tmp_path / name, 1) for name in ("saved", "tokens")])


@pytest.mark.parametrize("name", ["Llava", "Qwen2_5_VL", "Qwen2Audio"])
def test_a_model_that_sees_or_hears_has_added_tokens(name: str, tmp_path: Path):
    hears, path = name == "Qwen2Audio", tmp_path / "base"
    base = (make_tiny_listener if hears else make_tiny_vision)(f"{name}ForConditionalGeneration", path)
    item = np.sin(np.arange(12000) * 0.05).astype(np.float32) if hears else draw_image(1, 56, 84)
    oracle: Any = (HearingOracle if hears else VisionOracle)(base)
    vocab, config = len(oracle.model.get_input_embeddings().weight), oracle.model.config
    marker = next(
        getattr(config, key)
        for key in ("image_token_index", "image_token_id", "audio_token_id")
        if hasattr(config, key)
    )
    llm = LLM(str(base), **{**SETTINGS, "max_model_len": 128, "skip_tokenizer_init": True})
    expected = {None: oracle.model}
    torch.manual_seed(1)
    grown = load_oracle(base)
    grown.resize_token_embeddings(vocab + ADDED, mean_resizing=False)
    saved = {"target_modules": r".*language_model.*q_proj", "modules_to_save": ["embed_tokens", "lm_head"]}
    grown = peft.get_peft_model(grown, peft.LoraConfig(r=3, **saved))
    randomize(grown, 1, 0.3)
    grown.save_pretrained(str(tmp_path / "grown"))
    adapter = request(tmp_path / "grown")
    expected[adapter] = grown.base_model.model
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=-1, detokenize=False)
    ids = {None: [5, marker, 9, 10], adapter: [5, marker, vocab + 2, 10]}
    prompts = [
        {"prompt_token_ids": each, "multi_modal_data": {"audio" if hears else "image": item}} for each in ids.values()
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=list(ids))
    for output, model, tokens in zip(outputs, expected.values(), (vocab, vocab + ADDED), strict=True):
        (completion,), prompt = output.outputs, output.prompt_token_ids
        oracle.model = model
        rows = oracle.logprobs([*prompt, *completion.token_ids], [item])[len(prompt) - 1 : -1]
        for position, row in zip(completion.logprobs, rows, strict=True):
            ours = [position[token].logprob for token in range(tokens)]
            torch.testing.assert_close(torch.tensor(ours), row, atol=TOLERANCE, rtol=0)
            assert all(entry.logprob == -math.inf for token, entry in position.items() if token >= tokens)


def test_a_draft_model_guesses_for_requests_with_added_tokens(tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base", tie_word_embeddings=False)
    drafter = {
        "method": "draft_model",
        "model": str(base),
        "num_speculative_tokens": 3,
        "enable_adaptive_verification": False,
    }
    grown = [make_grown(base, tmp_path / "saved", 1)]
    assert_grown(LLM(str(base), speculative_config=drafter, **SETTINGS), base, grown)


def test_an_adapter_may_bring_its_rows_in_a_file_of_their_own(tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base", tie_word_embeddings=False)
    path = make_adapter(base, tmp_path / "legacy", 1, r=3, target_modules=["q_proj"])
    oracle = peft.PeftModel.from_pretrained(load_oracle(base), str(path)).eval()
    rows = {name: torch.randn(ADDED, 64) * 0.3 for name in ("input_embeddings", "output_embeddings")}
    save_file(rows, path / "new_embeddings.safetensors")
    model: Any = oracle.base_model.model
    model.resize_token_embeddings(VOCAB_SIZE + ADDED)
    model.model.embed_tokens.weight.data[VOCAB_SIZE:] = rows["input_embeddings"]
    model.lm_head.weight.data[VOCAB_SIZE:] = rows["output_embeddings"]
    assert_as(run(LLM(str(base), **SETTINGS), [OWN[0]], [request(path)], 3)[0], oracle, "new_embeddings")


def test_tokens_without_rows_in_the_head_are_read_and_never_given(tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base", tie_word_embeddings=False)
    path = make_grown(base, tmp_path / "embedding", 1)  # PEFT saves no rows of the head then
    output = run(LLM(str(base), **SETTINGS), [OWN[0]], [request(path)], 3)[0]
    oracle = peft.PeftModel.from_pretrained(grown_oracle(base), str(path)).eval()
    oracle.base_model.model.lm_head.weight.data[VOCAB_SIZE:] = 0
    oracle.base_model.model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB_SIZE + ADDED))
    oracle.base_model.model.lm_head.bias.data[VOCAB_SIZE:] = -torch.inf
    assert_as(output, oracle, "embedding")


def test_no_other_request_may_have_an_adapters_tokens(tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base", tie_word_embeddings=False)
    grown = request(make_grown(base, tmp_path / "saved", 1))
    plain = request(make_adapter(base, tmp_path / "plain", 9, r=4, target_modules=["v_proj"]), 2)
    llm, params = LLM(str(base), **SETTINGS), SamplingParams(max_tokens=2)
    for adapter, token in ((None, VOCAB_SIZE), (plain, VOCAB_SIZE), (grown, LAST + 1)):
        with pytest.raises(RequestError, match=f"token id {token}, but the vocabulary has {token}"):
            llm.generate({"prompt_token_ids": [3, token]}, params, use_tqdm=False, lora_request=adapter)
        with pytest.raises(RequestError, match="logit_bias"):
            biased = SamplingParams(max_tokens=2, logit_bias={token: 1.0})
            llm.generate({"prompt_token_ids": [3]}, biased, use_tqdm=False, lora_request=adapter)
    llm.generate({"prompt_token_ids": [3, LAST]}, params, use_tqdm=False, lora_request=grown)
    narrow = LLM(str(base), **{**SETTINGS, "lora_extra_vocab_size": ADDED - 2})
    with pytest.raises(RequestError, match="set lora_extra_vocab_size higher by 2"):
        narrow.add_lora(grown)


def test_an_adapters_own_tokenizer_reads_and_writes_its_texts(tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base", tie_word_embeddings=False)
    path = make_grown(base, tmp_path / "saved", 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(base))
    while len(tokenizer) < VOCAB_SIZE:
        tokenizer.add_tokens([f"<filler{len(tokenizer)}>"])
    tokenizer.add_tokens(["<think2>"])
    tokenizer.chat_template = "{% for message in messages %}<think2>{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(str(path))
    llm, adapter = LLM(str(base), **SETTINGS), LoRARequest("own", 1, str(path))
    params = SamplingParams(max_tokens=2, temperature=0, allowed_token_ids=[VOCAB_SIZE])
    text = "ab<think2>c"
    (with_own,) = llm.generate(text, params, use_tqdm=False, lora_request=adapter)
    assert with_own.prompt_token_ids == tokenizer.encode(text) and VOCAB_SIZE in with_own.prompt_token_ids
    assert with_own.outputs[0].text == "<think2><think2>"
    (chat,) = llm.chat([{"role": "user", "content": "ab"}], params, use_tqdm=False, lora_request=adapter)
    assert VOCAB_SIZE in chat.prompt_token_ids
    free = SamplingParams(max_tokens=2, temperature=0)
    other, mixed = llm.generate([text, text], free, use_tqdm=False, lora_request=[None, adapter])
    assert VOCAB_SIZE not in other.prompt_token_ids and mixed.prompt_token_ids == with_own.prompt_token_ids
