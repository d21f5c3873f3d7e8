"""Engine settings as flags: spellings, numbers, JSON, dotted keys, and errors that help."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.checks import aliases_of
from quire.engine.arg_help import visible_options
from quire.engine.arg_parser import GROUPS, ArgumentParser, human_int, json_object
from quire.engine.arg_utils import AsyncEngineArgs, EngineArgs
from quire.engine.vllm_settings import ENGINE_DEFAULTS, NO_EFFECT
from quire.errors import ConfigError

FIELDS = dataclasses.fields(AsyncEngineArgs)
UNAVAILABLE = (
    ENGINE_DEFAULTS.keys() - NO_EFFECT.keys() - aliases_of(AsyncEngineArgs).keys() - {field.name for field in FIELDS}
)


def parser() -> ArgumentParser:
    made = ArgumentParser(prog="quire test")
    AsyncEngineArgs.add_cli_args(made)
    return made


def parse(*words: str) -> AsyncEngineArgs:
    return AsyncEngineArgs.from_cli_args(parser().parse_args(words))


def changed(*words: str) -> dict[str, Any]:
    """The fields that the flags changed."""
    default = AsyncEngineArgs()
    return {name: value for name, value in vars(parse(*words)).items() if value != getattr(default, name)}


def test_no_flags_give_the_defaults() -> None:
    assert parse() == AsyncEngineArgs()


@pytest.mark.parametrize("field", [field.name for field in FIELDS])
def test_every_field_has_a_flag_with_both_spellings(field: str) -> None:
    options = parser()._option_string_actions
    assert options[f"--{field.replace('_', '-')}"].dest == field


def test_every_flag_has_a_help_text() -> None:
    assert [field.name for field in FIELDS if not field.metadata["help"]] == []


def test_dashes_and_underscores_are_the_same() -> None:
    assert changed("--max_model_len", "5", "--enable_chunked-prefill") == {
        "max_model_len": 5,
        "enable_chunked_prefill": True,
    }
    assert changed("--max_model_len=5") == {"max_model_len": 5}


def test_short_flags_are_those_of_vllm() -> None:
    assert changed("-tp", "2", "-q", "fp8") == {"tensor_parallel_size": 2, "quantization": "fp8"}


def test_other_names_set_the_same_field() -> None:
    assert changed("--max-num-queued-reqs", "7") == {"max_num_waiting": 7}


def test_booleans_can_be_turned_off() -> None:
    assert changed("--no-enable-prefix-caching", "--enforce-eager") == {
        "enable_prefix_caching": False,
        "enforce_eager": True,
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1.5M", 1572864),
        ("2m", 2_000_000),
        ("1G", 1 << 30),
        ("1t", 10**12),
        ("-1", -1),
        ("0.001k", 1),
        ("10.2123451234567k", 10212),
        ("10.2123451234567g", 10212345123),
    ],
)
def test_numbers_may_be_written_for_people(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "4.5", "1.23M", "1.0001K", "4 k", "4kk", "0x10", "1e3", "four", "4KB"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
        human_int(text)


@given(st.integers(-(10**20), 10**20))
def test_every_whole_number_reads_back(number: int) -> None:
    assert human_int(str(number)) == number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"x": 80g}', {"x": 80 * 10**9}),
        ('{"x": 1.5g, "y": [1K, 2m]}', {"x": 1_500_000_000, "y": [1024, 2_000_000]}),
        ('{"name": "80g", "80g": "a \\" 1k"}', {"name": "80g", "80g": 'a " 1k'}),
        ('{"x": -42, "y": 1.5, "z": 1e3}', {"x": -42, "y": 1.5, "z": 1000.0}),
    ],
)
def test_numbers_in_json_may_be_written_for_people_too(text: str, value: dict[str, Any]) -> None:
    assert json_object(text) == value


def test_json_options_take_json_and_dotted_keys_together() -> None:
    assert changed("--hf-overrides", '{"a": 1, "b": {"c": 2}}') == {"hf_overrides": {"a": 1, "b": {"c": 2}}}
    assert changed("--hf-overrides.a", "1", "--hf_overrides.b.c=x", "--hf-overrides.b.d", "[1]") == {
        "hf_overrides": {"a": 1, "b": {"c": "x", "d": [1]}}
    }
    assert changed("--hf-overrides", '{"a": 1}', "--hf-overrides.b", "true") == {"hf_overrides": {"a": 1, "b": True}}


def test_a_plus_appends_to_a_list_of_a_json_option() -> None:
    words = ["--hf-overrides.a+", "x", "--hf-overrides.a+=y", "--hf-overrides.a+", '["z", 1]']
    assert changed(*words) == {"hf_overrides": {"a": ["x", "y", "z", 1]}}


VLLM_DEFAULTS = [
    ["--ec-transfer-config", "{}"], ["--no-enable-dbo"], ["--no-enable-mm-embeds"],
    ["--compilation-config.level", "3"], ["-cc.mode=3"], ["-dcp", "1"], ["--all2all-backend=allgather_reducescatter"],
    ["-O1"], ["-O", "2"], ["-O3"], ["--optimization-level", "2"],
]  # fmt: skip


@pytest.mark.parametrize("words", VLLM_DEFAULTS, ids=" ".join)
def test_flags_of_what_is_not_there_are_taken_at_their_defaults(words: list[str]) -> None:
    assert changed(*words) == {}


def test_settings_of_media_are_settings_of_their_own() -> None:
    asked = ["--language-model-only", "--limit-mm-per-prompt", '{"image": 2}', "--mm-processor-cache-gb", "0"]
    assert changed(*asked, "--mm-processor-kwargs.num_crops", "4") == {
        "language_model_only": True,
        "limit_mm_per_prompt": {"image": 2},
        "mm_processor_cache_gb": 0.0,
        "mm_processor_kwargs": {"num_crops": 4},
    }


@pytest.mark.parametrize(
    "words",
    [
        ["--cudagraph-capture-sizes", "1", "2", "4"], ["--moe-backend", "marlin"], ["--disable-cascade-attn"],
        ["--no-enable-flashinfer-autotune"], ["-cc", '{"cudagraph_mode": "FULL_DECODE_ONLY"}'], ["--compilation-config", "3"],
        ["--mm-encoder-attn-backend", "FLASH_ATTN"], ["--skip-mm-profiling"],
        ["--kernel-config.moe_backend", "triton"], ["--kernel-config", '{"enable_jit_warmup": false}'],
        ["--safetensors-load-strategy=eager"], ["--no-use-tqdm-on-load"], ["-cc.pass_config.fuse_norm_quant", "true"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_has_no_meaning_here_is_taken_and_the_log_says_why(words: list[str], caplog) -> None:
    caplog.set_level("INFO", logger="quire")
    assert changed(*words) == {}
    assert len([record for record in caplog.records if "has no effect:" in record.message]) == 1


@pytest.mark.parametrize("name", sorted(NO_EFFECT.keys() & ENGINE_DEFAULTS.keys()))
def test_everything_without_effect_is_known_in_python_too(name: str) -> None:
    settings: dict[str, Any] = {name: "something"}
    EngineArgs(**settings)


@pytest.mark.parametrize(
    ("words", "value"), [(["auto"], "auto"), (["AUTO"], "auto"), (["-1"], -1), (["4K"], 4096), (["=-1"], -1)]
)
def test_the_length_may_be_left_to_the_memory(words: list[str], value: object) -> None:
    flag = "--max-model-len"
    arguments = [flag + words[0]] if words[0].startswith("=") else [flag, *words]
    assert changed(*arguments) == {"max_model_len": value}


def test_attention_and_log_are_objects_with_dotted_keys_too() -> None:
    assert changed("--attention-config.backend", "FLASH_ATTN") == {"attention_config": {"backend": "FLASH_ATTN"}}
    assert changed("-ac", '{"backend": "TRITON_ATTN"}') == {"attention_config": {"backend": "TRITON_ATTN"}}
    assert changed("--logging-config.log_level", "DEBUG") == {"logging_config": {"log_level": "DEBUG"}}


@pytest.mark.parametrize("parser", [argparse.ArgumentParser(), ArgumentParser()], ids=["plain", "ours"])
def test_what_was_parsed_are_keywords_of_the_engine(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max-num-seqs: 3\n")
    is_ours = isinstance(parser, ArgumentParser)
    words = ["--seed", "5", *(["--config", str(file)] if is_ours else [])]
    parsed = vars(EngineArgs.add_cli_args(parser).parse_args(words))
    assert EngineArgs(**parsed) == EngineArgs(seed=5, max_num_seqs=3 if is_ours else None)


def test_the_lowest_optimization_level_records_no_steps() -> None:
    assert changed("-O0") == {"enforce_eager": True}
    assert changed("-cc.mode", "0") == changed("--compilation-config.cudagraph_mode", "NONE") == {"enforce_eager": True}


@pytest.mark.parametrize("name", sorted(UNAVAILABLE))
def test_everything_unavailable_has_a_flag_that_refuses(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not available yet|invalid int value"):
        parse(f"--{name.replace('_', '-')}", '["something else"]')


def help_on(topic: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        parser().parse_args([f"--help={topic}" if topic else "--help"])
    return capsys.readouterr().out


def test_help_lists_the_groups_and_everything_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    short = help_on("", capsys)
    assert all(f"\n  {title}\n" in short for title in GROUPS.values()) and "--max-num-seqs" not in short
    assert "max-num-seqs" in short and "--help=all" in short
    everything = help_on("all", capsys)
    assert all(f"--{f.name.replace('_', '-')}" in everything for f in FIELDS)
    assert "--ec-transfer-config" not in everything
    assert (help_on("listgroup", capsys), help_on("page", capsys)) == (short, everything)


@pytest.mark.parametrize("topic", ["scheduler", "Scheduler", "SchedulerConfig"])
def test_help_on_a_group_shows_that_group(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_on(topic, capsys)
    assert "--max-num-seqs" in text and "\nScheduler:" in text and "--max-model-len" not in text


@pytest.mark.parametrize(
    ("topic", "flag"), [("CacheConfig", "--block-size"), ("StructuredOutputsConfig", "--structured-outputs-config")]
)
def test_help_knows_the_names_of_vllms_groups(topic: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flag in help_on(topic, capsys)


@pytest.mark.parametrize("topic", ["max-model", "max_model_len", "--max-model-len", "tokens a request may have"])
def test_help_on_a_word_shows_the_flags_that_speak_of_it(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_on(topic, capsys)
    assert "--max-model-len" in text and "--tokenizer-mode" not in text


def test_help_on_nothing_known_is_an_error_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="nothing here speaks of 'max-modle-len'; did you mean --max-model-len"):
        parser().parse_args(["--help=max-modle-len"])


def test_help_on_what_is_not_there_says_so() -> None:
    with pytest.raises(ConfigError, match="not available yet in Quire: --enable-dbo"):
        parser().parse_args(["--help=enable-dbo"])


def test_every_flag_has_a_text() -> None:
    assert [action.dest for action in visible_options(parser()) if not action.help] == []


def test_lists_take_several_words() -> None:
    assert changed("--served-model-name", "a", "b") == {"served_model_name": ["a", "b"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-model-lem", "5"], r"--max-model-lem.*did you mean --max-model-len\?"),
        (["--max-model-len", "many"], "--max-model-len: 'many' is not a whole number"),
        (["--max-model-len"], "expected one argument"),
        (["--hf-overrides", "{"], "not valid JSON"),
        (["--hf-overrides", "[1]"], "must be a JSON object"),
        (["--hf-overrides.a"], "expected one value"),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "2"], "both as a value and as an object"),
        (["--hf-overrides", "{", "--hf-overrides.a", "1"], "not valid JSON"),
        (["--swap-space", "x"], "--swap-space"),
        (["--ec-transfer-config.ec_role", "x"], "ec_transfer_config={'ec_role': 'x'} is not available yet"),
        (["-dc", '{"x": 1}'], "diffusion_config={'x': 1} is not available yet"),
        (["--speculative-config", "always"], "'always' is not valid JSON"),
        (["--enable-dbo"], "enable_dbo=True is not available yet"),
        (["--mm-encoder-only"], "mm_encoder_only=True is not available yet"),
        (["-O4"], "invalid choice: 4"),
        (["--hf-overrides.a", "1", "--hf-overrides.a+", "2"], "both as a value and as a list"),
        (["--zzz"], "see `quire test --help`"),
        (["--max-model"], "did you mean --max-model-len"),
    ],
)
def test_a_wrong_flag_or_value_is_one_error_that_helps(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*words)


def test_a_parser_that_has_a_flag_already_keeps_it() -> None:
    made = ArgumentParser(prog="quire test")
    made.add_argument("--model", default="mine")
    EngineArgs.add_cli_args(made)
    assert EngineArgs.from_cli_args(made.parse_args([])).model == "mine"


def test_values_that_look_like_flags_stay_values() -> None:
    made = ArgumentParser(prog="quire test")
    made.add_argument("--url")
    made.add_argument("rest", nargs="*")
    args = made.parse_args(["--url=http://a.b/c_d?e=f_g", "--", "--not_a_flag"])
    assert args.url == "http://a.b/c_d?e=f_g" and args.rest == ["--not_a_flag"]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_file_gives_options_and_the_command_line_wins(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.yaml",
        "max-model-len: 4K\nmax_num_seqs: 7\nenforce-eager: true\nserved-model-name: [a, b]\nhf-overrides: {x: 1}\n",
    )
    assert changed("--config", path, "--max-num-seqs", "9") == {
        "max_model_len": 4096,
        "max_num_seqs": 9,
        "enforce_eager": True,
        "served_model_name": ["a", "b"],
        "hf_overrides": {"x": 1},
    }
    assert changed(f"--config={write(tmp_path / 'empty.yaml', '')}") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-model-lem: 5", "'max-model-lem' is not an option; did you mean 'max-model-len'"),
        ("max-model-len: many", "max-model-len: 'many' is not a whole number"),
        ("enforce-eager: 3", "enforce-eager=3 must be true or false"),
        ("swap-space: [1, 2]", r"swap-space=\[1, 2\] must be one value"),
        ("max-model-len: 4.5", "'4.5' is not a whole number"),
        ("optimization-level: 9", r"invalid choice: 9 \(choose from 0, 1, 2, 3\)"),
        ("enable-dbo: true", "enable_dbo=True is not available yet"),
        ("hf-overrides: 3\nhf-overrides.a: 1", "both as a value and as an object"),
        ("[1, 2]", "must hold a mapping"),
        ("a: [", "is not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("config: x", "'config' is not an option"),
        ("help: x", "'help' is not an option"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("--config", write(tmp_path / "a.yaml", text))


def test_a_file_may_hold_dotted_keys_empty_values_and_defaults_of_what_is_not_there(tmp_path: Path) -> None:
    text = "hf-overrides.a.b: 1\nhf-overrides.a.c: x\nrevision:\nenable-dbo: false\n"
    text += "seed: 7\noptimization-level: 0\n"
    expected = {"hf_overrides": {"a": {"b": 1, "c": "x"}}, "seed": 7, "enforce_eager": True}
    assert changed("--config", write(tmp_path / "a.yaml", text)) == expected


def test_a_positional_model_wins_over_the_files(tmp_path: Path) -> None:
    made = ArgumentParser(prog="quire test")
    made.add_argument("model_tag", nargs="?")
    AsyncEngineArgs.add_cli_args(made)
    path = write(tmp_path / "a.yaml", "model: a\n")
    assert made.parse_args(["--config", path]).model == "a"
    parsed = made.parse_args(["b", "--config", path])
    assert (parsed.model_tag, parsed.model) == ("b", None)
    assert made.parse_args(["b", "--config", path, "--model", "c"]).model == "c"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml' cannot be read"):
        parse("--config", str(tmp_path / "none.yaml"))
