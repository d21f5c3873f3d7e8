"""From keywords to one frozen configuration: defaults, derived values with their provenance, and every refusal."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quire.config import AttentionConfig, PoolerConfig, ProfilerConfig, StructuredOutputsConfig, checks
from quire.engine import arg_resolve, settings, vllm_settings
from quire.engine.arg_utils import AsyncEngineArgs, EngineArgs, UsageContext
from quire.errors import ConfigError

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 1024, "dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip


@dataclasses.dataclass
class KernelConfig:
    """A config class of the user's, as other engines have them."""

    moe_backend: str = "auto"
    ir_op_priority: dict[str, Any] = dataclasses.field(default_factory=dict)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3], "temperature": 0.5}')
    return str(tmp_path)


def resolve(model: str, usage: UsageContext | None = None, **values: Any):
    return EngineArgs(model=model, **values).create_engine_config(usage)


def test_a_folder_becomes_a_whole_configuration(model: str) -> None:
    config = resolve(model)
    assert config.model.path == model and config.model.architecture == "LlamaForCausalLM"
    assert (config.model.dtype, config.model.max_model_len, config.model.vocab_size) == ("bfloat16", 1024, 128)
    assert config.model.eos_token_ids == (2, 3) and config.model.default_sampling == {"temperature": 0.5}
    assert config.model.served_model_name == (model,) and config.model.tokenizer_path == model
    assert config.scheduler.max_model_len == 1024 and config.scheduler.policy == "fcfs"
    assert config.cache.block_size == 16 and config.cache.enable_prefix_caching
    assert config.device.device == "cpu" and len(config.instance_id) == 8


def test_defaults_are_those_that_users_know() -> None:
    args = EngineArgs()
    assert (args.dtype, args.seed, args.max_logprobs, args.load_format) == ("auto", 0, 20, "auto")
    assert (args.gpu_memory_utilization, args.kv_cache_dtype, args.tensor_parallel_size) == (0.9, "auto", 1)
    assert (args.scheduling_policy, args.generation_config, args.tokenizer_mode) == ("fcfs", "auto", "auto")


def test_every_config_is_frozen(model: str) -> None:
    config = resolve(model)
    for part in (config, config.model, config.cache, config.scheduler, config.parallel, config.load, config.device):
        field = dataclasses.fields(part)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field, None)


def test_two_engines_have_different_instance_ids(model: str) -> None:
    assert resolve(model).instance_id != resolve(model).instance_id


def test_sizes_depend_on_who_asks_and_say_so(model: str) -> None:
    offline, server = resolve(model, UsageContext.LLM_CLASS), resolve(model, UsageContext.API_SERVER)
    assert offline.scheduler.max_num_seqs > server.scheduler.max_num_seqs
    assert offline.scheduler.max_num_batched_tokens > server.scheduler.max_num_batched_tokens
    assert offline.provenance["scheduler.max_num_seqs"].startswith("offline on cpu")


def test_what_the_user_gives_has_no_provenance_and_what_is_derived_has(model: str) -> None:
    derived = resolve(model).provenance
    for name in ("model.dtype", "model.max_model_len", "scheduler.max_num_seqs", "scheduler.max_num_batched_tokens"):
        assert derived[name]
    given = resolve(model, max_num_seqs=4, max_num_batched_tokens=64, block_size=32)
    assert not {"scheduler.max_num_seqs", "scheduler.max_num_batched_tokens", "cache.block_size"} & set(
        given.provenance
    )
    assert (given.scheduler.max_num_seqs, given.cache.block_size) == (4, 32)


def test_a_step_always_has_room_for_every_row(model: str) -> None:
    assert resolve(model, max_num_seqs=5000).scheduler.max_num_batched_tokens == 5000
    with pytest.raises(ConfigError, match="max_num_batched_tokens=4 is less than max_num_seqs=8"):
        resolve(model, max_num_batched_tokens=4, max_num_seqs=8)


def test_without_chunked_prefill_a_step_holds_the_longest_prompt(model: str) -> None:
    config = json.loads(Path(model, "config.json").read_text())
    Path(model, "config.json").write_text(json.dumps({**config, "max_position_embeddings": 50_000}))
    assert resolve(model, enable_chunked_prefill=False).scheduler.max_num_batched_tokens == 50_000
    with pytest.raises(ConfigError, match="max_num_batched_tokens=4096 is less than max_model_len=50000"):
        resolve(model, enable_chunked_prefill=False, max_num_batched_tokens=4096)


def test_a_small_step_lowers_the_default_number_of_rows_and_never_a_given_one(model: str) -> None:
    config = resolve(model, max_num_batched_tokens=8)
    assert (config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs) == (8, 8)
    assert "max_num_batched_tokens" in config.provenance["scheduler.max_num_seqs"]
    with pytest.raises(ConfigError, match="max_num_seqs=16"):
        resolve(model, max_num_batched_tokens=8, max_num_seqs=16)


@pytest.mark.parametrize("asked", ["auto", -1])
def test_a_length_that_is_left_open_is_at_most_the_models(model: str, asked: object) -> None:
    config = resolve(model, max_model_len=asked)
    assert config.model.max_model_len == 1024 and config.model.fits_max_model_len
    assert config.provenance["model.max_model_len"].startswith("what fits in memory, at most")
    assert not resolve(model).model.fits_max_model_len


def test_objects_of_settings_are_taken_like_dicts(model: str) -> None:
    asked = StructuredOutputsConfig(disable_any_whitespace=True)
    assert resolve(model, structured_outputs_config=asked).structured_outputs == asked
    asked = StructuredOutputsConfig(reasoning_parser="qwen3")
    assert resolve(model, structured_outputs_config=asked).reasoning.reasoning_parser == "qwen3"
    both = resolve(model, structured_outputs_config=asked, reasoning_config={"reasoning_parser": "deepseek_r1"})
    assert both.reasoning.reasoning_parser == "deepseek_r1"
    profiler = ProfilerConfig(dir="/tmp/traces", max_iterations=3)
    assert resolve(model, profiler_config=profiler).observability.profiler == profiler
    words: dict[str, Any] = {"torch_profiler_dir": "/tmp/traces", "torch_profiler_with_stack": False}
    theirs = ProfilerConfig(profiler="torch", **words)
    assert theirs == ProfilerConfig(dir="/tmp/traces", with_stack=False) == dataclasses.replace(theirs)
    assert resolve(model, profiler_config=theirs).observability.profiler == theirs
    pooler = PoolerConfig(seq_pooling_type="MEAN", use_activation=False)
    pooling = resolve(model, runner="pooling", pooler_config=pooler).model.pooling
    assert pooling is not None and (pooling.kinds, pooling.activation) == (("mean",), "none")
    assert resolve(model, attention_config=AttentionConfig(backend="TRITON_ATTN")).attention.backend == "triton"
    EngineArgs(kernel_config=KernelConfig(moe_backend="triton"))  # type: ignore[call-arg]


def test_what_attention_config_names_is_the_backend(model: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="quire")
    config = resolve(model, attention_config={"backend": "FLASH_ATTN", "flash_attn_version": 3})
    assert config.attention.backend == "flash"
    assert "attention_config.flash_attn_version has no effect" in caplog.text
    assert resolve(model, attention_config={}, attention_backend="triton").attention.backend == "triton"
    for wrong in ({"backend": "flash"}, {"bakend": "flash"}):
        with pytest.raises(ConfigError, match=r"attention_backend='triton' and|did you mean 'backend'") as error:
            resolve(model, attention_config=wrong, attention_backend="triton")
        assert error.value.setting == "attention_config"


@pytest.mark.parametrize("wrong", [{"moe_bakend": "triton"}, {"speed": 1}])
def test_a_key_that_kernel_config_does_not_have_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="kernel_config has"):
        EngineArgs(kernel_config=wrong)  # type: ignore[call-arg]


def test_the_log_is_written_as_logging_config_says(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    for name in ("use_log_level", "use_log_format", "use_log_config"):
        monkeypatch.setattr(arg_resolve, name, lambda value, name=name: asked.append((name, value)))
    monkeypatch.setattr(arg_resolve, "leave_logging_alone", lambda: asked.append(("leave", "")))
    resolve(model, logging_config={"log_level": "debug", "formatter": "json", "pylogging_config_file": "f.json"})
    assert asked == [("use_log_config", "f.json"), ("use_log_level", "DEBUG"), ("use_log_format", "json")]
    resolve(model, logging_config={"configure_logging": False})
    assert asked[3:] == [("leave", "")]
    for wrong in ({"log_level": "LOUD"}, {"formatter": "xml"}, {"level": "INFO"}):
        with pytest.raises(ConfigError, match="logging_config"):
            resolve(model, logging_config=wrong)


@pytest.mark.parametrize(
    ("asked", "read_as"),
    [
        ("runai_streamer", "safetensors"),
        ("fastsafetensors", "safetensors"),
        ("instanttensor", "safetensors"),
        ("npcache", "pt"),
    ],
)
def test_formats_that_are_another_librarys_way_to_read_the_same_files_are_read(
    model: str, asked: str, read_as: str
) -> None:
    config = resolve(model, load_format=asked)
    assert config.load.load_format == read_as and asked in config.provenance["load.load_format"]


@pytest.mark.parametrize(("asked", "meant"), [("sha256_cbor", "sha256"), ("xxhash", "blake2b"), ("sha256", "sha256")])
def test_vllms_names_of_hashes_are_taken(model: str, asked: str, meant: str) -> None:
    assert resolve(model, prefix_caching_hash_algo=asked).cache.prefix_caching_hash_algo == meant


def test_paths_and_none_are_taken_where_users_write_them(model: str) -> None:
    config = EngineArgs(model=Path(model), seed=None, hf_overrides=None, override_generation_config=None)  # type: ignore[arg-type]
    resolved = config.create_engine_config()
    assert (resolved.model.path, resolved.model.seed) == (model, 0)


def test_swapping_needs_room_to_swap_to(model: str) -> None:
    with pytest.raises(ConfigError, match="swap_space above 0") as error:
        resolve(model, preemption_mode="swap")
    assert error.value.setting == "swap_space"
    assert resolve(model, preemption_mode="swap", swap_space=0.01).scheduler.preemption_mode == "swap"


def test_rope_settings_and_overrides_reach_the_config(model: str) -> None:
    config = resolve(model, rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_theta=5e5, hf_overrides={"x": 1})
    assert config.model.max_model_len == 2048
    assert config.model.hf_config.rope_theta == 5e5 and config.model.hf_config.x == 1
    function = resolve(model, hf_overrides=lambda values: {**values, "y": 2}, rope_theta=1.0)
    assert function.model.hf_config.y == 2 and function.model.hf_config.rope_theta == 1.0


def test_an_overridden_eos_id_joins_the_configs_own(model: str) -> None:
    assert resolve(model, override_generation_config={"eos_token_id": 9}).model.eos_token_ids == (2, 9)


def test_the_configuration_keeps_what_was_asked_of_the_model(model: str) -> None:
    config = resolve(model, hf_overrides={"x": 1}, rope_theta=7.0, override_generation_config={"top_k": 3})
    assert (config.model.hf_overrides, config.model.rope_theta) == ({"x": 1}, 7.0)
    assert config.model.override_generation_config == {"top_k": 3}


def test_a_configuration_survives_the_way_to_a_core_process(model: str) -> None:
    from quire.config.wire import config_from_plain, config_to_plain

    config = resolve(model, served_model_name=["a", "b"], hf_overrides={"x": {"y": 1}}, max_num_seqs=3)
    assert config_from_plain(json.loads(json.dumps(config_to_plain(config)))) == config


def test_token_ids_alone_need_no_tokenizer(model: str) -> None:
    assert resolve(model, skip_tokenizer_init=True).model.tokenizer_path == ""


def test_served_names_may_be_one_or_several(model: str) -> None:
    assert resolve(model, served_model_name="a").model.served_model_name == ("a",)
    assert resolve(model, served_model_name=["a", "b"]).model.served_model_name == ("a", "b")


def test_the_description_may_be_another_models(model: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 512}))
    config = resolve(model, hf_config_path=str(tmp_path / "other"))
    assert config.model.path == model and config.model.max_model_len == 512


def test_memory_for_offloaded_pages_is_short_for_a_connector(model: str) -> None:
    config = resolve(model, kv_offloading_size=0.5).kv_transfer
    assert config is not None and config.kv_connector == "memory"
    assert config.kv_connector_extra_config == {"max_bytes": 1 << 29}


def test_other_names_of_backends_of_grammars_are_taken(model: str) -> None:
    assert resolve(model, structured_outputs_config={"backend": "outlines"}).structured_outputs.backend == "auto"
    assert resolve(model, guided_decoding_backend="lm-format-enforcer").structured_outputs.backend == "auto"


def test_kv_events_are_published_where_they_are_enabled(model: str) -> None:
    assert resolve(model, kv_events_config={"enable_kv_cache_events": False}).kv_events is None
    config = resolve(model, kv_events_config={"enable_kv_cache_events": True, "topic": "kv"}).kv_events
    assert config is not None and config.topic == "kv"


def test_checkpoint_code_is_never_run_and_the_log_says_so(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    resolve(model, trust_remote_code=True)
    assert "trust_remote_code" in capsys.readouterr().out


# --- refusals ---


WRONG = {
    "model": [5, b"x"],
    "dtype": ["int3", 5],
    "seed": [-1, 1.5, "x", True, 1 << 64],
    "max_model_len": [0, -2, 1.5, "most", "4k", 1025, True],
    "block_size": [0, -16, 1.5],
    "gpu_memory_utilization": [0, 1.01, -1, "x", float("nan")],
    "kv_cache_memory_bytes": [0, -1, 1.5],
    "num_gpu_blocks_override": [0, 1, "many"],
    "swap_space": [-1, "x", float("inf")],
    "kv_cache_dtype": ["fp8_e5m2", 3],
    "max_num_batched_tokens": [0, -5, 2.5],
    "max_num_seqs": [0, -1, 10**9],
    "scheduling_policy": ["lifo", "priorty", None],
    "preemption_mode": ["drop"],
    "enable_chunked_prefill": ["yes", 1],
    "enable_prefix_caching": ["no", 0],
    "tensor_parallel_size": [0, 1.0],
    "pipeline_parallel_size": [0, 1.5],
    "data_parallel_size": [0, 1.5],
    "distributed_executor_backend": ["threads", 5],
    "scheduler_cls": ["Scheduler", 5],
    "load_format": ["bin", "safetensor", "tensorizer", "runai_streamer_sharded", "ipc_cache", "modelexpress"],
    "max_logprobs": [-2, 2.5],
    "logprobs_mode": ["raw"],
    "served_model_name": [[""], [5], 5],
    "hf_overrides": [[1], {1: 2}],
    "generation_config": [5, "/nowhere"],
    "override_generation_config": [{"temperature": "hot"}],
    "device": ["gpuu", 5],
    "cpu_threads": [-1, 1.5],
    "max_step_ms": [-1, "fast"],
    "max_num_waiting": [-1],
    "runner": ["sing"],
    "cpu_offload_gb": [1, -1],
    "watermark": [-0.1, 1.5],
    "kv_offloading_size": [0, -1],
    "kv_offloading_backend": ["lmcache"],
    "lora_target_modules": [[5]],
    "default_mm_loras": [5, "a"],
    "enable_expert_parallel": ["yes"],
    "disable_log_stats": [None],
    "logits_processors": ["a.b", [5]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_an_impossible_value_is_refused_by_its_settings_name(model: str, name: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(**{"model": model, name: value})
    assert name in str(error.value) and error.value.setting == name


def test_pages_go_to_one_place(model: str) -> None:
    with pytest.raises(ConfigError, match="kv_transfer_config both say where pages go"):
        resolve(model, kv_offloading_size=1, kv_transfer_config={"kv_connector": "memory"})


def test_every_field_has_a_check_and_its_default_passes_it() -> None:
    settings.check_settings(AsyncEngineArgs())
    assert all(isinstance(field.metadata["check"], checks.Check) for field in dataclasses.fields(AsyncEngineArgs))


def test_a_mistyped_word_gets_a_hint(model: str) -> None:
    with pytest.raises(ConfigError, match="did you mean 'priority'"):
        resolve(model, scheduling_policy="priorty")


def test_an_unknown_keyword_gets_a_hint() -> None:
    with pytest.raises(ConfigError, match="'max_model_length' is not an engine setting; did you mean 'max_model_len'"):
        EngineArgs(max_model_length=5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"'qqq' is not an engine setting$"):
        EngineArgs(qqq=5)  # type: ignore[call-arg]


def test_what_is_not_there_yet_is_accepted_at_its_default_and_refused_otherwise() -> None:
    EngineArgs(cpu_offload_gb=0, ec_transfer_config=None, compilation_config={})  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"cpu_offload_gb=4 is not available") as error:
        EngineArgs(cpu_offload_gb=4)  # type: ignore[call-arg]
    assert error.value.setting == "cpu_offload_gb"
    with pytest.raises(ConfigError, match="ec_transfer_config="):
        AsyncEngineArgs(ec_transfer_config={"ec_role": "ec_both"})  # type: ignore[call-arg]


def test_a_secret_is_not_repeated_in_an_error() -> None:
    args = EngineArgs(hf_token="tok-123")
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(args, model="/no/such/folder").create_engine_config()
    assert "tok-123" not in str(error.value)
    assert "tok-123" not in repr(args)


def test_no_name_is_both_there_and_not_there() -> None:
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    aliases = checks.aliases_of(AsyncEngineArgs)
    assert not fields & (vllm_settings.NO_EFFECT.keys() | aliases.keys())
    assert set(vllm_settings.LIST["also_accepted"]) <= vllm_settings.DEFAULTS.keys() - fields
    assert vllm_settings.NO_EFFECT.keys() <= vllm_settings.DEFAULTS.keys() and not set(aliases.values()) - fields


def test_other_spellings_set_the_same_field() -> None:
    assert EngineArgs(policy="fair").scheduling_policy == "fair"  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="one setting"):
        EngineArgs(policy="fair", scheduling_policy="fcfs")  # type: ignore[call-arg]


def test_no_model_means_the_built_in_one_or_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.resources

    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path)
    with pytest.raises(ConfigError, match="no model is named"):
        EngineArgs().create_engine_config()
    demo = tmp_path / "assets" / "demo"
    demo.mkdir(parents=True)
    (demo / "config.json").write_text(json.dumps(CONFIG))
    config = EngineArgs().create_engine_config()
    assert config.model.model == "quire-demo" and config.model.path == str(demo)
    assert "built-in" in config.provenance["model.model"]
    assert EngineArgs(model="quire-demo").create_engine_config().model.path == str(demo)
    monkeypatch.chdir(tmp_path)
    demo.rename("quire-demo")
    assert EngineArgs(model="quire-demo").create_engine_config().model.path == str(tmp_path / "quire-demo")


def test_an_unknown_environment_variable_is_warned_about(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_PLUGIN", "x")
    resolve(model)
    resolve(model)
    assert capsys.readouterr().out.count("QUIRE_PLUGIN is not known; did you mean QUIRE_PLUGINS?") == 1
