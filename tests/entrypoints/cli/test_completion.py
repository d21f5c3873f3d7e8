"""Completion scripts, asked by the shells themselves; a shell that is not installed is skipped."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.pty_terminal import Terminal

from quire.entrypoints.cli.bench import BENCHMARKS
from quire.entrypoints.cli.completion import SCRIPTS, collect, script
from quire.entrypoints.cli.main import COMMANDS, main


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script for each shell, and a file to be completed."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in SCRIPTS:
        (folder / shell).write_text(script(shell))
    (folder / "requests.jsonl").touch()
    return folder


def needs(shell: str) -> Any:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def bash(folder: Path, *words: str) -> set[str]:
    line = " ".join(f"'{word}'" for word in words)
    program = (
        f"source ./bash; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _quire; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def fish(folder: Path, *words: str) -> set[str]:
    program = f"source ./fish; complete -C '{' '.join(words)}'"
    environment = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_DATA_HOME": str(folder)}
    done = subprocess.run(
        ["fish", "--no-config", "-c", program], cwd=folder, capture_output=True, text=True, check=True, env=environment
    )
    assert done.stderr == ""
    return {line.split("\t")[0] for line in done.stdout.splitlines()}


SHELLS = [pytest.param(bash, marks=needs("bash")), pytest.param(fish, marks=needs("fish"))]


@pytest.mark.parametrize("ask", SHELLS)
@pytest.mark.parametrize(
    ("words", "some", "none"),
    [
        (("quire", "se"), {"serve"}, {"bench"}),
        (("quire", "serve", "--max-model"), {"--max-model-len"}, {"--max-num-seqs"}),
        (("quire", "serve", "-t"), {"-tp"}, {"--tokenizer"}),
        (("quire", "serve", "--uvicorn-log-level", ""), {"debug", "warning"}, {"--port"}),
        (("quire", "bench", "lat"), {"latency"}, {"--json"}),
        (("quire", "bench", "latency", "--bat"), {"--batch-size"}, {"--base-url"}),
        (("quire", "completion", ""), {"bash", "fish", "zsh"}, {"requests.jsonl"}),
        (("quire", "run-batch", "-i", "req"), {"requests.jsonl"}, {"--resume"}),
        (("quire", "chat", "--max-m"), set(), {"--max-model-len"}),
    ],
    ids=lambda value: " ".join(sorted(value) if isinstance(value, set) else value),
)
def test_a_shell_completes(ask: Any, words: tuple[str, ...], some: set[str], none: set[str], scripts: Path) -> None:
    given = ask(scripts, *words)
    assert some <= given and not none & given


@needs("bash")
def test_bash_completes_after_an_equals_sign_and_underscores(scripts: Path) -> None:
    assert bash(scripts, "quire", "serve", "--uvicorn-log-level", "=", "de") == {"debug"}
    assert bash(scripts, "quire", "serve", "--uvicorn-log-level", "=") >= {"debug", "info"}
    assert bash(scripts, "quire", "serve", "--max_model") == {"--max-model-len"}


@needs("fish")
def test_fish_completes_after_an_equals_sign(scripts: Path) -> None:
    assert fish(scripts, "quire", "serve", "--uvicorn-log-level=de") == {"--uvicorn-log-level=debug"}


@needs("zsh")
def test_zsh_completes(scripts: Path) -> None:
    terminal = Terminal([shutil.which("zsh") or "", "-f"], PS1="ask> ", HOME=str(scripts))
    terminal.wait_for("ask> ")
    terminal.type(f"autoload -Uz compinit && compinit -u -d {scripts}/dump && source {scripts}/zsh && echo rea''dy\n")
    terminal.wait_for("ready")
    terminal.wait_for("ask> ")
    terminal.type("quire serve --max-model-l\t")
    terminal.wait_for("--max-model-len")
    terminal.type("\x15quire bench lat\t")
    terminal.wait_for("latency")
    terminal.type("\x15quire serve --uvicorn-log-level crit\t")
    terminal.wait_for("critical")
    terminal.type("\x15exit\n")
    assert terminal.exit_code() == 0


def test_every_command_and_benchmark_is_known() -> None:
    rows = set(collect())
    assert set(COMMANDS) == {each.word for each in rows if each.after == "" and each.word[0] != "-"}
    assert set(BENCHMARKS) == {each.word for each in rows if each.after == "bench" and each.word[0] != "-"}
    with_help = {each.after for each in rows if each.word == "--help"}
    assert with_help == {"", *COMMANDS, *(f"bench {name}" for name in BENCHMARKS)}


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_the_command_prints_the_script(shell: str, capsys: Any) -> None:
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out.count("max-model-len") >= 2


def test_another_shell_is_refused(capsys: Any) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err
