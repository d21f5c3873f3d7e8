"""`quire translate`: vLLM's commands become Quire's, and every flag is told apart. A start refuses all that is wrong at once."""

import json
import shlex

import pytest
from tools.vllm_commands import command_lines, judge

from quire.engine.arg_utils import EngineArgs
from quire.engine.settings import check_settings
from quire.entrypoints.cli.main import build_parser, main
from quire.entrypoints.cli.translate import ABSENT, AS, NO_MEANING, NOT_NEEDED, TAKEN, translate
from quire.errors import ConfigError


def fates(line: str) -> dict[str, str]:
    return {fate.flag: fate.fate for fate in translate(line).fates if fate.flag}


def test_each_flag_has_its_fate_and_the_command_has_what_is_taken() -> None:
    line = (
        "VLLM_LOGGING_LEVEL=DEBUG VLLM_USE_V1=1 CUDA_VISIBLE_DEVICES=0 vllm serve Qwen/Qwen3-8B -tp 2 --max_model_len 8k "
        "--enable-auto-tool-choice -O3 -O0 --cpu-offload-gb 0 --cpu-offload-gb 4 --no-such-flag 1 2 --dtype half "
        "--attention-config.backend FLASH_ATTN --num-scheduler-steps 8 -cc.mode 0 --model-impl vllm --trust-remote-code"
    )
    assert fates(line) == {
        "VLLM_LOGGING_LEVEL": AS,
        "VLLM_USE_V1": NO_MEANING,
        "-tp 2": TAKEN,
        "--max-model-len 8k": TAKEN,
        "--enable-auto-tool-choice": TAKEN,
        "-O3": NO_MEANING,
        "-O0": AS,
        "--cpu-offload-gb 0": NOT_NEEDED,
        "--cpu-offload-gb 4": ABSENT,
        "--no-such-flag 1 2": ABSENT,
        "--dtype half": TAKEN,
        '--attention-config={"backend": "FLASH_ATTN"}': AS,
        "--num-scheduler-steps 8": NO_MEANING,
        '-cc={"mode": 0}': AS,
        "--model-impl vllm": AS,
        "--trust-remote-code": NO_MEANING,
    }
    assert translate(line).text == (
        "QUIRE_LOGGING_LEVEL=DEBUG CUDA_VISIBLE_DEVICES=0 quire serve Qwen/Qwen3-8B --enforce-eager "
        "--attention-backend FLASH_ATTN -tp 2 --max-model-len 8k --enable-auto-tool-choice "
        "--enforce-eager --dtype half --model-impl quire"
    )


def test_what_runs_in_a_container_is_told() -> None:
    assert fates("docker run --gpus all vllm/vllm-openai:v0.33 --model m") == {
        "docker run … vllm/vllm-openai:v0.33": AS,
        "--model m": TAKEN,
    }


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("vllm serve", "quire serve"),
        ("vllm serve m | tee log", "quire serve m"),
        (
            "docker run --name vllm -m 9g -e HF_TOKEN=x --env VLLM_LOGGING_LEVEL=DEBUG vllm/vllm-openai:v0.33 --model m",
            "HF_TOKEN=x QUIRE_LOGGING_LEVEL=DEBUG quire serve --model m",
        ),
        (
            "docker run --env=HF_TOKEN=x -e=A=b=c -eVLLM_LOGGING_LEVEL=DEBUG --env-file=x -e HOME vllm/vllm-openai --model m",
            "HF_TOKEN=x A=b=c QUIRE_LOGGING_LEVEL=DEBUG quire serve --model m",
        ),
        (
            'docker run --entrypoint bash -e A=b vllm/vllm-openai -c "vllm serve m --port 9 && echo"',
            "A=b quire serve m --port 9",
        ),
        ("sh -c 'exec vllm serve m --port 9'", "quire serve m --port 9"),
        ("docker run --entrypoint vllm ghcr.io/x/vllm-openai serve m --port 80", "quire serve m --port 80"),
        ("vllm serve m 2>&1 & wait", "quire serve m"),
        ("uv run vllm serve m --port 8001 # comment", "quire serve m --port 8001"),
        ("python -m vllm.entrypoints.openai.api_server --model m", "quire serve --model m"),
        (
            "vllm serve $MODEL --max-num-seqs ${SEQS} --port <port>",
            "quire serve $MODEL --max-num-seqs ${SEQS} --port <port>",
        ),
        ("vllm chat --url http://a/v1", "quire chat --url http://a/v1"),
        ("vllm bench latency --batch-size 8", "quire bench latency --batch-size 8"),
        ("vllm serve m \\\n  --port 1", "quire serve m --port 1"),
        ("vllm serve m --served-model-name 'a b' c", "quire serve m --served-model-name 'a b' c"),
        ("vllm serve m --served-model-name a --help", "quire serve m --served-model-name a --help"),
    ],
)
def test_a_command_is_found_among_the_words_of_a_shell(line: str, text: str) -> None:
    assert translate(line).text == text


def test_a_translated_command_is_taken_by_the_server() -> None:
    line = "vllm serve m -tp 2 -q fp8 --hf-overrides.rope_theta 1e6 --enable-prefix-caching --load-format npcache -O2"
    translation = translate(line)
    assert not translation.absent
    build_parser("serve").parse_args(shlex.split(translation.text)[2:])


@pytest.mark.parametrize("line", ["", "ls -l", "vllm", "vllm fly", "python -m vllm.unheard", "vllm serve 'open"])
def test_what_is_no_command_of_vllms_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="command"):
        translate(line)


def test_the_exit_code_says_whether_something_is_absent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "vllm serve m --port 1"]) == 0
    assert main(["translate", "vllm serve m --grpc"]) == 1
    assert "1 of 1 absent" in capsys.readouterr().out
    assert main(["translate", "--json", "vllm serve m --grpc"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["command"] == "quire serve m" and told["flags"][0]["fate"] == ABSENT
    assert main(["translate", "ls"]) == 2
    capsys.readouterr()
    assert main(["translate", "vllm", "serve", "m", "--grpc", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == told, "the words need no quotes"
    assert main(["translate", "vllm serve m --grpc", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == told


def test_flags_that_a_command_needs_are_read_one_by_one() -> None:
    translation = translate("vllm run-batch -i in.jsonl -o out.jsonl --model m")
    assert not translation.absent and translation.text == "quire run-batch -i in.jsonl -o out.jsonl --model m"


def test_a_start_tells_all_that_is_wrong_each_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--max-modl-len 3 --max-num-seqs x --cpu-offload-gb 4 --grpc --port 1"
    assert main(["serve", *words.split()]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line.startswith("quire: error: ") for line in lines] == [True] * 4
    for line, part in zip(
        lines, ("did you mean --max-model-len?", "whole number", "cpu_offload_gb=4", "grpc"), strict=True
    ):
        assert part in line


def test_words_that_no_flag_wants_are_told_with_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "model", "another", "--foo", "1"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2


def test_keywords_and_values_are_refused_together() -> None:
    with pytest.raises(ConfigError) as refused:
        EngineArgs(grpc_port=1, cpu_offload_gb=4, unheard=2)  # type: ignore[call-arg]
    assert [part.setting for part in refused.value.parts] == ["grpc_port", "cpu_offload_gb", "unheard"]
    with pytest.raises(ConfigError) as refused:
        check_settings(EngineArgs(block_size=0, gpu_memory_utilization=7))
    assert len(refused.value.parts) == 2 and str(refused.value).count("\n") == 1


def test_the_tool_finds_command_lines_in_documents(tmp_path) -> None:
    (tmp_path / "docs").mkdir()
    text = "Use `vllm serve` for it, or vllm serve flags.\n\n```\nvllm serve org/a \\\n    --port 1\n"
    text += 'vllm serve org/b --no-such-config \'{\n"kv_connector": "x"}\'\n```\n"vllm serve $M --port 1" --other 3\n'
    (tmp_path / "docs" / "page.md").write_text(text, encoding="utf-8")
    lines = command_lines(tmp_path)
    assert [line.split()[2] for line in lines] == ["org/a", "org/b", "$M"]
    assert [bool(judge(line)["absent"]) for line in lines] == [False, True, False]


def test_a_switch_has_the_two_names_that_vllm_gives_it() -> None:
    line = "vllm serve m --disable-prefix-caching --disable_flashinfer_autotune --enable-uvicorn-access-log"
    assert fates(line) == {
        "--no-enable-prefix-caching": TAKEN,
        "--no-enable-flashinfer-autotune": NO_MEANING,
        "--enable-uvicorn-access-log": ABSENT,  # this one has no opposite
    }
    parsed = build_parser("serve").parse_args(["m", "--disable-prefix-caching"])
    assert parsed.enable_prefix_caching is False


def test_a_parser_that_a_plugin_brings_is_taken_by_its_name() -> None:
    line = "vllm serve m --tool-call-parser mine --reasoning-parser mine"
    assert set(fates(line).values()) == {ABSENT}
    plugged = fates(f"{line} --tool-parser-plugin a.py --reasoning-parser-plugin b.py")
    assert set(plugged.values()) == {TAKEN}


def test_what_only_places_or_stores_is_taken() -> None:
    line = (
        "vllm serve m -pp 2 --numa-bind --numa-bind-nodes 0 0 1 1 --all2all-backend deepep_low_latency "
        "--mamba-ssm-cache-dtype float32 --mamba-cache-mode align --enable-mixed-moe-lora-format "
        """--lora-modules '{"name": "a", "path": "b", "is_3d_lora_weight": true}'"""
    )
    assert ABSENT not in fates(line).values()


def test_what_is_in_an_object_is_read_too() -> None:
    def fate(flag: str, value: str) -> str:
        return fates(f"vllm serve m {flag} '{value}'")[f"{flag} {value}"]

    assert fate("--speculative-config", '{"method":"eagle3","model":"x","attention_backend":"FLASH_ATTN"}') == TAKEN
    assert fate("--speculative-config", '{"method":"extract_hidden_states"}') == TAKEN
    assert fate("--speculative-config", '{"method":"dflash","model":"x"}') == ABSENT
    assert fate("--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_load_failure_policy":"fail"}') == TAKEN
    assert fate("--kv-transfer-config", '{"kv_connector":"MoRIIOConnector"}') == ABSENT
