"""The process of one model of several: `quire serve` on a socket of its own, which ends with the server in front of it."""

from quire.processes import end_with_parent

_ASKED_BY_US = ("/ready", "/sleep", "/wake_up", "/v1/models", "/api/tags", "/api/ps", "/metrics")


def main(arguments: list[str]) -> int | None:
    """Serve until a signal ends it, or its parent dies. `arguments`: a descriptor, the model's name, words of `quire serve`."""
    end_with_parent(int(arguments[0]))
    from quire.entrypoints.cli import main as command
    from quire.entrypoints.cli import serve
    from quire.logger import set_process_label

    set_process_label(arguments[1])
    args = command.build_parser("serve").parse_args(arguments[2:])
    args.is_hosted = True
    args.disable_access_log_for_endpoints = (*args.disable_access_log_for_endpoints, *_ASKED_BY_US)
    return serve.run(args)
