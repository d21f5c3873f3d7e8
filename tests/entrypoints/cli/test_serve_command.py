"""`quire serve` and its neighbours refuse wrong settings in one line, before anything is loaded."""

import dataclasses
import json
import socket
import sys
import threading
import types

import pytest
from tests.oracles.tiny_models import make_tiny_model

from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.cli import generate, serve
from quire.entrypoints.cli.main import COMMANDS, build_parser, main
from quire.entrypoints.http.state import ServerSettings
from quire.entrypoints.server.process import ServerProcess
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], "port"),
        (["--port", "x"], "port"),
        (["--shutdown-timeout", "-1"], "shutdown-timeout"),
        (["--ssl-keyfile", "k"], "ssl_certfile"),
        (["--ssl-keyfile", "k", "--ssl-certfile", "c"], "ssl_keyfile: there is no file"),
        (["--api-key", ""], "api_key"),
        (["a", "--model", "b"], "model"),
        (["--allowed-origins", "[1]"], "JSON list of strings"),
        (["--disable-access-log-for-endpoints", "health"], "must begin with /"),
        (["--log-format", "xml"], "log-format"),
        (["--metrics-names", "vlm"], "did you mean 'vllm'?"),
        (["--tool-call-parser", "hermess"], "tool_call_parser='hermess' is not known (did you mean 'hermes'?)"),
        (["--dtype", "floaty16"], "dtype='floaty16' is not valid"),
        (["--prot", "1"], "did you mean --port"),
        (
            ["--chat-template", "/no/such/file"],
            "chat_template '/no/such/file' is neither a template nor a readable file",
        ),
        (["--chat-template", "{% if %}"], "chat_template is not valid Jinja: line 1"),
        (["--headless"], "data_parallel_size_local: hybrid load balancing and headless hosts need it"),
        (["--headless", "--api-server-count", "2"], "api_server_count: a headless host has no API server"),
        (["--middleware", "no.such.thing"], "middleware: 'no.such.thing' cannot be imported"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_line_that_names_it(flags, words, capsys):
    assert main(["serve", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: error: ") and error.count("\n") == 1 and words in error


def test_every_choice_of_the_operator_has_a_flag_of_its_name():
    flags = vars(build_parser("serve").parse_args([])).keys()
    without = {"served_model_names", "max_body_bytes", "drain_retry_after_s"}
    assert {field.name for field in dataclasses.fields(ServerSettings)} - flags == without


VLLM_SCRIPT = """
    some/model --dtype auto --tensor-parallel-size 1 --gpu-memory-utilization 0.92 --max-model-len 8192 --max_num_seqs 256
    --enable-prefix-caching --enable-chunked-prefill --disable-log-requests --swap-space 4 --served-model-name m
    --trust-remote-code --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 --enable-reasoning
    --uvicorn-log-level warning --max-num-batched-tokens 8k -O3 -dcp 1 --all2all-backend allgather_reducescatter
    --limit-mm-per-prompt {} --enable-server-load-tracking --chat-template-content-format auto --port 9000 --api-key a b
"""


def test_a_script_written_for_vllm_is_understood():
    args = build_parser("serve").parse_args(VLLM_SCRIPT.split())
    assert (args.model_tag, args.max_num_seqs, args.max_num_batched_tokens, args.port) == (
        "some/model",
        256,
        8000,
        9000,
    )
    assert args.api_key == ["a", "b"] and args.enable_prefix_caching and args.reasoning_parser == "qwen3"


@pytest.mark.parametrize("flag", ["--grpc", "--cohere-format=x", "--tokens-only"])
def test_what_vllms_server_has_and_this_one_has_not_is_refused_by_name(flag, capsys):
    assert main(["serve", flag]) == 2
    error = capsys.readouterr().err
    assert "is not available yet in Quire" in error and flag.split("=")[0].strip("-").replace("-", "_") in error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tool-strict-level: paramter", "did you mean 'parameter'?"),
        ("reasoning-effort-map: {low: 1}", "must be a JSON object of strings"),
        ("tool-strict-levl: auto", "did you mean 'tool-strict-level'?"),
        ("default-chat-template-kwargs: [1]", "must be a JSON object"),
    ],
)
def test_a_file_of_flags_is_checked_like_flags(text, words, tmp_path, capsys):
    (tmp_path / "flags.yaml").write_text(text)
    assert main(["serve", "--config", str(tmp_path / "flags.yaml")]) == 2
    assert words in capsys.readouterr().err


def test_a_file_of_flags_holds_objects_and_lists(tmp_path):
    (tmp_path / "flags.yaml").write_text(
        "middleware: [a.b, c.d]\nallowed-origins: ['*']\ndefault-chat-template-kwargs: {a: {b: false}}\n"
        "default-chat-template-kwargs.a.c: 1\nreasoning_effort_map: {minimal: low}\n"
    )
    args = build_parser("serve").parse_args(["--config", str(tmp_path / "flags.yaml")])
    assert (args.middleware, args.allowed_origins) == (["a.b", "c.d"], [["*"]])
    assert args.default_chat_template_kwargs == {"a": {"b": False, "c": 1}}
    assert args.reasoning_effort_map == {"minimal": "low"}


def test_help_knows_vllms_name_of_the_servers_flags(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help=Frontend"])
    told = capsys.readouterr().out
    assert "--port" in told and "--tool-call-parser" in told and "--max-num-seqs" not in told


def test_a_benchmark_that_is_not_named_is_asked_for(capsys):
    assert main(["bench"]) == 0
    assert "throughput" in capsys.readouterr().out
    assert main(["bench", "latncy"]) == 2
    assert "did you mean 'latency'?" in capsys.readouterr().err


def test_explain_tells_what_the_servers_flags_do(capsys):
    flags = [
        "--tool-call-parser",
        "llama3_json",
        "--api-key",
        "secret",
        "--port",
        "9000",
        "--strict",
        "--disable-log-requests",
    ]
    assert main(["explain", "--json", *flags]) == 0
    told = capsys.readouterr().out
    server = json.loads(told[told.index("{") :])["server"]
    assert server["tool_call_parser"] == {"value": "llama3_json", "why": "given"}
    assert server["reasoning_parser"] == {"value": "qwen3", "why": "found in the chat template"}
    assert server["chat_template_content_format"]["value"] == "string"
    assert server["address"]["value"] == "http://127.0.0.1:9000" and server["strict"]["value"] is True
    assert server["core"]["value"] == "a process of its own" and "recovery" in server["core"]["why"]
    assert "secret" not in told
    assert main(["explain", "--json", "--tool-call-parser", "nothing"]) == 2


def test_a_port_in_use_is_one_line(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_flags_are_checked_before_the_port(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert main(["serve", "--port", str(other.getsockname()[1]), "--tool-call-parser", "hermess"]) == 2
    assert "tool_call_parser" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        (["generate", "-i", "{prompts}", "-o", "{folder}"], "output"),
        (["run-batch", "-i", "{prompts}", "-o", "{folder}/no/file", "--no-progress"], "output_file"),
        (["bench", "latency", "--json", "{folder}"], "json"),
        (["serve", "--port", "0", "--responses-store", "{folder}"], "responses_store"),
    ],
    ids=str,
)
def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_read(command, setting, tmp_path, capsys):
    line = '{"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "a"}, "prompt": "a"}'
    (tmp_path / "prompts.jsonl").write_text(line + "\n")
    places = {"folder": str(tmp_path), "prompts": str(tmp_path / "prompts.jsonl")}
    words = [word.format(**places) for word in command]
    model = ["--model", str(tmp_path / "no-model")]
    assert main([*words, *model]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"quire: error: {setting}: ")


def test_an_output_keeps_what_it_has_until_the_model_is_loaded(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a\n")
    (tmp_path / "out").write_text("earlier\n")
    words = [
        "generate",
        "-i",
        str(tmp_path / "prompts.txt"),
        "-o",
        str(tmp_path / "out"),
        "--overwrite",
        "--model",
        str(tmp_path / "none"),
    ]
    assert main(words) == 2 and (tmp_path / "out").read_text() == "earlier\n"


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "{folder}/none"],
        ["generate", "{folder}/none", "-i", "{prompts}", "-o", "{folder}/out"],
        ["run-batch", "--model", "{folder}/none", "-i", "{prompts}", "-o", "{folder}/out", "--no-progress"],
        ["bench", "latency", "--model", "{folder}/none"],
        ["compile-cache", "{folder}/none"],
        ["models", "NobodysForCausalLM"],
        ["chat", "-q", "a", "--url", "http://127.0.0.1:9/v1"],
        ["complete", "-q", "a", "--url", "http://127.0.0.1:9/v1"],
        ["top", "http://127.0.0.1:9", "--once"],
        ["bench", "serve", "--base-url", "http://127.0.0.1:9", "--num-prompts", "1"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_command_ends_with_2_where_what_an_argument_names_cannot_be_had(words, tmp_path, capsys):
    line = '{"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "a"}, "prompt": "a"}'
    (tmp_path / "prompts.jsonl").write_text(line + "\n")
    places = {"folder": str(tmp_path), "prompts": str(tmp_path / "prompts.jsonl")}
    assert main([word.format(**places) for word in words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("quire: error: ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_a_flag_that_it_does_not_have_with_2(name, capsys):
    words = [name, "latency"] if name == "bench" else [name]
    with pytest.raises(SystemExit) as left:
        sys.exit(main([*words, "--no-such-flag"]))
    assert left.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("quire: error: ")


def test_an_output_that_exists_is_not_replaced_unasked(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a\n")
    (tmp_path / "out").write_text("earlier\n")
    words = ["generate", "-i", str(tmp_path / "prompts.txt"), "-o", str(tmp_path / "out"), "--max-tokens", "2"]
    assert main(words) == 2
    assert "output: " in (error := capsys.readouterr().err) and "exists; --overwrite replaces it" in error
    assert (tmp_path / "out").read_text() == "earlier\n"


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory):
    path = make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("plain"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("has_template", "flags", "fields", "is_told"),
    [
        (True, [], ["messages", "messages", "prompt"], True),
        (True, ["--chat"], ["messages", "messages", "messages"], False),
        (True, ["--no-chat"], ["prompt", "prompt", "prompt"], False),
        (False, [], ["prompt", "prompt", "prompt"], False),
    ],
)
def test_texts_are_messages_where_the_model_has_a_chat_template(
    plain_model, has_template, flags, fields, is_told, tmp_path, capsys
):
    (tmp_path / "in.jsonl").write_text('"one"\n"two"\n{"prompt": "three"}\n')
    template = ["--chat-template", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"]
    words = [
        "generate",
        str(plain_model),
        "-i",
        str(tmp_path / "in.jsonl"),
        "-o",
        str(tmp_path / "out"),
        "--max-tokens",
        "2",
    ]
    small = ["--max-model-len", "64", "--max-num-seqs", "4", "--num-gpu-blocks-override", "40", "--no-progress"]
    assert main([*words, *small, *flags, *(template if has_template else [])]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [next(name for name in ("messages", "prompt") if name in row) for row in rows] == fields
    assert ("each text is taken as a user's message (--no-chat" in capsys.readouterr().err) == is_told


def test_a_system_prompt_without_messages_is_refused(plain_model, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("one\n")
    words = [
        "generate",
        str(plain_model),
        "-i",
        str(tmp_path / "in.txt"),
        "-o",
        str(tmp_path / "out"),
        "--system-prompt",
        "S",
    ]
    assert main([*words, "--no-chat"]) == 2
    assert "no messages with --no-chat" in capsys.readouterr().err
    small = ["--max-model-len", "64", "--max-num-seqs", "4", "--num-gpu-blocks-override", "40"]
    assert main([*words, *small]) == 2
    assert "the model has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "chat", "complete", "generate"])
def test_help_lists_the_flags(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0 and "usage: quire" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["throughput", "latency", "startup", "serve", "sweep", "plot", "compare-results"])
def test_each_benchmark_has_help_and_json(name, capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", name, "--help"])
    assert left.value.code == 0 and "--json" in capsys.readouterr().out


def test_prompts_are_read_from_text_and_from_json_lines(tmp_path):
    text = tmp_path / "p.txt"
    text.write_text("one\n\ntwo\n")
    texts = list(generate.read_rows(str(text)))
    assert texts == [{"id": 0, "text": "one"}, {"id": 2, "text": "two"}]
    lines = tmp_path / "p.jsonl"
    lines.write_text('"a"\n{"prompt": "b", "id": "x"}\n{"prompt_token_ids": [1]}\n{"messages": []}\n')
    rows = list(generate.read_rows(str(lines)))
    assert [row["id"] for row in rows] == [0, "x", 2, 3]
    chat = generate.as_prompts(texts, frozenset({"text"}), "S")
    assert chat[0].keys() == {"id", "messages"}
    assert chat[0]["messages"] == [{"role": "system", "content": "S"}, {"role": "user", "content": "one"}]


@pytest.mark.parametrize("line", ["{", "5", "{}", '{"prompt": 5}', '{"prompt": "a", "messages": []}'])
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('"fine"\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        list(generate.read_rows(str(path)))


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="cannot read"):
        list(generate.read_rows("/nowhere.jsonl"))


def test_the_engine_is_being_loaded_while_the_routes_are_imported(monkeypatch):
    has_begun, engine, got = threading.Event(), types.SimpleNamespace(metrics=None), []

    def load(engine_args, usage_context, core):
        has_begun.set()
        assert core == "process"
        return engine

    def make_app(args, keys):
        assert has_begun.wait(20), "the routes come first"
        return None, None

    monkeypatch.setattr(AsyncLLM, "from_engine_args", load)
    monkeypatch.setattr(serve, "make_app", make_app)
    monkeypatch.setattr(ServerProcess, "run", lambda process: got.append(process._build_engine()) or 0)
    assert main(["serve", "--port", "0"]) == 0 and got == [engine]
