"""The server's own flags; the engine's come from `AsyncEngineArgs`. Names are those of vLLM's `serve`."""

import argparse
import json
import ssl
from typing import Any

from quire.config.limits import MAX_BATCH_FILE_BYTES
from quire.engine.arg_parser import human_int, json_object, switch
from quire.entrypoints.fingerprint import MODES
from quire.entrypoints.http.errors import ERROR_FORMATS

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000


def _port(text: str) -> int:
    try:
        port = int(text)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535; 0 takes any that is free)")
    return port


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes (1 or more)")
    return int(text)


def _positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds (0 or more)")
    return seconds


def _words(text: str) -> list[str]:
    """`a`, or a JSON list of strings."""
    if not text.startswith("["):
        return [text]
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of strings")
    return value


def _paths(text: str) -> tuple[str, ...]:
    """Paths between commas."""
    paths = tuple(path.strip() for path in text.split(",") if path.strip())
    for path in paths:
        if not path.startswith("/"):
            raise argparse.ArgumentTypeError(f"{path!r} is not a path: it must begin with /")
    return paths


def _size(text: str) -> int:
    if (size := human_int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return size


def _texts(text: str) -> dict[str, str]:
    """A JSON object of strings."""
    value = json_object(text)
    if not all(isinstance(item, str) for item in value.values()):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object of strings")
    return value


def _adapter(text: str) -> dict[str, str]:
    """`name=folder`, or a JSON object with `name`, `path` and perhaps `base_model_name`."""
    name, _, path = text.partition("=")
    fields: dict[str, Any] = json_object(text) if text.startswith("{") else {"name": name, "path": path}
    fields.pop("is_3d_lora_weight", None)  # vLLM's; the files tell
    is_valid = {"name", "path"} <= fields.keys() <= {"name", "path", "base_model_name"}
    if not is_valid or not all(isinstance(value, str) and value for value in fields.values()):
        message = (
            f"{text!r} is no adapter: give NAME=FOLDER, or a JSON object with name, path and perhaps base_model_name"
        )
        raise argparse.ArgumentTypeError(message)
    return fields


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the server's flags, in groups."""
    parser.add_argument_group("Models").add_argument(
        "--models",
        metavar="FILE",
        help="YAML file of several models, each awake while it is used (see docs/several_models.md)",
    )
    _add_network_flags(parser.add_argument_group("Network"))
    _add_access_flags(parser.add_argument_group("Access"))
    _add_chat_flags(parser.add_argument_group("Chat"))
    parser.add_argument_group("Adapters").add_argument(
        "--lora-modules",
        type=_adapter,
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="adapters to serve under names of their own, as NAME=FOLDER or JSON; turns --enable-lora on",
    )
    rest = parser.add_argument_group("Answers and log")
    _add_response_flags(rest)
    _add_log_flags(rest)
    _add_process_flags(rest)
    _add_batch_flags(parser.add_argument_group("Batches"))


def _add_network_flags(network: argparse._ArgumentGroup) -> None:
    network.add_argument("--host", default=DEFAULT_HOST, help="address to listen on (127.0.0.1: this machine only)")
    network.add_argument("--port", type=_port, default=DEFAULT_PORT, help="port to listen on (8000)")
    network.add_argument("--uds", metavar="PATH", help="listen on a Unix socket (owner only) in place of host and port")
    network.add_argument(
        "--api-server-count",
        "-asc",
        type=_count,
        default=1,
        metavar="N",
        help="processes that take requests before the one engine core (1)",
    )
    network.add_argument("--root-path", default="", help="path under which a proxy shows this server")
    network.add_argument("--ssl-keyfile", metavar="PATH", help="private key; with --ssl-certfile turns TLS on")
    network.add_argument("--ssl-certfile", metavar="PATH", help="certificate chain")
    network.add_argument("--ssl-ca-certs", metavar="PATH", help="authorities that clients' certificates must come from")
    network.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        default=int(ssl.CERT_NONE),
        help="client certificates: 0 none, 1 optional, 2 required",
    )
    network.add_argument("--ssl-ciphers", help="OpenSSL cipher list")
    switch(network, "--enable-ssl-refresh", "read the key, certificates and authorities again when they change")
    network.add_argument(
        "--h11-max-incomplete-event-size",
        type=_size,
        default=64 << 10,
        metavar="N",
        help="bytes of a request's head (64K)",
    )
    network.add_argument(
        "--h11-max-header-count", type=_size, default=256, metavar="N", help="headers of a request (256)"
    )


def _add_access_flags(access: argparse._ArgumentGroup) -> None:
    access.add_argument(
        "--api-key", nargs="+", metavar="KEY", help="keys of clients, any of which opens every route (or QUIRE_API_KEY)"
    )
    access.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="keys with a name and a weight: lines of NAME KEY [WEIGHT], or a JSON list of objects with name, key, weight",
    )
    access.add_argument(
        "--tenant-header",
        metavar="NAME",
        help="header that names the tenant of a request, for --scheduling-policy fair (none: the API key's name)",
    )
    access.add_argument(
        "--api-key-for",
        choices=("clients", "all"),
        default="clients",
        help="routes that want a key: those of clients, or /ready, /ping and /metrics too (clients)",
    )
    access.add_argument("--allowed-origins", type=_words, nargs="+", default=[], help="origins whose pages may call")
    access.add_argument("--allowed-methods", type=_words, nargs="+", default=[["*"]], help="methods they may use (*)")
    access.add_argument("--allowed-headers", type=_words, nargs="+", default=[["*"]], help="headers they may send (*)")
    switch(access, "--allow-credentials", "let them send cookies")
    access.add_argument(
        "--middleware",
        action="append",
        default=[],
        metavar="PATH",
        help="package.module.Name of an ASGI middleware class, or of a function of (request, call_next); may be repeated",
    )
    switch(access, "--strict", "refuse unknown request fields instead of logging them once")


def _add_chat_flags(chat: argparse._ArgumentGroup) -> None:
    chat.add_argument("--response-role", default="assistant", help="role in answers (assistant)")
    switch(chat, "--trust-request-chat-template", "let requests bring a chat template of their own")
    switch(chat, "--trust-request-mm-kwargs", "let requests bring options of the media processor (mm_processor_kwargs)")
    chat.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help='variables of the template where a request gives none: {"enable_thinking": false}',
    )
    chat.add_argument(
        "--reasoning-effort-map",
        type=_texts,
        default={},
        metavar="JSON",
        help='value that templates get for a reasoning_effort: {"minimal": "low"}',
    )
    chat.add_argument(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help="format of the model's reasoning: a name, none, or auto (what its chat template shows)",
    )
    chat.add_argument(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="format of the model's tool calls: a name, none, or auto (what its chat template shows)",
    )
    for kind in ("reasoning", "tool"):
        chat.add_argument(
            f"--{kind}-parser-plugin",
            metavar="FILE",
            help=f"a Python file that registers {kind} parsers (docs/tools.md)",
        )
    chat.add_argument(
        "--tool-strict-level",
        choices=("auto", "function", "parameter"),
        default="auto",
        help="hold calls to schemas where tool_choice is auto: for strict functions (auto), function: for all, parameter: all "
        "as strict ones",
    )
    chat.add_argument(
        "--exclude-tools-when-tool-choice-none",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="leave tools that may not be called out of the template (on)",
    )
    switch(chat, "--enable-auto-tool-choice", "accepted for compatibility: calls are always looked for")


def _add_response_flags(responses: argparse._ArgumentGroup) -> None:
    switch(responses, "--enable-request-id-headers", "accepted for compatibility: X-Request-Id is always sent")
    switch(responses, "--enable-prompt-tokens-details", "report in `usage` how many tokens came from the cache")
    switch(responses, "--return-tokens-as-token-ids", "write `token_id:ID` for tokens in logprobs")
    switch(responses, "--enable-force-include-usage", "report usage in every chunk of a stream, requested or not")
    responses.add_argument(
        "--sse-keep-alive-interval",
        type=_positive_seconds,
        default=0,
        metavar="SECONDS",
        help="write a comment into streams that have been silent for so long, for proxies that cut them off (0: never)",
    )
    responses.add_argument(
        "--fingerprint-mode",
        choices=MODES,
        default="full",
        help="what `system_fingerprint` contains: version, devices and a hash of the configuration (full), the hash alone, "
        "--fingerprint-value (custom), or nothing",
    )
    responses.add_argument("--fingerprint-value", metavar="TEXT", help="the fingerprint of --fingerprint-mode custom")
    switch(
        responses,
        "--enable-per-request-metrics",
        "report in `metrics` of each response where the request's time went (a request asks with return_timing)",
    )
    responses.add_argument(
        "--metrics-names",
        choices=("quire", "vllm", "both"),
        default="quire",
        help="prefix of the names in /metrics (quire)",
    )
    responses.add_argument(
        "--error-format",
        choices=ERROR_FORMATS,
        default="openai",
        help="words in refusals: OpenAI's, or vLLM's, whose error.code is the HTTP status (openai)",
    )
    responses.add_argument(
        "--responses-store",
        metavar="PATH",
        help="SQLite file that keeps what /v1/responses answers (none: in memory, 10,000 at most)",
    )
    responses.add_argument(
        "--handover",
        metavar="DIR",
        help="folder in which a server that ends leaves its background responses to the next one (none: they are cut off)",
    )


def _add_log_flags(log: argparse._ArgumentGroup) -> None:
    levels = ("critical", "error", "warning", "info", "debug", "trace")
    log.add_argument("--uvicorn-log-level", choices=levels, default="info", help="level of the access log (info)")
    switch(log, "--disable-uvicorn-access-log", "no log line for each request")
    log.add_argument(
        "--disable-access-log-for-endpoints",
        type=_paths,
        default=(),
        metavar="PATHS",
        help="no log line for requests to these, for example /health,/metrics",
    )
    log.add_argument(
        "--log-level",
        type=str.upper,
        choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
        metavar="LEVEL",
        help="lowest level of the server's log (QUIRE_LOGGING_LEVEL, or INFO)",
    )
    log.add_argument(
        "--log-config-file", metavar="FILE", help="JSON for logging.config.dictConfig (QUIRE_LOGGING_CONFIG_PATH)"
    )
    switch(log, "--log-error-stack", "log a stack trace for refused requests too, not only for failures")
    log.add_argument(
        "--log-format", choices=("text", "json"), help="format of the log's lines (QUIRE_LOGGING_FORMAT, or text)"
    )


def _add_process_flags(process: argparse._ArgumentGroup) -> None:
    process.add_argument(
        "--console", action=argparse.BooleanOptionalAction, default=True, help="the console, a page at / (on)"
    )
    switch(process, "--disable-fastapi-docs", "no /docs and no /openapi.json")
    process.add_argument(
        "--shutdown-timeout",
        type=_positive_seconds,
        default=300.0,
        metavar="SECONDS",
        help="how long SIGTERM waits for running requests (300)",
    )
    switch(
        process,
        "--keep-alive-on-engine-death",
        "answer with 503 when the engine has died, instead of ending with "
        "exit code 1 (QUIRE_KEEP_ALIVE_ON_ENGINE_DEATH)",
    )


def _add_batch_flags(batches: argparse._ArgumentGroup) -> None:
    batches.add_argument(
        "--batch-store",
        metavar="DIR",
        help="folder that keeps the files and batches of /v1/files and /v1/batches (none: these routes are off)",
    )
    batches.add_argument(
        "--max-batch-file-size",
        type=_size,
        default=MAX_BATCH_FILE_BYTES,
        metavar="N",
        help="bytes of a file that may be uploaded (200m)",
    )


def flatten(groups: list[list[str]]) -> list[str]:
    """One list of the words of a flag that takes words and JSON lists of words."""
    return [word for group in groups for word in group]
