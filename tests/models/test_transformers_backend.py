"""Models of Transformers on our pages: the same tokens and logprobs as Transformers alone, and clear refusals."""

import json
import re

import pytest
from tests.models.test_engine_parity import COMMON, NEW_TOKENS, assert_parity, make_prompts
from tests.oracles.tiny_models import load_oracle

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.layers import transformers_backend

ARCHITECTURES = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 24},
    "Gemma2ForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "CohereForCausalLM": {},
    "PhiForCausalLM": {},
    "BitNetForCausalLM": {},
    "BioGptForCausalLM": {"num_key_value_heads": 4, "scale_embedding": False, "hidden_act": "gelu"},
    "CTRLLMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4, "dff": 96, "n_positions": 256},
    "ModernBertDecoderForCausalLM": {"local_attention": 16, "num_hidden_layers": 4},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_its_modules_on_our_pages_give_its_own_tokens(architecture, tiny):
    path = tiny(architecture, **ARCHITECTURES[architecture])
    llm = LLM(model=str(path), model_impl="transformers", max_num_seqs=4, **(COMMON | {"max_num_batched_tokens": 24}))
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    prompts = make_prompts()
    for order in (1, -1):
        batch = prompts[::order]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
        assert_parity(load_oracle(path), batch, outputs)


def test_online_formats_reach_its_matrices(tiny):
    path = tiny("LlamaForCausalLM")
    llm = LLM(model=str(path), model_impl="transformers", quantization="int8", max_num_seqs=2, **COMMON)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_what_nobody_knows_is_refused(tiny, tmp_path):
    values = json.loads((tiny("LlamaForCausalLM") / "config.json").read_text())
    values |= {"architectures": ["UnheardForCausalLM"], "model_type": "unheard"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="'UnheardForCausalLM' has no spec"):
        LLM(model=str(tmp_path), max_num_seqs=2, **COMMON)
    with pytest.raises(ConfigError, match="model_type='unheard' is not known to the installed Transformers"):
        LLM(model=str(tmp_path), model_impl="transformers", max_num_seqs=2, **COMMON)


def test_layers_that_keep_something_else_are_refused(tiny):
    path = tiny("OlmoHybridForCausalLM")
    with pytest.raises(ConfigError, match=r"layer_types has linear_attention, which keep more of a request"):
        LLM(model=str(path), model_impl="transformers", max_num_seqs=2, **COMMON)


def test_a_model_whose_attention_is_not_an_interface_is_refused(tiny, tmp_path):
    values = {
        "architectures": ["XLNetLMHeadModel"],
        "model_type": "xlnet",
        "vocab_size": 300,
        "d_model": 32,
        "n_layer": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(values | {"n_head": 2, "d_inner": 32, "eos_token_id": 2}))
    with pytest.raises(
        ConfigError, match=r"model_type='xlnet' \(XLNetConfig of Transformers\) cannot run with paged attention"
    ):
        LLM(model=str(tmp_path), max_num_seqs=2, **COMMON)


def test_a_model_with_its_own_mask_is_refused(tiny):
    path = tiny("DogeForCausalLM", head_dim=16)
    with pytest.raises(ConfigError, match=r"model_type='doge' .* paged attention: its DogeAttention .* attention_mask"):
        LLM(model=str(path), max_num_seqs=2, **COMMON)


@pytest.mark.parametrize("argument", ["position_bias", "softcaps", "indices"])
def test_an_argument_that_changes_attention_is_refused(argument, tiny, monkeypatch):
    from transformers.models.llama import modeling_llama

    class Attention(modeling_llama.LlamaAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs | {argument: 1.0})

    transformers_backend._heads_of.cache_clear()
    transformers_backend._skeleton.cache_clear()
    monkeypatch.setattr(modeling_llama, "LlamaAttention", Attention)
    path = tiny("LlamaForCausalLM", num_hidden_layers=2)
    with pytest.raises(ConfigError, match=f"model_type='llama'.* calls attention with {argument}"):
        LLM(model=str(path), model_impl="transformers", max_num_seqs=2, **COMMON)


def test_a_window_that_only_the_mask_has_is_refused(tiny):
    path = tiny("LlamaForCausalLM", num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=8)
    with pytest.raises(ConfigError, match=r"layer 0 is sliding_attention in layer_types, .* without sliding_window"):
        LLM(model=str(path), model_impl="transformers", max_num_seqs=2, **COMMON)


def _bias_more_than_the_mask(eager):
    def attention(module, query, key, value, attention_mask, **kwargs):
        return eager(module, query, key, value, attention_mask + 0.2 * key.mean(-1).mean(1)[:, None, None], **kwargs)

    return attention


def _shift_tokens(forward):
    return lambda self, x: forward(self, x + 0.5 * x.roll(1, dims=1))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("change", ["attention", "tokens"])
def test_a_model_that_computes_more_than_causal_attention_is_refused_with_the_difference(
    change, load_format, tiny, monkeypatch
):
    from transformers.models.llama import modeling_llama

    path = tiny("LlamaForCausalLM", num_hidden_layers=2, initializer_range=0.3)
    if change == "attention":
        own = _bias_more_than_the_mask(modeling_llama.eager_attention_forward)
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", own)
    else:
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", _shift_tokens(modeling_llama.LlamaMLP.forward))
    with pytest.raises(ConfigError, match=r"model_type='llama' .* logprobs of 8 tokens differ by [\d.]+ from"):
        LLM(model=str(path), model_impl="transformers", load_format=load_format, max_num_seqs=2, **COMMON)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["GptOssForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM"])
def test_windows_sinks_soft_caps_and_experts_pass_the_check(architecture, dtype, tiny):
    path = tiny(architecture, dtype=dtype)
    LLM(model=str(path), model_impl="transformers", dtype=dtype, max_num_seqs=2, **COMMON)


IN_WORDS = {
    "BartForCausalLM": ("bart", {"is_encoder_decoder": True}, "encoder-decoder models need a spec"),
    "LongT5ForConditionalGeneration": ("longt5", {}, "encoder-decoder models need a spec"),
    "ProphetNetForConditionalGeneration": ("prophetnet", {}, "encoder-decoder models need a spec"),
    "Blip2ForConditionalGeneration": ("blip-2", {}, "models that read images need a spec"),
    "BertLMHeadModel": ("bert", {"num_hidden_layers": 2}, "its attention looks ahead"),
    "GitForCausalLM": ("git", {}, "its attention does not go through Transformers' attention interface"),
    "XGLMForCausalLM": ("xglm", {"num_layers": 2}, "0 of its 2 layers have attention"),
    "xLSTMForCausalLM": ("xlstm", {"hidden_size": 64}, "0 of its 32 layers have attention"),
    "Inkling2ForConditionalGeneration": ("inkling2", {}, "models that read images need a spec"),
    "MiniMaxM3VLForCausalLM": (
        "minimax_m3_vl_text",
        {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "bos_token_id": 1,
            "eos_token_id": 1,
        },
        "layer_types has minimax_m3_sparse, which keep more of a request",
    ),
    "BltForCausalLM": ("blt", {}, "depends on the values of its tensors"),
    "XLMWithLMHeadModel": ("xlm", {"n_layers": 1, "n_heads": 4, "emb_dim": 64}, "depends on the values of its tensors"),
    "DbrxForCausalLM": ("dbrx", {"n_layers": 1, "d_model": 64}, "its own code failed"),
}


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize("architecture", IN_WORDS)
def test_what_cannot_run_is_refused_in_words(architecture, model_impl, tmp_path):
    model_type, own, why = IN_WORDS[architecture]
    values = {"architectures": [architecture], "model_type": model_type, "vocab_size": 384, "pad_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(values | own))
    with pytest.raises(ConfigError, match=re.escape(why)) as raised:
        LLM(model=str(tmp_path), model_impl=model_impl, load_format="dummy", max_num_seqs=2, **COMMON)
    assert f"model_type={model_type!r}" in str(raised.value)


def test_a_config_that_its_class_refuses_is_refused_in_words(tmp_path):
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": "wide"}
    (tmp_path / "config.json").write_text(json.dumps(values | {"eos_token_id": 1}))
    with pytest.raises(ConfigError, match="hidden_size"):
        LLM(model=str(tmp_path), model_impl="transformers", load_format="dummy", max_num_seqs=2, **COMMON)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_any_error_of_a_models_own_code_becomes_a_refusal(load_format, tiny, monkeypatch):
    from transformers import LlamaForCausalLM

    path = tiny("LlamaForCausalLM", num_hidden_layers=2, rope_theta=20000.0)
    built = LlamaForCausalLM.__init__

    def fail(self, config):
        built(self, config)
        if self.device.type != "meta" or load_format == "auto":
            raise ZeroDivisionError("broken by itself")

    monkeypatch.setattr(LlamaForCausalLM, "__init__", fail)
    with pytest.raises(ConfigError, match="its own code failed: broken by itself"):
        LLM(model=str(path), model_impl="transformers", load_format=load_format, max_num_seqs=2, **COMMON)
