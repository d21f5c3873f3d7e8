"""The pages of the project are true: commands parse, request bodies fit, names import. Commands that a CPU without a model hub
can run do run, on exactly the installation that the README describes. docs/clients.md and docs/lora.md
have tests of their own (tests/clients, test_lora_guide.py)."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.conftest import DECLARED, DemoServer, Installation
from tests.docs.pages import (
    BLOCKS,
    DEMO_SERVER,
    PAGES,
    PYTHON,
    ROOT,
    SHELL,
    Block,
    commands_named,
    inline_commands,
    split_commands,
    statements,
)

from quire.engine.arg_parser import ArgumentParser
from quire.entrypoints.cli import bench
from quire.entrypoints.cli.main import COMMANDS, build_parser
from quire.entrypoints.http.decoding import BodyDecoder
from quire.entrypoints.server.routes import WORK
from quire.entrypoints.several.models_file import read_models_file

OWN_TESTS = ("clients.md", "lora.md")
BODY_KINDS = {endpoint.path: endpoint.body[0] for endpoint in WORK if len(endpoint.body) == 1}


def parser_of(words: list[str]) -> tuple[ArgumentParser, list[str]]:
    """The parser of a `quire` command line, and the words that it is to read."""
    assert words[1] in COMMANDS, f"{words[1]!r} is no command"
    if words[1] == "bench" and len(words) > 2 and words[2] in bench.BENCHMARKS:
        return bench.build_parser(words[2]), words[3:]
    return build_parser(words[1]), words[2:]


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=f"{block.place} {shlex.join(words)}") for block, words in commands_named("quire")]
)
def test_a_command_line_of_quire_is_understood(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser, rest = parser_of(words)
    try:
        parser.parse_args([word.replace("{…}", "{}") for word in rest])
    except SystemExit as ended:
        assert ended.code == 0, capsys.readouterr().err  # --help


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=f"{place} {shlex.join(words)}") for place, words in inline_commands()]
)
def test_a_command_in_the_text_is_there_with_its_flags(words: list[str]) -> None:
    parser, rest = parser_of(words)
    for word in rest:
        if word.startswith("--"):
            assert word.partition("=")[0].partition(".")[0] in parser._option_string_actions


REQUESTS = [(block, words) for block, words in commands_named("curl") if any(map(DEMO_SERVER.search, words))]


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=f"{block.place} {words[-1][:40]}") for block, words in REQUESTS]
)
def test_a_documented_request_fits_its_route(words: list[str]) -> None:
    url = next(filter(DEMO_SERVER.search, words))
    path = DEMO_SERVER.sub("", url).partition("?")[0]
    if "-d" not in words or path not in BODY_KINDS:
        return  # the server itself is asked below
    warnings: list[str] = []
    BodyDecoder(strict=True).decode(words[words.index("-d") + 1].encode(), BODY_KINDS[path], warnings)
    assert not warnings


@pytest.mark.parametrize("block", [pytest.param(block, id=block.place) for block in PYTHON])
def test_names_of_quire_in_a_python_snippet_can_be_imported(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "quire":
            module = importlib.import_module(str(node.module))
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "quire":
                    importlib.import_module(alias.name)


@pytest.mark.parametrize("block", [pytest.param(b, id=b.place) for b in BLOCKS if b.language in ("json", "yaml")])
def test_a_block_of_json_or_flags_is_valid(block: Block, tmp_path: Path) -> None:
    if block.language == "yaml":
        path = tmp_path / "block.yaml"
        path.write_text(block.text, encoding="utf-8")
        if block.page == "several_models.md":
            assert read_models_file(str(path)).models
        else:
            build_parser("serve").parse_args(["--config", str(path)])
        return
    text = block.text.replace("…", "")
    json.loads(text if text.lstrip().startswith(("{", "[")) else f"{{{text}}}")


def test_packages_that_the_pages_install_are_those_of_the_project() -> None:
    known = {re.split(r"[<>=\[ ;]", text)[0] for texts in DECLARED["optional-dependencies"].values() for text in texts}
    known |= {"modelscope", "apache-tvm-ffi", "pre-commit"}  # of other projects, where a page says what they are for
    known |= {"lmcache", DECLARED["name"]}
    pages = [page for page in PAGES if page.name != "clients.md"]
    lines = [line for page in pages for line in re.findall(r"pip install ([^`\n#]+)", page.read_text(encoding="utf-8"))]
    words = [word.strip("'") for line in lines for word in line.split()]
    named = {word for word in words if word[0] not in "-(….#" and "/" not in word}
    assert lines and not {re.split(r"[<>=\[]", name)[0] for name in named} - known


def test_targets_of_make_are_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"[`$] ?make ([\w-]+)", text))
    assert named and named <= targets


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_of_the_project_that_the_text_names_are_there() -> None:
    homes = (ROOT, ROOT / "src", ROOT / "src/quire", ROOT / "src/quire/kernels/triton")
    for page in PAGES:
        for name in re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|json|md|toml|ipynb))`", page.read_text(encoding="utf-8")):
            if any((home / name.partition("/")[0]).is_dir() for home in homes):
                assert any((home / name).exists() for home in homes), f"{page.name}: {name}"


# --- what runs, on the README's installation ---

_IMPORT_ALL = """
import importlib, pkgutil, sys, quire
skipped = ("quire.kernels.triton", "quire.attention.triton", "quire.structured_output.xgrammar_backend")  # imported on demand
failed = []
for found in pkgutil.walk_packages(quire.__path__, "quire."):
    if found.name.startswith(skipped) or ".__" in found.name or found.name.endswith("._quire_cpu"):
        continue
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        failed.append(f"{found.name} needs {error.name}")
print("\\n".join(failed))
"""


def test_no_module_of_the_core_needs_a_package_that_the_core_does_not_bring(installation: Installation) -> None:
    ran = installation.run("python", "-c", _IMPORT_ALL)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stdout.strip(), ran.stdout


def test_the_developers_packages_are_hidden(hidden: Installation) -> None:
    code = "import importlib.util as u, importlib.metadata as m; "
    code += "print(u.find_spec('pytest'), 'pytest' in m.packages_distributions())"
    assert hidden.run("python", "-c", code).stdout.split() == ["None", "False"]
    assert "xgrammar" in hidden.run("python", "-c", "import xgrammar").stderr


HELP = """
import contextlib, io, json, sys
from quire.entrypoints.cli.main import main
said = {}
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    said[command] = out.getvalue()
print(json.dumps(said))
"""
"""Asks for each command's help."""


def test_every_command_tells_its_options(installation: Installation) -> None:
    ran = installation.run("python", "-c", HELP, "", *COMMANDS)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert not [command for command in said if not said[command].startswith(f"usage: quire {command}".rstrip())]


def test_the_first_request_that_the_server_proposes_is_answered(server: DemoServer) -> None:
    line = server.said.split("Try it:\n")[1].splitlines()[0]
    ran = server.installation.run("bash", "-c", line)
    assert json.loads(ran.stdout)["choices"][0]["message"]["content"] == "17 + 25 = 42", ran.stderr


def test_the_pages_that_the_server_shows_are_there(server: DemoServer) -> None:
    assert f"Or open {server.url}/ in a browser." in server.said
    for path in ("/", "/docs", "/redoc", "/openapi.json"):
        ran = server.installation.run("curl", "-sf", server.url + path)
        assert ran.returncode == 0 and "https://" not in re.sub(r"\$schema[^,]*", "", ran.stdout), path


_SLOW = ("bench", "models")
_OWN_TESTS = ("run", "stop", "as-vllm", "doctor")
"""Commands that start or end other programs, which have tests of their own."""
_WAITS_FOR_A_PERSON = (["quire", "chat"], ["quire", "top"])
_PLACEHOLDER = re.compile(r"[A-Z_]{3,}(\.jsonl)?|.*//host:.*|\./.*|[\w.-]+/[\w.-]+(:\w+)?|.*\.(txt|json|jsonl|jinja)")
_NO_PLACEHOLDERS = re.compile(r"POST|.*/dev/null|in\.jsonl|out\.jsonl")


def can_run(words: list[str], block: Block, is_slow_welcome: bool) -> bool:
    """Whether a command needs only the demo model, the demo server, and files that the block itself makes."""
    if words[0] == "quire":
        if words[1] in _OWN_TESTS:
            return False
        starts_server = words[1] in ("serve", "route") and not any(word.startswith("--help") for word in words)
        if words[1:3] == ["bench", "chaos"]:  # it kills the process that is named
            return False
        if starts_server or words in _WAITS_FOR_A_PERSON or (words[1] in _SLOW and not is_slow_welcome):
            return False
        parts = [part for word in words[2:] for part in word.split()]  # a word may be a command line itself
        return not any(_PLACEHOLDER.fullmatch(part) and not _NO_PLACEHOLDERS.fullmatch(part) for part in parts)
    if words[0] == "curl":
        other_model = re.search(r"^quire serve (?:[\w.-]+/|quire-demo-)", block.text, re.MULTILINE)
        return other_model is None and any(map(DEMO_SERVER.search, words))
    return words[0] in ("cat", "jq", "tail", "grep", "mkdir") or words[:2] == ["python", "-c"]


def at_server(statement: str, server: DemoServer) -> str:
    """A statement that speaks to the demo server; commands that would look for it at its default address are told where it is,
    and benchmarks ask little."""
    statement = re.sub(r"--num-prompts \d+", "--num-prompts 16", server.at_hand(statement))  # hundreds show no more
    for command, flag in (
        ("chat", f"--url {server.url}/v1"),
        ("top", server.url),
        ("bench serve", f"--base-url {server.url}"),
    ):
        if server.url not in statement:
            statement = re.sub(rf"\bquire {command}\b(?! --start-server)", f"quire {command} {flag}", statement)
    return statement


@pytest.mark.parametrize("block", [pytest.param(b, id=b.place) for b in SHELL if b.page not in OWN_TESTS])
def test_what_can_run_of_a_block_of_commands_runs(block: Block, server: DemoServer) -> None:
    is_slow_welcome = "CORE_MODULES" not in server.installation.environment
    chosen = [
        at_server(statement, server)
        for statement in statements(block.script)
        if all(can_run(words, block, is_slow_welcome) for words in split_commands(statement))
    ]
    if not chosen or all(statement.startswith("cat >") for statement in chosen):
        return
    curl = 'curl() { command curl --fail-with-body "$@"; }'
    script = "\n".join(("set -e -o pipefail", curl, 'export HOME="$PWD"', *chosen))
    ran = server.installation.run("bash", "-c", script, timeout=900)
    assert ran.returncode == 0, f"{script}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"


def scripts(marks: str) -> list[object]:
    """Python snippets of a page that belong together, if the first of them has a word."""
    found: dict[str, list[Block]] = {}
    for block in PYTHON:
        if block.page not in OWN_TESTS:
            found.setdefault(block.page, []).append(block)
    joined = {(page, blocks[0].place): blocks for page, blocks in found.items()}
    return [
        pytest.param(
            "\n".join(block.text for block in blocks if marks in block.text or "client." in block.text), id=page
        )
        for (page, _), blocks in joined.items()
        if any(marks in block.text for block in blocks)
    ]


@pytest.mark.parametrize("code", [pytest.param(b.text, id=b.place) for b in PYTHON if "LLM()" in b.text])
def test_a_script_of_the_built_in_model_runs(code: str, installation: Installation) -> None:
    ran = installation.run("python", "-c", code)
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr


@pytest.mark.parametrize("code", scripts(":8000"))
def test_scripts_of_clients_run(code: str, server: DemoServer) -> None:
    environment = {name: value for name, value in server.installation.environment.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", server.at_hand(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
