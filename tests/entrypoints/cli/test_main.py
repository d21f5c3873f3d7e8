"""The `quire` command: which module runs, what errors look like, exit codes."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from quire.entrypoints import exit_codes
from quire.entrypoints.cli import main as cli
from quire.errors import CapacityError, ConfigError, EngineError, RequestError
from quire.version import __version__


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """A subcommand `probe` whose `run` is given by the test."""
    monkeypatch.setenv("QUIRE_LOGGING_STREAM", "stderr")

    def make(run) -> None:
        module = ModuleType("quire.entrypoints.cli.probe")

        def add_arguments(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--max-size", type=int)

        vars(module).update(add_arguments=add_arguments, run=run)
        monkeypatch.setitem(sys.modules, "quire.entrypoints.cli.probe", module)
        monkeypatch.setitem(cli.COMMANDS, "probe", "a probe")

    return make


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["-h"], []):
        assert cli.main(words) == 0
        text = capsys.readouterr().out
        assert all(f"  {name} " in text for name in cli.COMMANDS)


def test_help_names_every_group_and_takes_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = cli.help_text()
    assert all(f"\n{title}:\n  {next(iter(commands))} " in text for title, commands in cli.GROUPS.items())
    with pytest.raises(SystemExit) as left:
        cli.main(["help", "chat"])
    assert left.value.code == 0 and capsys.readouterr().out.startswith("usage: quire chat")


def test_the_version_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("word", "hint"), [("srve", "did you mean 'serve'?"), ("zzz", "the commands are run"), ("--verson", "option")]
)
def test_a_wrong_command_gets_a_hint_and_exit_code_2(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_can_describe_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([name, "--help"])
    assert left.value.code == 0 and capsys.readouterr().out.startswith(f"usage: quire {name}")


def test_the_package_is_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "quire", "serve", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: quire serve"), done.stderr


def test_a_command_gets_its_arguments_and_gives_the_exit_code(command) -> None:
    seen: list[int] = []
    command(lambda args: seen.append(args.max_size) or 7)
    assert cli.main(["probe", "--max_size", "3"]) == 7
    assert seen == [3]


def test_a_command_that_says_nothing_succeeded(command) -> None:
    command(lambda args: None)
    assert cli.main(["probe"]) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a\n b"), 2), (RequestError("a b"), 2), (CapacityError("a b"), 1), (EngineError("a b"), 1)],
)
def test_errors_raised_on_purpose_are_one_line(
    command, error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    command(run)
    assert cli.main(["probe"]) == code
    assert capsys.readouterr().err == "quire: error: a b\n"


def test_the_documented_exit_codes_are_those_of_every_command() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    codes = {value for name, value in vars(exit_codes).items() if name.isupper()}
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)] == sorted(codes)


def test_a_wrong_flag_is_one_line_with_a_hint(command, capsys: pytest.CaptureFixture[str]) -> None:
    command(lambda args: 0)
    assert cli.main(["probe", "--max-sise", "3"]) == 2
    assert capsys.readouterr().err == "quire: error: unrecognized arguments: --max-sise 3 (did you mean --max-size?)\n"


def test_an_interrupt_is_one_line_and_exit_code_130(command, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command(run)
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == "quire: interrupted\n"


def test_ctrl_c_ends_a_waiting_process_without_a_stack_trace() -> None:
    code = (
        "import sys, time\nfrom types import ModuleType\nfrom quire.entrypoints.cli import main as cli\n"
        "module = ModuleType('m')\nmodule.add_arguments = lambda parser: None\n"
        "def run(args):\n    print('ready', flush=True)\n    time.sleep(600)\n"
        "module.run = run\nsys.modules['quire.entrypoints.cli.probe'] = module\n"
        "cli.COMMANDS['probe'] = 'a probe'\nsys.exit(cli.main(['probe']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "quire: interrupted\n"


@pytest.mark.parametrize("name", ["explain", "collect-env"])
def test_logs_do_not_mix_with_what_a_command_prints(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    words = [name, "--json", *([str(tmp_path)] if name == "explain" else [])]
    environment = {key: value for key, value in os.environ.items() if key != "QUIRE_LOGGING_STREAM"}
    done = subprocess.run(
        [sys.executable, "-m", "quire.entrypoints.cli.main", *words],
        capture_output=True, text=True, env={**environment, "QUIRE_LOGGING_LEVEL": "DEBUG", "QUIRE_TYPO": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    if name == "explain":
        check_explanation(report)
        assert "QUIRE_TYPO" in done.stderr
    else:
        assert report["quire"]["version"] == __version__ and report["platform"]["name"] == "cpu"


TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
    "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip


def check_explanation(report: dict) -> None:
    assert report["config"]["model"]["dtype"] == {"value": "float32", "why": "torch_dtype in config.json says so"}
    assert report["platform"]["capabilities"]["dtypes"]["why"]
    assert {"linear", "rms_norm", "paged_attention"} <= set(report["kernels"])
    assert all(kernel["chosen"] in ("cpu", "any") for kernel in report["kernels"].values())
    assert report["attention_backend"]["chosen"] in report["attention_backend"]["reasons"]
    # Embedding and head, and for each of two layers: q, k, v, o, three of the MLP, two norms; one last norm.
    attention = 32 * 32 + 2 * 16 * 32 + 32 * 32
    assert report["model"]["parameters"] == 2 * 128 * 32 + 2 * (attention + 3 * 64 * 32 + 2 * 32) + 32
    assert report["memory"]["kv_tokens"] >= 256
    assert report["limits"]["MAX_N"] == 16384


def test_the_text_form_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    done = subprocess.run(
        [sys.executable, "-m", "quire.entrypoints.cli.main", "explain", str(tmp_path), "--kv-cache-memory-bytes", "1k"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "'float32'  (torch_dtype in config.json says so)" in done.stdout
    assert "refused" in done.stdout and "max_model_len" in done.stdout


def test_the_api_key_is_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "s3cret")
    monkeypatch.setenv("QUIRE_LOGGING_STREAM", "stderr")
    assert cli.main(["collect-env"]) == 0
    text = capsys.readouterr().out
    assert "s3cret" not in text and "QUIRE_API_KEY" in text
