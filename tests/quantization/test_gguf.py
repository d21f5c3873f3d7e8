"""GGUF files, read as they are: block types against the `gguf` package, models against their values in a plain checkpoint."""

import dataclasses
import json
import struct

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracles.gguf_models import HALVES, ROUNDS, dequantize, draw, write_gguf
from tests.oracles.model_driver import ModelDriver, Sequence
from tests.oracles.tiny_models import make_tiny_model

import tokenizers
from quire import LLM, SamplingParams
from quire.config.gguf.container import TYPES, read_header
from quire.config.gguf.folder import find_gguf
from quire.config.gguf.tokenizer import SPLITS
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.types import PackedWeight
from quire.layers.assembly import Assembler
from quire.layers.decoder_layer import modules_of
from quire.layers.parallel import ParallelPlan
from quire.layers.weights import sources_of
from quire.model_loader import load_model
from quire.model_loader.gguf_reader import GGUFReader
from quire.models.registry import ModelRegistry
from quire.platforms.cpu import CpuPlatform
from quire.quantization.gguf import DECODERS, _scheme
from quire.quantization.join import dense
from quire.quantization.registry import linear_method
from quire.tokenizers.loader import get_tokenizer

TOKENS = [5, 99, 271, 17, 5, 44, 200, 81, 9, 150, 33, 7]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 16, "layer_types": None, "num_hidden_layers": 7}),
    "phi3": ("Phi3ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"intermediate_size": 64}),
    "qwen3moe": ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 64}),
    "granite": (
        "GraniteForCausalLM",
        {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {"sliding_window": 4}),
    "exaone4": ("Exaone4ForCausalLM", {"sliding_window": 4, "sliding_window_pattern": 2}),
    "seed_oss": ("SeedOssForCausalLM", {}),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", {}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {}),
    "glm4": ("Glm4ForCausalLM", {}),
    "command-r": ("CohereForCausalLM", {}),
    "cohere2": (
        "Cohere2ForCausalLM",
        {"sliding_window": 4, "num_hidden_layers": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", {}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "sliding_window": 5,
            "head_dim": 16,
        },
    ),
    "qwen2moe": ("Qwen2MoeForCausalLM", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}),
}


ARCHITECTURES = {"mixtral": "llama", "olmo3": "olmo2"}
"""What files call them, where that is another name."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))


@pytest.fixture
def cpu():
    platform = CpuPlatform()
    platform.select_kernels(deterministic=True)  # inputs as they are: the faster kernels round them to int8
    return platform


def load(platform, path, **settings):
    config = EngineArgs(model=str(path), dtype="float32", **settings).create_engine_config()
    return load_model(config, platform, torch.device("cpu"), 64, 16)


def logprobs_of(loaded):
    return ModelDriver(loaded.model, pages_a_row=16).prefill(Sequence(list(TOKENS), row=0))


def assert_equal(platform, path):
    actual, expected = logprobs_of(load(platform, path)), logprobs_of(load(platform, path.parent / "worth"))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", DECODERS)
def test_blocks_are_worth_what_the_package_says(kind):
    rng = np.random.default_rng(0)
    if kind in HALVES:
        raw = draw((6, 512), kind, rng)
    else:
        raw = gguf.quants.quantize(rng.standard_normal((6, 512)).astype(np.float32), gguf.GGMLQuantizationType[kind])
    weight = _scheme(kind).decode({"weight": torch.from_numpy(raw)}, (6, 512), torch.float32)
    expected = dequantize(raw, kind)
    np.testing.assert_allclose(dense(weight, torch.float32).numpy(), expected, rtol=1e-5, atol=1e-6)
    _, bits, group, has_zeros = DECODERS[kind]
    assert weight.data.numel() == 6 * 512 * bits // 8
    assert weight.scale.shape == (6, 512 // group)
    assert (weight.zero is not None) == has_zeros


def test_a_group_whose_scale_is_zero_is_worth_its_offset():
    raw = gguf.quants.quantize(np.ones((2, 32), np.float32) * 3, gguf.GGMLQuantizationType.Q4_1)
    weight = _scheme("Q4_1").decode({"weight": torch.from_numpy(raw)}, (2, 32), torch.float32)
    assert (dense(weight, torch.float32) == 3).all()


def test_sizes_of_types_are_the_packages():
    sizes = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    for number, kind in TYPES.items():
        assert (kind.name, kind.values, kind.num_bytes) == sizes[number]


@pytest.mark.parametrize("kind", [*ROUNDS, "F16", "BF16", "IQ4_NL"])
def test_a_llama_is_worth_its_values(cpu, tmp_path, kind):
    source = make_tiny_model("LlamaForCausalLM", tmp_path / "plain")
    assert_equal(cpu, write_gguf(source, tmp_path, "llama", {"": kind}))


@pytest.mark.parametrize(
    "kinds",
    [
        {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K"},
        {"": "Q3_K", "attn_v": "Q5_K", "output.": "Q6_K"},
        {"": "Q2_K", "attn_k": "Q4_K"},
        {"": "Q4_0", "attn_v": "F16"},
        {"": "IQ2_XXS", "attn_v": "Q4_K", "attn_k": "IQ3_S", "ffn_down": "IQ1_M", "output.": "Q5_K"},
        {"": "NVFP4", "attn_v": "Q8_0", "ffn_up": "IQ4_XS", "ffn_down": "Q1_0", "output.": "TQ1_0"},
    ],
)
def test_mixed_types_are_joined(cpu, tmp_path, kinds):
    """As the usual mixtures (Q4_K_M and the like) have them: wider codes for some of the parts of one matrix."""
    source = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", **WIDE)
    path = write_gguf(source, tmp_path, "llama", kinds)
    assert_equal(cpu, path)
    loaded = load(cpu, path)
    assert isinstance(loaded.model._layers[0].mixers[0].linears["qkv"], PackedWeight) == ("F16" not in kinds.values())
    assert isinstance(loaded.model._weights["lm_head"], PackedWeight)


RARE = ("smollm3", "olmo2", "exaone4", "seed_oss", "hunyuan-dense", "ernie4_5", "glm4", "cohere2", "starcoder2")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.exhaustive if family in RARE else ()) for family in FAMILIES]
)
def test_every_family_has_its_names_and_its_order(cpu, tmp_path, family):
    architecture, settings = FAMILIES[family]
    source = make_tiny_model(architecture, tmp_path / "plain", **settings)
    assert_equal(cpu, write_gguf(source, tmp_path, ARCHITECTURES.get(family, family), {"": "Q8_0"}))


def test_gpt_oss_keeps_its_experts_as_they_are_stored(cpu, tmp_path):
    source = make_tiny_model(FAMILIES["gpt-oss"][0], tmp_path / "plain", **FAMILIES["gpt-oss"][1])
    path = write_gguf(source, tmp_path, "gpt-oss", {"": "Q8_0", "exps": "MXFP4"})
    assert_equal(cpu, path)
    assert load(cpu, path).explain()["model"]["matrices"]["experts: MXFP4"] == 3 * 4 * 3


def test_a_stretched_rotation_comes_from_its_tensor(cpu, tmp_path):
    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    source = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", rope_parameters=scaling)
    frequencies = 500000.0 ** (-np.arange(0, 16, 2) / 16)
    turns = 64 * frequencies / (2 * np.pi)
    keep = np.clip((turns - 1) / 3, 0, 1)
    divisors = 1 / (keep + (1 - keep) / 8)
    original = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer):
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
        original(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
        path = write_gguf(source, tmp_path, "llama", {"": "F32"})
    assert_equal(cpu, path)


def test_a_matrix_in_nvfp4_may_have_one_more_scale(cpu, tmp_path):
    source = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", **WIDE)
    original = gguf.GGUFWriter.write_header_to_file

    def with_scales(writer):
        for name in ("blk.0.attn_q", "blk.1.ffn_down"):
            writer.add_tensor(f"{name}.scale", np.array([0.5], np.float32))
            writer.add_tensor(f"{name}.input_scale", np.array([3.0], np.float32))
        original(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_scales)
        path = write_gguf(source, tmp_path, "llama", {"": "NVFP4"})
    worth = load_file(tmp_path / "worth/model.safetensors")
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        worth[name] = worth[name] * 0.5
    save_file(worth, tmp_path / "worth/model.safetensors")
    assert_equal(cpu, path)


def test_types_whose_tables_are_the_packages_say_when_it_is_missing(tmp_path, monkeypatch):
    source = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", **WIDE)
    path = write_gguf(source, tmp_path, "llama", {"": "IQ3_S"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    hf = EngineArgs(model=str(path)).create_engine_config().model.hf_config
    with pytest.raises(ConfigError, match=r"IQ3_S are read with .* -m pip install 'gguf>=0.17'"):
        linear_method(None, hf)


def test_the_engine_generates_text_with_the_files_own_tokenizer(tmp_path):
    source = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", torch_dtype="float32")
    path = write_gguf(source, tmp_path, "llama", {"": "Q8_0"})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    texts = []
    for model in (path, tmp_path / "worth"):
        (output,) = LLM(str(model), dtype="float32", max_model_len=64, deterministic=True).generate(
            ["the quick brown fox"], params
        )
        texts.append((output.prompt_token_ids, output.outputs[0].token_ids, output.outputs[0].text))
    assert texts[0] == texts[1]


def test_the_tokenizer_is_the_checkpoints(tmp_path):
    source = make_tiny_model("LlamaForCausalLM", tmp_path / "plain")
    config = EngineArgs(model=str(write_gguf(source, tmp_path, "llama", {"": "F16"}))).create_engine_config()
    ours, theirs = get_tokenizer(config.model.tokenizer_path), get_tokenizer(str(source))
    for text in ("hello world", " two  spaces\n\nand lines", "Überraschung 12345, it's", "<|im_start|>user"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.eos_token_id == theirs.eos_token_id
    messages = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    assert config.model.eos_token_ids == (1, 3)


@pytest.mark.parametrize(
    ("pre", "numbers"),
    [
        ("gpt-2", ["12345"]),
        ("llama-bpe", ["123", "45"]),
        ("qwen2", list("12345")),
        ("tekken", list("12345")),
        ("deepseek-v3", ["123", "45"]),
    ],
)
def test_text_is_cut_as_the_tokenizer_was_trained(pre, numbers):
    patterns = (SPLITS[pre],) if isinstance(SPLITS[pre], str) else SPLITS[pre]
    splits = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    split = tokenizers.pre_tokenizers.Sequence(splits)
    cut = [piece for piece, _ in split.pre_tokenize_str("Hello  World it's 12345\n\nok")]
    assert "".join(cut) == "Hello  World it's 12345\n\nok"
    assert cut[:4] == ["Hello", " ", " World", " it"]
    assert [piece.strip() for piece in cut if piece.strip().isdigit()] == numbers


def test_every_way_to_cut_text_is_a_pattern_that_loses_nothing():
    text = "Mixed CASE words, l'été 1234567 ... \t\r\n  日本語 don't"
    for patterns in set(SPLITS.values()):
        splits = [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
            for pattern in ((patterns,) if isinstance(patterns, str) else patterns)
        ]
        split = tokenizers.pre_tokenizers.Sequence(splits)
        assert "".join(piece for piece, _ in split.pre_tokenize_str(text)) == text


def test_sentencepiece_merges_follow_from_scores(tmp_path):
    """Against a tokenizer whose merges were written down."""
    from tests.oracles.tiny_tokenizers import sentencepiece

    from quire.config.gguf.container import GGUFFile
    from quire.config.gguf.tokenizer import build_tokenizer
    from quire.tokenizers.fast import FastTokenizer

    theirs = sentencepiece()
    model = json.loads(theirs.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    rank = {"".join(merge): -float(i) for i, merge in enumerate(model["merges"])}
    facts = {
        "model": "llama", "tokens": tokens, "scores": [rank.get(token, -1e4) for token in tokens], "bos_token_id": 1,
        "token_type": [2 if t == "<unk>" else 3 if t in ("<s>", "</s>") else 6 if t.startswith("<0x") else 1 for t in tokens],
        "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    tokenizer, config = build_tokenizer(GGUFFile("x.gguf", {f"tokenizer.ggml.{k}": v for k, v in facts.items()}, {}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = FastTokenizer(tmp_path)
    for text in ("hello world", "hell  of a word", "Über 你"):
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text), skip_special_tokens=True) == text


def test_files_beside_a_model_are_used_first(tmp_path):
    source = make_tiny_model("LlamaForCausalLM", tmp_path / "plain")
    path = write_gguf(source, tmp_path / "model", "llama", {"": "F16"})
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 300, "content": "<|beside|>"})
    (path.parent / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = EngineArgs(model=str(path.parent)).create_engine_config()
    assert get_tokenizer(config.model.tokenizer_path).token_to_id("<|beside|>") == 300


def test_an_unknown_tokenizer_is_told_when_one_is_needed(tmp_path, monkeypatch):
    source = make_tiny_model("LlamaForCausalLM", tmp_path / "plain")
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_tokenizer_pre", lambda self, pre: self.add_string("tokenizer.ggml.pre", "mystery")
    )
    path = write_gguf(source, tmp_path, "llama", {"": "F16"})
    config = EngineArgs(model=str(path)).create_engine_config()
    with pytest.raises(
        ConfigError, match=r"tokenizer\.ggml\.pre='mystery' is not supported; .*put the model's tokenizer.json"
    ):
        get_tokenizer(config.model.tokenizer_path)


def test_a_split_model_is_read_from_all_its_files(cpu, tmp_path):
    source = make_tiny_model("LlamaForCausalLM", tmp_path / "plain")
    path = write_gguf(source, tmp_path, "llama", {"": "Q8_0"})
    whole = gguf.GGUFReader(str(path))
    parts = [tmp_path / f"split-{i:05d}-of-00002.gguf" for i in (1, 2)]
    for part, tensors in zip(parts, (whole.tensors[:7], whole.tensors[7:]), strict=True):
        writer = gguf.GGUFWriter(str(part), "llama")
        if part is parts[0]:
            for name, field in whole.fields.items():
                if not name.startswith("GGUF.") and name != "general.architecture":
                    sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                    writer.add_key_value(name, field.contents(), field.types[0], sub)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    path.unlink()
    assert_equal(cpu, parts[0])
    assert find_gguf(str(tmp_path)) == parts[0]
    parts[1].unlink()
    with pytest.raises(ConfigError, match=r"one of 2 files, of which split-00002-of-00002\.gguf is missing"):
        load(cpu, parts[0])


def test_the_load_format_may_be_named(cpu, tmp_path):
    source = make_tiny_model("LlamaForCausalLM", tmp_path / "plain")
    path = write_gguf(source, tmp_path, "llama", {"": "Q8_0"})
    loaded = load(cpu, path, load_format="gguf", quantization="gguf")
    assert torch.equal(logprobs_of(loaded), logprobs_of(load(cpu, path)))
    with pytest.raises(ConfigError, match=r"load_format='gguf', but model=.* neither a \.gguf file nor"):
        load(cpu, source, load_format="gguf")


def test_a_folder_with_several_models_asks_which(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"several models \(a\.gguf, b\.gguf\); name one of these files"):
        EngineArgs(model=str(tmp_path)).create_engine_config()


HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not one of 2, 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "the number of tensors is 1099511627776"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1), "8 bytes are missing"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60), "a string's length is"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 12 + 1), "a value's type is 13"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 1), "an array of arrays"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 4, 1 << 31), "bytes are missing"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"a", 1, 32, 99, 0), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"a", 1, 31, 2, 0), r"shape \[31\], in blocks of 32"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"a", 1, 32, 0, 0), "tensor a ends at byte"),
    ],
)
def test_damaged_headers_are_refused(tmp_path, content, message):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_header(str(tmp_path / "x.gguf"))
    assert caught.value.setting == "model"


@pytest.mark.parametrize("cut", [10, 200, 5000, -1])
def test_a_truncated_file_is_refused(tmp_path, cut):
    source = make_tiny_model("LlamaForCausalLM", tmp_path / "plain")
    path = write_gguf(source, tmp_path, "llama", {"": "F16"})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ConfigError, match="not a whole GGUF file"):
        EngineArgs(model=str(path)).create_engine_config()


def test_what_is_not_supported_is_refused_with_what_is(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ConfigError, match=r"general\.architecture='rwkv7', which is not supported; supported: llama, qwen2"
    ):
        EngineArgs(model=str(tmp_path / "x.gguf")).create_engine_config()


def test_a_type_without_a_decoder_is_named(tmp_path):
    source = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", **WIDE)
    path = write_gguf(source, tmp_path, "llama", {"": "F16", "ffn_down": "Q8_0"})
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(
            ConfigError, match=r"blk\.0\.ffn_down\.weight is I8, which is not supported; supported: F32, F16"
        ),
    ):
        patch.setitem(TYPES, 8, dataclasses.replace(TYPES[8], name="I8"))
        EngineArgs(model=str(path)).create_engine_config()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_have_their_heads_and_columns(tmp_path, rank):
    """Rows in the checkpoint's order, columns in whole blocks."""
    ops.select("any")
    source = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", intermediate_size=128)
    path = write_gguf(source, tmp_path, "llama", {"": "Q4_1"})
    hf = EngineArgs(model=str(path)).create_engine_config().model.hf_config
    spec, method, reader = (
        ModelRegistry.resolve(hf.architectures).make_spec(hf),
        linear_method(None, hf),
        GGUFReader(hf),
    )
    plan = ParallelPlan(2, rank)
    sources = sources_of(modules_of(spec), spec, plan, method, reader.infos)
    assembler = Assembler(sources, plan, torch.float32, torch.device("cpu"), method)
    finished = (assembler.add(name, tensor) for name, tensor in reader.stream())
    done = {module.name: weight for module, weight in filter(None, finished)}
    worth = load_file(tmp_path / "worth/model.safetensors")
    query, key, value = (worth[f"model.layers.1.self_attn.{part}_proj.weight"].chunk(2)[rank] for part in "qkv")
    expected = {
        "layers.1.qkv": torch.cat((query, key, value)),
        "layers.1.down": worth["model.layers.1.mlp.down_proj.weight"],
    }
    expected["layers.1.down"] = expected["layers.1.down"].chunk(2, dim=1)[rank]
    for name, values in expected.items():
        torch.testing.assert_close(dense(done[name], torch.float32), values, atol=1e-6, rtol=1e-5)
