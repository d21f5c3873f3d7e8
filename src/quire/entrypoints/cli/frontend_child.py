"""One of several frontend processes of `quire serve --api-server-count`: the child, told everything on its standard input."""

import argparse
import dataclasses
import functools
import json
import shutil
import socket
import sys
from typing import Any

import msgspec

from quire.entrypoints.http.listen import ListenOptions, open_socket
from quire.processes import end_with_parent


def main(arguments: list[str]) -> int:
    """Serve until a signal ends it, or its parent dies."""
    told = json.load(sys.stdin)
    media = told["config"]["multimodal"] or {}
    end_with_parent(told["life_fd"], functools.partial(_remove, [told["folder"], media.get("shared_cache")]))
    args = argparse.Namespace(**told["args"])
    options = ListenOptions(**{**told["options"], "quiet_paths": tuple(told["options"]["quiet_paths"])})
    from quire.config.wire import config_from_plain
    from quire.engine.router import FrontendSlot, RoutedClient
    from quire.entrypoints.cli.serve import check_server_flags, make_app, set_up_log
    from quire.entrypoints.http.api_keys import KeyEntry
    from quire.entrypoints.http.siblings import Siblings
    from quire.entrypoints.server.process import ServerProcess
    from quire.logger import set_process_label, trace_this_thread_if_asked
    from quire.patch import check_same, settle

    set_up_log(args)
    folder, number = told["folder"], told["number"]
    set_process_label(f"frontend {number}")
    trace_this_thread_if_asked(told["config"]["instance_id"])
    check_server_flags(args)  # which loads the parsers that they name
    keys = msgspec.convert(told["keys"], list[KeyEntry])
    app, state = make_app(args, keys)
    others = [f"{folder}/http-{other}" for other in range(told["count"]) if other != number]
    state.siblings = Siblings(others, keys[0].key if keys else None)
    private, _ = open_socket(ListenOptions(uds=f"{folder}/http-{number}"))

    config = config_from_plain(told["config"])
    settle(config)
    check_same(told["patches"], "the process that starts this frontend")

    def build_engine() -> Any:
        from quire.engine.async_llm import AsyncLLM
        from quire.entrypoints.server.engine_start import connect_engine

        return connect_engine(AsyncLLM(config, core=FrontendSlot(folder, number, told["life_fd"])), state)

    engine = build_engine() if told["is_replacement"] else None  # others serve: be heard of when it can answer
    if told["listener_fd"] is not None:
        listener = socket.socket(fileno=told["listener_fd"])
    else:
        listener, _ = open_socket(options, shared=True)

    def announce(engine: Any, seconds: float) -> None:
        client = engine._client
        assert isinstance(client, RoutedClient)
        client.serves()

    options = dataclasses.replace(options, uds=None)  # the parent removes it
    build = build_engine if engine is None else lambda: engine
    return ServerProcess(app, state, listener, options, build, announce, private).run()


def _remove(folders: list[str | None]) -> None:
    for folder in filter(None, folders):
        shutil.rmtree(folder, ignore_errors=True)
