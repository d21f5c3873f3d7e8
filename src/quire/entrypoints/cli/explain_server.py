"""The server's part of `quire explain`: where it would listen, how answers would be read, what the flags change.

Knows flags and formats. Starts nothing.
"""

import argparse
from typing import Any

from quire.config import EngineConfig

_TOLD_APART = ("reasoning_parser", "tool_call_parser", "api_key", "host", "port", "uds")


def explain_server(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Each fact with its value and why it is so. Raises ConfigError: a flag of the server that cannot work."""
    from quire.engine.tokenizer_source import TokenizerSource
    from quire.entrypoints.cli.serve import listen_options, server_settings
    from quire.parsers.choice import AUTO, NONE, choose_formats

    settings, options = server_settings(args), listen_options(args)
    tokenizer = TokenizerSource(config.model).get()
    template = getattr(tokenizer, "chat_template", None)
    formats = choose_formats(settings.reasoning_parser, settings.tool_call_parser, template)
    shown = {NONE: "the chat template shows none" if template else "there is no chat template"}
    facts: dict[str, Any] = {
        "names": _fact(list(config.model.served_model_name)),
        "address": _fact(options.url),
        "api_key": _fact(f"{len(args.api_key)} given" if args.api_key else None),
    }
    for name, found in (("reasoning_parser", formats.reasoning_name), ("tool_call_parser", formats.tools_name)):
        is_found = getattr(settings, name) == AUTO
        facts[name] = _fact(found, shown.get(found, "found in the chat template") if is_found else "given")
    if tokenizer is not None and tokenizer.template is not None:
        asked = config.model.chat_template_content_format
        found = tokenizer.template.content_format() if asked == AUTO else asked
        facts["chat_template_content_format"] = _fact(found, "found in the chat template" if asked == AUTO else "given")
    for name, (value, default) in _changed(args).items():
        facts[name] = _fact(value, f"given; else {default!r}")
    return facts


def _fact(value: Any, why: str = "") -> dict[str, Any]:
    return {"value": value, "why": why} if why else {"value": value}


def _changed(args: argparse.Namespace) -> dict[str, tuple[Any, Any]]:
    """The server's settings that are not at their defaults, with these."""
    from quire.entrypoints.openai.cli_args import add_server_arguments

    server = argparse.ArgumentParser(add_help=False)
    add_server_arguments(server)
    actions = [each for each in server._actions if each.dest not in _TOLD_APART]
    found = {each.dest: (getattr(args, each.dest), each.default) for each in actions}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}
