"""`quire explain MODEL`: what would be chosen for a model on this machine, and why. Reads no weights."""

import argparse
import dataclasses
from typing import Any

from quire.config import EngineConfig, HFConfig, limits
from quire.config.hub.listing import HubModel
from quire.engine.arg_parser import Flags, add_flags
from quire.engine.arg_utils import EngineArgs, UsageContext
from quire.engine.tokenizer_source import TokenizerSource
from quire.entrypoints.cli import serve
from quire.entrypoints.cli.explain_platform import (
    explain_capabilities,
    explain_platform,
    kernel_line,
    platform_text,
    section,
    with_why,
)
from quire.entrypoints.cli.fit import fit_sentence, limits_sentence
from quire.entrypoints.cli.serve import api_keys, check_server_flags, listen_options, server_settings, take_model
from quire.entrypoints.cli.terminal import show
from quire.platforms.interface import Platform

CONFIG_PARTS = ("model", "cache", "parallel", "scheduler", "device", "load", "attention", "observability")
_LORA = ("lora",)
_SECRET = ("hf_token",)
_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    contexts = [context.value for context in UsageContext]
    usage = {"dest": "usage", "choices": contexts}
    first: Flags = (
        ("--json", False, "print JSON"),
        ("--all", False, "constants, too: the limits that no setting changes", {"dest": "everything"}),
        ("--for", UsageContext.API_SERVER.value, "whose defaults to show (default: server)", usage),
    )
    about = "tell about a platform instead of a model, also where its device is not there: cuda, rocm, xpu, mps, cpu, a plugin's"
    add_flags(parser, {"": first})
    serve.add_arguments(parser)
    add_flags(parser, {"": (("--platform", None, about, {"metavar": "NAME"}),)})


def run(args: argparse.Namespace) -> None:
    if args.platform:
        about = explain_platform(args.platform)
        show(about, args.json, lambda: platform_text(about))
        return
    from quire.platforms import current_platform

    take_model(args)
    config = EngineArgs.from_cli_args(args).create_engine_config(UsageContext(args.usage))
    platform = current_platform(config.device.device)
    report = build_report(config, platform)
    if args.usage == UsageContext.API_SERVER.value:
        report = {"server": explain_server(args, config), **report}
    memory = report["memory"]
    sentences = f"{fit_sentence(config, memory, platform.device_name())} {limits_sentence(config, memory)}"
    show(report, args.json, lambda: f"{sentences}\n\n{as_text(report, with_constants=args.everything)}")


def build_report(config: EngineConfig, platform: Platform) -> dict[str, Any]:
    """Everything that `quire explain` knows, as plain values."""
    from quire.worker.dry_run import explain_without_weights

    return {
        **_files(config),
        "config": {part: _config_part(config, part) for part in (*CONFIG_PARTS, *_LORA[: config.lora is not None])},
        "platform": {"name": platform.name, "capabilities": explain_capabilities(platform.capabilities())},
        **explain_without_weights(config, platform),
        "limits": {name: getattr(limits, name) for name in dir(limits) if name.isupper()},
    }


def _files(config: EngineConfig) -> dict[str, Any]:
    """What a start would fetch, of a hub's model."""
    from quire.config.hub import describe_plan
    from quire.engine.arg_resolve import hub_settings

    hub = config.model.hub
    return {} if hub is None else {"files": describe_plan(hub, hub_settings(config.load, config.model.revision))}


def _config_part(config: EngineConfig, part: str) -> dict[str, Any]:
    section = getattr(config, part)
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, HFConfig | HubModel) or field.name in _SECRET:
            continue
        settings[field.name] = {"value": value}
        why = config.provenance.get(f"{part}.{field.name}")
        if why is not None:
            settings[field.name]["why"] = why
    return settings


def as_text(report: dict[str, Any], *, with_constants: bool = True) -> str:
    """The report for a reader: one section after another, one line a fact."""
    server = {name: with_why(entry) for name, entry in report.get("server", {}).items()}
    lines = section("server", server) if server else []
    lines += section("files", report["files"]) if "files" in report else []
    for part, settings in report["config"].items():
        lines += section(f"config.{part}", {name: with_why(entry) for name, entry in settings.items()})
    capabilities = {name: with_why(entry) for name, entry in report["platform"]["capabilities"].items()}
    lines += section(f"platform {report['platform']['name']}", capabilities)
    lines += section("kernels", {op: kernel_line(entry) for op, entry in report["kernels"].items()})
    backend = report["attention_backend"]
    lines += section("attention backends", backend["reasons"])
    lines += section("model", report["model"])
    lines += section("memory (estimate)", {name: _amount(name, value) for name, value in report["memory"].items()})
    lines += section("limits", report["limits"]) if with_constants else []
    return "\n".join(lines).lstrip("\n")


def _amount(name: str, value: Any) -> str:
    if isinstance(value, int) and name not in ("kv_blocks", "kv_host_blocks", "kv_tokens"):
        return f"{value / _GIB:.3f} GiB"
    return str(value)


_TOLD_APART = ("reasoning_parser", "tool_call_parser", "api_key", "host", "port", "uds")


def explain_server(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Each fact with its value and why it is so. Raises ConfigError: a flag of the server that cannot work."""
    from quire.entrypoints.http.state import answer_formats
    from quire.parsers.choice import AUTO, NONE

    check_server_flags(args)
    settings, options = server_settings(args), listen_options(args)
    tokenizer = TokenizerSource(config.model).get()
    template = getattr(tokenizer, "chat_template", None)
    formats = answer_formats(settings, config.reasoning, template, getattr(tokenizer, "name_or_path", ""))
    shown = {NONE: "the chat template shows none" if template else "there is no chat template"}
    facts: dict[str, Any] = {
        "names": _fact(list(config.model.served_model_name)),
        "address": _fact(options.url),
        "api_key": _fact(f"{len(keys)} given" if (keys := api_keys(args)) else None),
        "core": _core_fact(config),
    }
    for name, found in (("reasoning_parser", formats.reasoning_name), ("tool_call_parser", formats.tools_name)):
        is_found = getattr(settings, name) == AUTO
        why = shown.get(found, "found in the chat template") if is_found else "given"
        if is_found and name == "reasoning_parser" and found in (config.reasoning.reasoning_parser, "reasoning_config"):
            why = "given by reasoning_config"
        facts[name] = _fact(found, why)
    if tokenizer is not None and tokenizer.template is not None:
        asked = config.model.chat_template_content_format
        found = tokenizer.template.content_format() if asked == AUTO else asked
        facts["chat_template_content_format"] = _fact(found, "found in the chat template" if asked == AUTO else "given")
    for name, (value, default) in _changed(args).items():
        facts[name] = _fact(value, f"given; else {default!r}")
    return facts


def _core_fact(config: EngineConfig) -> dict[str, Any]:
    """Where the engine core runs, and what happens when it dies."""
    from quire.engine.process_client import chosen_core

    if chosen_core() == "inproc":
        return _fact("a thread of the server", "QUIRE_ENABLE_MULTIPROCESSING=0; if the core dies, the server ends")
    if config.parallel.recovery is not False:
        return _fact("a process of its own", "if it dies, it is started again and its requests go on (recovery)")
    return _fact("a process of its own", "if it dies, the server ends (--no-recovery)")


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
