"""What the operator chooses with flags is seen in answers: defaults of requests, templates, middleware, limits, the log, TLS."""

import asyncio
import json
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from tests.engine.builders import make_config
from tests.oracles.demo_server import DemoServer

from quire.entrypoints.cli.main import build_parser, main
from quire.entrypoints.cli.serve import server_settings
from quire.entrypoints.fingerprint import build_fingerprint, check_fingerprint
from quire.entrypoints.http.http_protocol import bounded_to
from quire.entrypoints.http.listen import ListenOptions
from quire.entrypoints.http.middleware import named_middleware
from quire.entrypoints.http.state import ServerSettings
from quire.entrypoints.server import process as server_process
from quire.errors import ConfigError

pytestmark = pytest.mark.anyio
HERE = "tests.entrypoints.openai.test_operator_choices"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def settings(*flags: str) -> ServerSettings:
    return server_settings(build_parser("serve").parse_args(list(flags)))


async def prompt_of(server: Any, flags: tuple[str, ...], **fields: Any) -> str:
    """What the template made of a request."""
    async with server(settings=settings(*flags)) as s:
        response = await s.chat(**fields)
        assert response.status_code == 200, response.text
        return s.engine.started[0][1]["prompt"]


async def test_templates_have_the_operators_variables_unless_the_request_says_otherwise(server):
    flags = ("--default-chat-template-kwargs", '{"shout": true}')
    assert "!" in await prompt_of(server, flags)
    assert "!" not in await prompt_of(server, flags, chat_template_kwargs={"shout": False})
    assert "!" not in await prompt_of(server, ())
    async with server(settings=settings(*flags)) as s:
        messages = [{"role": "user", "content": "hi"}]
        counted = (await s.client.post("/tokenize", json={"messages": messages})).json()["count"]
        prompt = (await s.chat()).json()["usage"]["prompt_tokens"]
        assert counted == prompt
        answer = await s.client.post("/v1/messages/count_tokens", json={"messages": messages, "model": "fake"})
        assert answer.json()["input_tokens"] == prompt


async def test_efforts_are_translated_for_the_template(server):
    template = {"chat_template": "{{ reasoning_effort }}", "reasoning_effort": "minimal"}
    flags = ("--trust-request-chat-template", "--reasoning-effort-map", '{"minimal": "low"}')
    assert await prompt_of(server, flags, **template) == "low"
    assert await prompt_of(server, flags, **{**template, "reasoning_effort": "high"}) == "high"


async def test_tools_that_may_not_be_called_stay_in_the_prompt_where_the_operator_wants_them(server):
    for flags, choice, told in (
        ((), "none", False),
        (("--exclude-tools-when-tool-choice-none",), "none", False),
        (("--no-exclude-tools-when-tool-choice-none",), "none", True),
        ((), "auto", True),
    ):
        assert ("weather" in await prompt_of(server, flags, tools=TOOLS, tool_choice=choice)) == told


async def test_contents_of_several_parts_are_lines_of_one_text_for_a_template_that_prints_them(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<user>a\nb</user>" in await prompt_of(server, (), messages=[{"role": "user", "content": parts}])
    loop = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    fields = {"messages": [{"role": "user", "content": parts}], "chat_template": loop}
    assert await prompt_of(server, ("--trust-request-chat-template",), **fields) == "[a][b]"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_streams_end_with_their_usage_where_the_operator_wants_it(server, path):
    body = {"max_tokens": 2, "stream": True, "prompt": "abc"}
    if "chat" in path:
        body |= {"messages": [{"role": "user", "content": "hi"}]}
        del body["prompt"]
    for flags, options, told in (
        ((), None, False),
        (("--enable-force-include-usage",), None, True),
        (("--enable-force-include-usage",), {"include_usage": False}, True),
    ):
        async with server(settings=settings(*flags)) as s:
            text = (await s.client.post(path, json={**body, "stream_options": options})).text
        assert ('"completion_tokens":2' in text) == told
        whole = {**body, "stream": False}
        async with server(settings=settings(*flags)) as s:
            assert (await s.client.post(path, json=whole)).status_code == 200


async def test_tokens_are_written_as_ids_where_the_operator_wants_it(server):
    for flags, fields, token in (
        ((), {}, "A"),
        (("--return-tokens-as-token-ids",), {}, "token_id:65"),
        (("--return-tokens-as-token-ids",), {"return_tokens_as_token_ids": False}, "A"),
    ):
        async with server(settings=settings(*flags)) as s:
            answer = (await s.complete(logprobs=1, max_tokens=1, add_special_tokens=False, **fields)).json()
            assert answer["choices"][0]["logprobs"]["tokens"] == [token]


async def test_processors_get_vllms_extra_arguments_and_prompts_are_told(server):
    async with server() as s:
        answer = await s.chat(vllm_xargs={"a": [1]}, return_prompt_text=True)
        assert s.engine.started[0][2].extra_args == {"a": [1]}
        assert answer.json()["prompt_text"] == s.engine.started[0][1]["prompt"]
        assert (await s.chat()).json()["prompt_text"] is None
        assert (await s.complete(vllm_xargs=5)).status_code == 400


async def test_routes_into_the_engine_are_there_in_development_mode_only(server):
    async with server() as s:
        for path in ("/sleep", "/wake_up", "/collective_rpc", "/pause", "/resume", "/abort_requests"):
            assert (await s.client.post(path)).status_code == 404
        assert (await s.client.get("/server_info")).status_code == 404


async def test_pages_of_the_document_are_there_unless_they_are_turned_off(server):
    for docs, status in ((True, 200), (False, 404)):
        async with server(docs=docs) as s:
            for path in ("/docs", "/redoc", "/openapi.json"):
                assert (await s.client.get(path)).status_code == status


class Stamp:
    """An ASGI middleware that adds a header to answers."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"yes")]
            await send(message)

        await self._app(scope, receive, send_stamped)


async def shorten(request: Request, call_next: Any) -> Any:
    """A middleware function that adds a header, and refuses one path."""
    if request.url.path == "/version":
        raise RuntimeError("not this one")
    response = await call_next(request)
    response.headers["x-function"] = "yes"
    return response


async def test_middleware_stands_before_every_route(server):
    extra = [named_middleware(f"{HERE}.{name}") for name in ("Stamp", "shorten")]
    async with server(extra_middleware=extra, api_keys=["k"]) as s:
        answers = [
            await s.chat(),
            await s.client.get("/v1/models", headers={"Authorization": "Bearer k"}),
            await s.client.post("/v1/chat/completions", json={}, headers={"Authorization": "Bearer k"}),
        ]
        assert [answer.status_code for answer in answers] == [401, 200, 400]
        assert all(answer.headers["x-stamp"] == answer.headers["x-function"] == "yes" for answer in answers)
        broken = await s.client.get("/version")
        assert broken.status_code == 500 and broken.json()["error"]["type"] and broken.headers["x-request-id"]


def test_middleware_that_is_none_is_named():
    for path in ("no.such.module", f"{HERE}.nothing", f"{HERE}.TOOLS", "plain"):
        with pytest.raises(ConfigError, match=f"middleware: '{path}'"):
            named_middleware(path)


async def test_refusals_are_traced_where_the_operator_wants_it(server, caplog):
    for flags, traced in (((), False), (("--log-error-stack",), True)):
        caplog.clear()
        with caplog.at_level("INFO", logger="quire"):
            async with server(settings=settings(*flags)) as s:
                assert (await s.chat(temperature=-1)).status_code == 400
                assert (await s.client.get("/v1/models/none")).status_code == 404
        told = [record for record in caplog.records if "was answered with" in record.message and record.exc_info]
        assert len(told) == (2 if traced else 0)


def test_bounds_of_heads_are_the_operators():
    protocol = bounded_to(100, 3)
    assert (protocol.max_header_bytes, protocol.max_header_count) == (100, 3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tool-parser-plugin", "/no.py"), "there is no file"),
        (("--default-chat-template-kwargs", "[1]"), "must be a JSON object"),
        (("--reasoning-effort-map", '{"low": 1}'), "JSON object of strings"),
        (("--tool-strict-level", "strict"), "invalid choice"),
        (("--chat-template-content-format", "text"), "it must be one of auto, string, openai"),
        (("--middleware", "no.such.Thing"), "middleware"),
        (("--log-config-file", "/no.json"), "does not exist"),
        (("--log-level", "loud"), "invalid choice"),
        (("--h11-max-header-count", "0"), "1 or more"),
    ],
    ids=str,
)
def test_choices_that_cannot_be_are_one_line(flags, words, capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_LOGGING_CONFIG_PATH", "")
    for more in ([], ["--api-server-count", "2"]):
        assert main(["serve", "--port", "0", *flags, *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith("quire: error: ") and error.count("\n") == 1 and words in error


LOOP = "{% for m in messages %}{% for p in m.content if p is not string %}Q: {{ p.text }}\n{% endfor %}{% endfor %}A:"
"""Says that it asks, so that `auto` would hand it plain text, of which it prints nothing."""


def certificate(folder: Path, name: str) -> None:
    """A self-signed certificate, in place of the one before."""
    new = ["-keyout", str(folder / "key.new"), "-out", str(folder / "cert.new")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}", *new]
    subprocess.run(command, check=True, capture_output=True)
    for kind in ("key", "cert"):
        (folder / f"{kind}.new").replace(folder / f"{kind}.pem")


async def test_certificates_are_read_again_when_they_change(tmp_path, monkeypatch):
    monkeypatch.setattr(server_process, "LOOK_EVERY_S", 0.01)
    certificate(tmp_path, "first")
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    config = uvicorn.Config("app", ssl_keyfile=key, ssl_certfile=cert)
    config.load_app = lambda: None  # type: ignore[method-assign]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    read: list[str] = []

    class Context:
        def load_cert_chain(self, certfile: str, keyfile: str) -> None:
            context.load_cert_chain(certfile, keyfile)
            read.append(Path(certfile).read_text())

    config.ssl = Context()  # type: ignore[assignment]
    task = asyncio.ensure_future(
        server_process.refresh_certificates(config, ListenOptions(ssl_keyfile=key, ssl_certfile=cert))
    )
    try:
        await asyncio.sleep(0)
        (tmp_path / "cert.pem").write_text("half a certificate")
        while not task.done() and "half" not in (tmp_path / "cert.pem").read_text():
            await asyncio.sleep(0.01)
        certificate(tmp_path, "second")
        while not read:
            await asyncio.sleep(0.01)
    finally:
        task.cancel()
    assert read[0] == (tmp_path / "cert.pem").read_text()


def _weights_change_by_routes(ask: Any, body: dict[str, Any], expected: str) -> None:
    assert ask.get("/weight_info").json()["weight_version"] == "default"
    assert ask.post("/update_weights", json={"update_info": {"path": "/absent"}}).status_code == 400
    assert ask.post("/reload_weights", json={"weights_path": "/absent"}).json()["error"]["param"] == "weights_path"
    assert ask.post("/reload_weights").json()["weight_version"] == "1"
    assert ask.post("/start_weight_update").status_code == 200
    assert ask.get("/weight_info").json()["is_updating"]
    assert ask.post("/finish_weight_update", json={"weight_version": "step-2"}).json()["num_updates"] == 2
    (choice,) = ask.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["message"]["content"] == expected
    assert [span["version"] for span in choice["weight_versions"]] == ["step-2"]
    assert ask.post("/update_weight_version", json={"weight_version": "step-3"}).json()["weight_version"] == "step-3"
    assert ask.post("/init_weight_transfer_engine", json={"init_info": {}}).status_code == 400
    assert ask.post("/shutdown_weight_transfer_engine").status_code == 200


def test_an_engine_sleeps_wakes_and_calls_its_workers(monkeypatch):
    monkeypatch.setenv("QUIRE_SERVER_DEV_MODE", "1")
    server = DemoServer()
    try:
        ask, body = server.client, {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
        before = ask.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert ask.post("/sleep?level=3").status_code == ask.post("/sleep?level=x").status_code == 400
        for level, tags in (("1", ""), ("2", "?tags=weights&tags=kv_cache")):
            assert ask.post(f"/sleep?level={level}").status_code == 200
            assert ask.get("/is_sleeping").json() == {"is_sleeping": True}
            assert ask.post("/wake_up?tags=nothing").status_code == 400
            assert ask.post(f"/wake_up{tags}").status_code == 200
            assert ask.get("/is_sleeping").json() == {"is_sleeping": False}
            after = ask.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            assert after == before
        assert ask.post("/pause?mode=later").status_code == ask.post("/pause?clear_cache=maybe").status_code == 400
        for mode in ("abort", "wait", "keep"):
            with server.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
                lines = stream.iter_lines()
                next(lines)
                assert ask.post(f"/pause?mode={mode}&clear_cache={mode != 'keep'}").json() == {"status": "paused"}
                assert ask.get("/is_paused").json() == {"is_paused": True}
                assert ask.post("/resume").json() == {"status": "resumed"}
                chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
            text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
            assert text == before or (mode == "abort" and before.startswith(text))
        assert ask.get("/is_paused").json() == {"is_paused": False}
        long = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 16, "request_id": "mine"}
        with server.client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            assert json.loads(next(lines)[6:])["id"] == "cmpl-mine"
            assert ask.post("/pause?mode=keep").status_code == 200
            assert ask.post("/abort_requests", json={"request_ids": ["cmpl-mine", "other"]}).json() == {
                "num_aborted": 16
            }
            assert ask.post("/resume").status_code == 200
            chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["abort"] * 16
        assert ask.post("/abort_requests", json={}).status_code == 400
        assert ask.post("/release_kv_cache_memory").status_code == 200
        assert ask.post("/wake_up?tags=kv_cache").status_code == 200
        assert ask.get("/get_world_size").json() == {"world_size": 1}
        assert ask.post("/reset_prefix_cache?reset_running_requests=true").json() == {"success": True}
        assert ask.get("/server_info").json()["kernels"]
        called = ask.post("/collective_rpc", json={"method": "explain"})
        assert called.status_code == 200 and len(called.json()["results"]) == 1
        unknown = ask.post("/collective_rpc", json={"method": "no_such_thing"})
        assert unknown.status_code == 400 and unknown.json()["error"]["param"] == "method"
        assert ask.post("/collective_rpc", json={}).status_code == 400
        _weights_change_by_routes(ask, body | {"return_weight_versions": True}, before)
        assert ask.get("/health").status_code == 200
    finally:
        assert server.end(signal.SIGTERM)[0] == 0


def test_a_silent_stream_gives_signs_of_life_and_answers_tell_their_fingerprint(monkeypatch):
    monkeypatch.setenv("QUIRE_SERVER_DEV_MODE", "1")
    flags = ("--sse-keep-alive-interval", "0.02", "--fingerprint-mode", "custom", "--fingerprint-value", "mine")
    server = DemoServer(*flags)
    try:
        body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
        whole = server.client.post("/v1/chat/completions", json=body).json()
        assert whole["system_fingerprint"] == "mine"
        for route in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            asked = {**body, "stream": True, "max_tokens": 100, "input": body["messages"], "model": "quire-demo"}
            del asked["messages" if route == "/v1/responses" else "input"]
            if route == "/v1/responses":
                asked["max_output_tokens"] = asked.pop("max_tokens")
            plain = server.client.post(route, json=asked)
            assert plain.status_code == 200, plain.text
            server.client.post("/pause?mode=keep")
            with server.client.stream("POST", route, json=asked) as answer:
                lines = answer.iter_lines()
                assert [next(lines) for _ in range(6)] == [": keep-alive", ""] * 3
                server.client.post("/resume")
                rest = [line for line in lines if line and not line.startswith(":")]
            assert rest[-1][:24] == [line for line in plain.text.splitlines() if line][-1][:24]
        chunks = server.openai().chat.completions.create(
            model="quire-demo", messages=body["messages"], temperature=0, stream=True
        )
        parts = list(chunks)
        assert {chunk.system_fingerprint for chunk in parts} == {"mine"}
        assert (
            "".join(chunk.choices[0].delta.content or "" for chunk in parts)
            == whole["choices"][0]["message"]["content"]
        )
    finally:
        server.kill()


def test_a_fingerprint_changes_with_what_answers_depend_on():
    config = make_config()
    full, bare = build_fingerprint("full", None, config), build_fingerprint("hash", None, config)
    assert full.startswith("quire-") and full.endswith(f"-tp1-{bare}") and len(bare) == 8
    assert build_fingerprint("none", None, config) == "" and build_fingerprint("custom", "x", config) == "x"
    assert build_fingerprint("hash", None, make_config(max_num_seqs=3)) == bare
    assert build_fingerprint("hash", None, make_config(max_model_len=99)) != bare
    for mode, value in (("custom", None), ("full", "x")):
        with pytest.raises(ConfigError, match="fingerprint_value"):
            check_fingerprint(mode, value)


def test_a_server_on_a_socket_follows_its_flags(tmp_path):
    (tmp_path / "template.jinja").write_text(LOOP)
    (tmp_path / "log.json").write_text(
        json.dumps(
            {
                "version": 1,
                "formatters": {"own": {"format": "own-format %(name)s %(message)s"}},
                "handlers": {
                    "out": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout", "formatter": "own"}
                },
                "loggers": {"quire": {"handlers": ["out"], "level": "DEBUG"}, "uvicorn.access": {"handlers": ["out"]}},
            }
        )
    )
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from quire.parsers.formats import Reasoning\nfrom quire.parsers.plugin import register_reasoning_format\n"
        "register_reasoning_format('mine', Reasoning(('<think>',), ('</think>',)))\n"
    )
    certificate(tmp_path, "localhost")
    flags = ["--chat-template", str(tmp_path / "template.jinja"), "--chat-template-content-format", "openai"]
    flags += ["--log-config-file", str(tmp_path / "log.json"), "--middleware", f"{HERE}.Stamp"]
    flags += ["--h11-max-incomplete-event-size", "900", "--h11-max-header-count", "20", "--root-path", "/under"]
    flags += ["--ssl-keyfile", str(tmp_path / "key.pem"), "--ssl-certfile", str(tmp_path / "cert.pem")]
    flags += ["--allowed-origins", "https://a.example", "--allow-credentials", "--enable-ssl-refresh"]
    flags += ["--reasoning-parser-plugin", str(plugin), "--reasoning-parser", "mine", "--enable-force-include-usage"]
    server = DemoServer(*flags)
    try:
        assert server.url.startswith("https://")
        with httpx.Client(base_url=server.url, timeout=120, verify=str(tmp_path / "cert.pem")) as client:
            client.base_url = httpx.URL(server.url.replace("127.0.0.1", "localhost"))
            body: dict[str, Any] = {"messages": [{"role": "user", "content": "x y"}], "return_token_ids": True}
            answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 1, "n": 1})
            assert answer.status_code == 200 and answer.headers["x-stamp"] == "yes", answer.text
            ids = answer.json()["prompt_token_ids"]
            assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "Q: x y\nA:"
            with client.stream(
                "POST", "/under/v1/chat/completions", json={**body, "max_tokens": 3, "stream": True}
            ) as s:
                lines = [line for line in s.iter_lines() if line]
                assert s.headers["x-stamp"] == "yes"
            assert lines[-1] == "data: [DONE]" and '"completion_tokens":3' in lines[-2]
            allowed = client.options(
                "/v1/models", headers={"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
            )
            assert allowed.headers["access-control-allow-origin"] == "https://a.example"
            assert allowed.headers["access-control-allow-credentials"] == "true"
            other = client.get("/health", headers={"Origin": "https://b.example"})
            assert other.headers.get("access-control-allow-origin") != "https://b.example"
            assert client.get("/health", headers={"x-long": "y" * 1000}).status_code == 431
            assert client.get("/health", headers={f"x-{number}": "y" for number in range(30)}).status_code == 431
    finally:
        code, output = server.end(signal.SIGTERM)
    assert code == 0
    assert "own-format quire" in output and "own-format uvicorn.access" in output
