"""`quire serve`: a server that speaks the OpenAI protocol.

Checks the flags, opens the port, then loads the engine and imports its routes beside it; prints the address and a line to try
once it can answer.
"""

import argparse
import os
import shlex
from typing import TYPE_CHECKING, Any

from quire import envs
from quire.engine.arg_parser import ArgumentParser
from quire.engine.arg_resolve import UsageContext, apply_logging, section
from quire.engine.arg_utils import AsyncEngineArgs
from quire.engine.vllm_settings import SERVER_DEFAULTS
from quire.entrypoints.openai.cli_args import add_server_arguments, flatten
from quire.errors import ConfigError
from quire.logger import init_logger, use_log_config, use_log_format, use_log_level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp

    from quire.config import EngineConfig, ModelConfig
    from quire.entrypoints.http.api_keys import KeyEntry
    from quire.entrypoints.http.listen import ListenOptions
    from quire.entrypoints.http.state import ServerSettings, ServerState
    from quire.entrypoints.responses.handover import Handover


logger = init_logger(__name__)


def add_arguments(parser: argparse.ArgumentParser, none: str = "the built-in demo model") -> None:
    """`none`: what no model means."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=f"a local folder or a hub id; none means {none}")
    add_server_arguments(parser)
    AsyncEngineArgs.add_cli_args(parser)
    if isinstance(parser, ArgumentParser):
        parser.accept_foreign(SERVER_DEFAULTS)


def listen_options(args: argparse.Namespace) -> "ListenOptions":
    """Where and how to listen. Raises ConfigError: TLS is half given."""
    from quire.entrypoints.http.listen import ListenOptions

    options = section(
        ListenOptions,
        args,
        ssl_ciphers=args.ssl_ciphers or "TLSv1",
        access_log=not args.disable_uvicorn_access_log,
        quiet_paths=args.disable_access_log_for_endpoints,
        log_level=args.uvicorn_log_level,
        shutdown_timeout_s=args.shutdown_timeout,
        keep_alive_on_engine_death=args.keep_alive_on_engine_death or envs.QUIRE_KEEP_ALIVE_ON_ENGINE_DEATH,
        max_header_bytes=args.h11_max_incomplete_event_size,
        max_header_count=args.h11_max_header_count,
        ssl_refresh=args.enable_ssl_refresh,
    )
    _check_tls(options)
    return options


def run(args: argparse.Namespace) -> int | None:
    if args.models is not None:
        from quire.entrypoints.cli.serve_several import serve_several

        set_up_log(args)
        serve_several(args, listen_options(args), api_keys(args), server_settings(args))
        return None
    options = listen_options(args)
    engine_args, keys = check_flags(args)
    if args.headless:
        _run_headless(args, engine_args)
        return None
    if args.api_server_count > 1:
        from quire.entrypoints.cli.frontends import serve_frontends

        def announce_all(config: "EngineConfig", options: "ListenOptions", seconds: float) -> None:
            _announce(config.model, options, bool(keys), seconds)

        return serve_frontends(args, options, engine_args, keys, announce_all)
    return _serve_alone(args, options, engine_args, keys)


def check_flags(args: argparse.Namespace) -> "tuple[AsyncEngineArgs, list[KeyEntry]]":
    """The engine's settings and the keys, after everything that can be checked before it is started. Raises ConfigError."""
    from quire.engine.settings import check_settings

    take_model(args)
    set_up_log(args)
    args.enable_lora |= bool(args.lora_modules)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    check_settings(engine_args)
    keys = api_keys(args)
    check_server_flags(args)
    return engine_args, keys


def _run_headless(args: argparse.Namespace, engine_args: "AsyncEngineArgs") -> None:
    """Run copies of the model, or ranks of one, for a head node. Raises ConfigError: it is not said which, or how many."""
    import dataclasses

    from quire.engine.copies_here import copies_of_nodes
    from quire.engine.headless import serve_headless
    from quire.engine.rank_host import serve_ranks

    if args.api_server_count > 1:
        raise ConfigError.of("api_server_count", "a headless host has no API server: leave it out.")
    if args.nnodes > 1 and not args.node_rank:
        raise ConfigError.of("node_rank", "node 0 has the API server: leave --headless out, or name another node.")
    engine_args = copies_of_nodes(engine_args)
    if engine_args.nnodes > 1:
        serve_ranks(engine_args.create_engine_config(UsageContext.API_SERVER))
        return
    first = engine_args.data_parallel_start_rank or 0
    engine_args = dataclasses.replace(engine_args, data_parallel_start_rank=first)
    serve_headless(engine_args.create_engine_config(UsageContext.API_SERVER))


def _serve_alone(
    args: argparse.Namespace,
    options: "ListenOptions",
    engine_args: "AsyncEngineArgs",
    keys: "Sequence[KeyEntry]",
) -> int:
    """Serve in this process."""
    from quire.entrypoints.http.listen import open_socket

    listener, options = open_socket(options)

    from quire.entrypoints.server.engine_start import begin_engine, connect_engine

    engine = begin_engine(engine_args)  # before the routes are imported: the core starts in another process
    from quire.entrypoints.server.process import ServerProcess

    app, state = make_app(args, keys)

    def build_engine() -> Any:
        return connect_engine(engine.result(), state)

    def announce(engine: Any, seconds: float) -> None:
        if getattr(args, "is_hosted", False):  # the server in front of it is the one to talk to
            return
        _announce(state.engine.config.model, options, bool(keys), seconds)
        if args.console and not options.uds and envs.QUIRE_LOGGING_FORMAT != "json":
            print(f"Or open {options.url}/ in a browser.\n", flush=True)

    handover = _handover(args, state)
    return ServerProcess(app, state, listener, options, build_engine, announce, handover=handover).run()


def _handover(args: argparse.Namespace, state: "ServerState") -> "Handover | None":
    if args.handover is None:
        return None
    from quire.entrypoints.responses.handover import Handover

    return Handover(state, args.handover)


def make_app(args: argparse.Namespace, keys: "Sequence[KeyEntry]") -> "tuple[ASGIApp, ServerState]":
    """The application that the flags ask for, and its state."""
    from quire.entrypoints.http.middleware import named_middleware
    from quire.entrypoints.http.state import ServerState
    from quire.entrypoints.server.app import build_app

    state = ServerState(server_settings(args))
    app = build_app(
        state,
        api_keys=keys,
        allowed_origins=flatten(args.allowed_origins),
        allowed_methods=flatten(args.allowed_methods),
        allowed_headers=flatten(args.allowed_headers),
        allow_credentials=args.allow_credentials,
        extra_middleware=[named_middleware(path) for path in args.middleware],
        root_path=args.root_path.rstrip("/"),
        docs=not args.disable_fastapi_docs,
        console=args.console,
    )
    return app, state


def set_up_log(args: argparse.Namespace) -> None:
    """The log as the flags say, in this process and its children; single flags win over `--logging-config`."""
    if getattr(args, "logging_config", None):
        apply_logging(args.logging_config)
        args.logging_config = None  # an engine in this process would apply it again
    if args.log_config_file is not None:
        use_log_config(args.log_config_file)
    if args.log_level is not None:
        use_log_level(args.log_level)
    if args.log_format is not None:
        use_log_format(args.log_format)


def take_model(args: argparse.Namespace) -> None:
    """`quire serve MODEL` and `quire serve --model MODEL` are the same."""
    if args.model_tag is None:
        return
    if getattr(args, "model", None) not in (None, args.model_tag):
        raise ConfigError.of("model", f"{args.model_tag!r} is named, and --model {args.model!r} too; give one of them.")
    args.model = args.model_tag


def _check_tls(options: "ListenOptions") -> None:
    if bool(options.ssl_keyfile) != bool(options.ssl_certfile):
        raise ConfigError("ssl_keyfile and ssl_certfile: TLS needs both.", setting="ssl_certfile")
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(options, name)
        if path and not os.path.isfile(path):
            raise ConfigError.of(name, f"there is no file {path!r}.")


def api_keys(args: argparse.Namespace) -> "list[KeyEntry]":
    """The keys that clients need: of the flags, the environment and a file."""
    from quire.entrypoints.http.api_keys import KeyEntry, read_key_file

    keys = list(args.api_key or ([envs.QUIRE_API_KEY] if envs.QUIRE_API_KEY else []))
    if any(not key.strip() for key in keys):
        raise ConfigError.of("api_key", "a key is empty.")
    return [*map(KeyEntry.of, keys), *(read_key_file(args.api_key_file) if args.api_key_file else [])]


def check_server_flags(args: argparse.Namespace) -> None:
    """Refuse flags that cannot work, before a port is opened or a model is read.
    Raises ConfigError: a parser is unknown, a template cannot be read, a middleware cannot be imported."""
    from quire.config.reasoning import read_reasoning_config
    from quire.entrypoints.fingerprint import check_fingerprint
    from quire.parsers.choice import AUTO, choose_formats
    from quire.parsers.plugin import load_parser_file
    from quire.plugins import load_general_plugins

    if args.handover is not None and args.responses_store is None:
        raise ConfigError.of("handover", "needs --responses-store FILE, which the next server finds the responses in.")
    if args.handover is not None and args.api_server_count > 1:
        raise ConfigError.of("handover", f"needs one API server, not {args.api_server_count}.")
    load_general_plugins("frontend")  # which may add formats
    for setting in ("reasoning_parser_plugin", "tool_parser_plugin"):
        load_parser_file(getattr(args, setting), setting)
    config = read_reasoning_config(args.reasoning_config)
    for name in (args.reasoning_parser, config.reasoning_parser or AUTO):
        choose_formats(name, args.tool_call_parser, None)
    check_fingerprint(args.fingerprint_mode, args.fingerprint_value)
    if args.chat_template is not None:
        from quire.tokenizers.chat_template import read_template

        read_template(args.chat_template)
    if args.middleware:
        from quire.entrypoints.http.middleware import named_middleware

        for path in args.middleware:
            named_middleware(path)


def server_settings(args: argparse.Namespace) -> "ServerSettings":
    """The operator's choices as routes see them: the flags that are called as its fields."""
    from quire.entrypoints.http.state import ServerSettings

    return section(ServerSettings, args, max_body_bytes=envs.QUIRE_HTTP_MAX_REQUEST_BODY_SIZE)


def _announce(model: "ModelConfig", options: "ListenOptions", has_keys: bool, seconds: float) -> None:
    """Say where the server is, and how to try it; `quire ps` lists it from now on."""
    from quire.entrypoints.cli.running import register

    register(options.url, model.model, list(model.served_model_name), has_keys, model.pooling is not None)
    route, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "What is 17 + 25?"}]}'
    pooling, name = model.pooling, (model.served_model_name or (model.model,))[0]
    if pooling is not None and pooling.embeds:
        route, body = "/v1/embeddings", '{"input": ["a text", "another"]}'
    elif pooling is not None:
        route, body = "/classify" if "classify" in pooling.tasks else "/pooling", '{"input": ["a text", "another"]}'
    url = ("http://localhost" if options.uds else options.url) + route
    words = ["curl", url, "-H", "Content-Type: application/json"]
    if options.uds:
        words[1:1] = ["--unix-socket", options.uds]
    if options.ssl_certfile:
        words.insert(1, "--insecure")
    if has_keys:
        words += ["-H", "Authorization: Bearer YOUR_KEY"]
    words += ["-d", body]
    if envs.QUIRE_LOGGING_FORMAT == "json":
        logger.info("%s is ready after %.1f s at %s", name, seconds, options.url)
        return
    print(f"\n{name} is ready after {seconds:.1f} s at {options.url}\nTry it:\n  {shlex.join(words)}\n", flush=True)
