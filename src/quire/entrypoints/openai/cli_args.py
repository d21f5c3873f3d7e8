"""The server's own flags; the engine's come from `AsyncEngineArgs`. Names are those of vLLM's `serve`."""

import argparse
import json
import ssl
import sys
from collections.abc import Callable, Sequence
from typing import Any

from quire.config.limits import MAX_BATCH_FILE_BYTES
from quire.engine.arg_parser import ArgumentParser, bounded, human_int, json_object
from quire.entrypoints.fingerprint import MODES
from quire.entrypoints.http.errors import ERROR_FORMATS

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000


_port = bounded(int, "a port (0 to 65535; 0 takes any that is free)", 0, 65535)
_count = bounded(int, "a number of processes (1 or more)", 1)
_size = bounded(human_int, "a number of 1 or more", 1)
_seconds = bounded(float, "a number of seconds (0 or more)", 0, sys.float_info.max)


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


_SWITCH: dict[str, Any] = {"action": "store_true"}
FLAGS: dict[str, tuple[tuple[str, str, dict[str, Any]], ...]] = {
    "Models": (
        (
            "--models",
            "YAML file of several models, each awake while it is used (see docs/several_models.md)",
            {"metavar": "FILE"},
        ),
    ),
    "Network": (
        ("--host", "address to listen on (127.0.0.1: this machine only)", {"default": DEFAULT_HOST}),
        ("--port", "port to listen on (8000)", {"type": _port, "default": DEFAULT_PORT}),
        ("--uds", "listen on a Unix socket (owner only) in place of host and port", {"metavar": "PATH"}),
        (
            "--api-server-count -asc",
            "processes that take requests before the one engine core (1)",
            {"type": _count, "default": 1, "metavar": "N"},
        ),
        (
            "--headless",
            "no API server: run --data-parallel-size-local copies, from --data-parallel-start-rank on, or the ranks of node "
            "--node-rank, for the head node",
            _SWITCH,
        ),
        ("--root-path", "path under which a proxy shows this server", {"default": ""}),
        ("--ssl-keyfile", "private key; with --ssl-certfile turns TLS on", {"metavar": "PATH"}),
        ("--ssl-certfile", "certificate chain", {"metavar": "PATH"}),
        ("--ssl-ca-certs", "authorities that clients' certificates must come from", {"metavar": "PATH"}),
        (
            "--ssl-cert-reqs",
            "client certificates: 0 none, 1 optional, 2 required",
            {"type": int, "choices": (0, 1, 2), "default": int(ssl.CERT_NONE)},
        ),
        ("--ssl-ciphers", "OpenSSL cipher list", {}),
        ("--enable-ssl-refresh", "read the key, certificates and authorities again when they change", _SWITCH),
        (
            "--h11-max-incomplete-event-size",
            "bytes of a request's head (64K)",
            {"type": _size, "default": 64 << 10, "metavar": "N"},
        ),
        ("--h11-max-header-count", "headers of a request (256)", {"type": _size, "default": 256, "metavar": "N"}),
    ),
    "Access": (
        (
            "--api-key",
            "keys of clients, any of which opens every route (or QUIRE_API_KEY)",
            {"nargs": "+", "metavar": "KEY"},
        ),
        (
            "--api-key-file",
            "keys with a name and a weight: lines of NAME KEY [WEIGHT], or a JSON list of objects with name, key, weight",
            {"metavar": "FILE"},
        ),
        (
            "--tenant-header",
            "header that names the tenant of a request, for --scheduling-policy fair (none: the API key's name)",
            {"metavar": "NAME"},
        ),
        (
            "--api-key-for",
            "routes that want a key: those of clients, or /ready, /ping and /metrics too (clients)",
            {"choices": ("clients", "all"), "default": "clients"},
        ),
        ("--allowed-origins", "origins whose pages may call", {"type": _words, "nargs": "+", "default": []}),
        ("--allowed-methods", "methods they may use (*)", {"type": _words, "nargs": "+", "default": [["*"]]}),
        ("--allowed-headers", "headers they may send (*)", {"type": _words, "nargs": "+", "default": [["*"]]}),
        ("--allow-credentials", "let them send cookies", _SWITCH),
        (
            "--middleware",
            "package.module.Name of an ASGI middleware class, or of a function of (request, call_next); may be repeated",
            {"action": "append", "default": [], "metavar": "PATH"},
        ),
        ("--strict", "refuse unknown request fields instead of logging them once", _SWITCH),
    ),
    "Chat": (
        ("--response-role", "role in answers (assistant)", {"default": "assistant"}),
        ("--trust-request-chat-template", "let requests bring a chat template of their own", _SWITCH),
        (
            "--trust-request-mm-kwargs",
            "let requests bring options of the media processor (mm_processor_kwargs)",
            _SWITCH,
        ),
        (
            "--default-chat-template-kwargs",
            'variables of the template where a request gives none: {"enable_thinking": false}',
            {"type": json_object, "default": {}, "metavar": "JSON"},
        ),
        (
            "--reasoning-effort-map",
            'value that templates get for a reasoning_effort: {"minimal": "low"}',
            {"type": _texts, "default": {}, "metavar": "JSON"},
        ),
        (
            "--reasoning-parser",
            "format of the model's reasoning: a name, none, or auto (what its chat template shows)",
            {"default": "auto", "metavar": "NAME"},
        ),
        (
            "--tool-call-parser",
            "format of the model's tool calls: a name, none, or auto (what its chat template shows)",
            {"default": "auto", "metavar": "NAME"},
        ),
        (
            "--reasoning-parser-plugin",
            "a Python file that registers reasoning parsers (docs/tools.md)",
            {"metavar": "FILE"},
        ),
        ("--tool-parser-plugin", "a Python file that registers tool parsers (docs/tools.md)", {"metavar": "FILE"}),
        (
            "--tool-strict-level",
            "hold calls to schemas where tool_choice is auto: for strict functions (auto), function: for all, parameter: all "
            "as strict ones",
            {"choices": ("auto", "function", "parameter"), "default": "auto"},
        ),
        (
            "--exclude-tools-when-tool-choice-none",
            "leave tools that may not be called out of the template (on)",
            {"action": argparse.BooleanOptionalAction, "default": True},
        ),
        ("--enable-auto-tool-choice", "accepted for compatibility: calls are always looked for", _SWITCH),
    ),
    "Adapters": (
        (
            "--lora-modules",
            "adapters to serve under names of their own, as NAME=FOLDER or JSON; turns --enable-lora on",
            {"type": _adapter, "nargs": "+", "default": [], "metavar": "NAME=FOLDER"},
        ),
    ),
    "Answers and log": (
        ("--enable-request-id-headers", "accepted for compatibility: X-Request-Id is always sent", _SWITCH),
        ("--enable-prompt-tokens-details", "report in `usage` how many tokens came from the cache", _SWITCH),
        ("--return-tokens-as-token-ids", "write `token_id:ID` for tokens in logprobs", _SWITCH),
        ("--enable-force-include-usage", "report usage in every chunk of a stream, requested or not", _SWITCH),
        (
            "--sse-keep-alive-interval",
            "write a comment into streams that have been silent for so long, for proxies that cut them off (0: never)",
            {"type": _seconds, "default": 0, "metavar": "SECONDS"},
        ),
        (
            "--fingerprint-mode",
            "what `system_fingerprint` contains: version, devices and a hash of the configuration (full), the hash alone, "
            "--fingerprint-value (custom), or nothing",
            {"choices": MODES, "default": "full"},
        ),
        ("--fingerprint-value", "the fingerprint of --fingerprint-mode custom", {"metavar": "TEXT"}),
        (
            "--enable-per-request-metrics",
            "report in `metrics` of each response where the request's time went (a request asks with return_timing)",
            _SWITCH,
        ),
        (
            "--metrics-names",
            "prefix of the names in /metrics (quire)",
            {"choices": ("quire", "vllm", "both"), "default": "quire"},
        ),
        (
            "--error-format",
            "words in refusals: OpenAI's, or vLLM's, whose error.code is the HTTP status (openai)",
            {"choices": ERROR_FORMATS, "default": "openai"},
        ),
        (
            "--responses-store",
            "SQLite file that keeps what /v1/responses answers (none: in memory, 10,000 at most)",
            {"metavar": "PATH"},
        ),
        (
            "--handover",
            "folder in which a server that ends leaves its background responses to the next one (none: they are cut off)",
            {"metavar": "DIR"},
        ),
        (
            "--uvicorn-log-level",
            "level of the access log (info)",
            {"choices": ("critical", "error", "warning", "info", "debug", "trace"), "default": "info"},
        ),
        ("--disable-uvicorn-access-log", "no log line for each request", _SWITCH),
        (
            "--disable-access-log-for-endpoints",
            "no log line for requests to these, for example /health,/metrics",
            {"type": _paths, "default": (), "metavar": "PATHS"},
        ),
        (
            "--log-level",
            "lowest level of the server's log (QUIRE_LOGGING_LEVEL, or INFO)",
            {"type": str.upper, "choices": ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"), "metavar": "LEVEL"},
        ),
        ("--log-config-file", "JSON for logging.config.dictConfig (QUIRE_LOGGING_CONFIG_PATH)", {"metavar": "FILE"}),
        ("--log-error-stack", "log a stack trace for refused requests too, not only for failures", _SWITCH),
        ("--log-format", "format of the log's lines (QUIRE_LOGGING_FORMAT, or text)", {"choices": ("text", "json")}),
        ("--console", "the console, a page at / (on)", {"action": argparse.BooleanOptionalAction, "default": True}),
        ("--disable-fastapi-docs", "no /docs and no /openapi.json", _SWITCH),
        (
            "--shutdown-timeout",
            "how long SIGTERM waits for running requests (300)",
            {"type": _seconds, "default": 300.0, "metavar": "SECONDS"},
        ),
        (
            "--keep-alive-on-engine-death",
            "answer with 503 when the engine has died, instead of ending with "
            "exit code 1 (QUIRE_KEEP_ALIVE_ON_ENGINE_DEATH)",
            _SWITCH,
        ),
    ),
    "Batches": (
        (
            "--batch-store",
            "folder that keeps the files and batches of /v1/files and /v1/batches (none: these routes are off)",
            {"metavar": "DIR"},
        ),
        (
            "--max-batch-file-size",
            "bytes of a file that may be uploaded (200m)",
            {"type": _size, "default": MAX_BATCH_FILE_BYTES, "metavar": "N"},
        ),
    ),
}
"""The server's flags by the titles of their groups: names, help, and how argparse reads the value."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the server's flags, in groups."""
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for names, text, options in flags:
            group.add_argument(*names.split(), help=text, **options)


def flatten(groups: list[list[str]]) -> list[str]:
    """One list of the words of a flag that takes words and JSON lists of words."""
    return [word for group in groups for word in group]


def serve_words(words: Sequence[str], add_own: Callable[[argparse.ArgumentParser], None]) -> list[str]:
    """A command's words without its own options, which `add_own` declares. The parser itself says which words belong to them."""
    own = ArgumentParser(add_help=False)
    add_own(own)
    return own.parse_known_args(list(words))[1]
