"""`quire simulate`: how many devices a load needs, by the engine's scheduler on a virtual clock."""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from quire.benchmarks.common import machine, model_name, print_columns, write_text
from quire.engine.arg_parser import ArgumentParser, Flags, add_flags, positive
from quire.engine.arg_utils import EngineArgs, UsageContext
from quire.errors import ConfigError
from quire.simulator.capacity import Site, Slo, Trial, parse_slo, search
from quire.simulator.step_costs import DEVICES, read_costs
from quire.simulator.traffic import Arrival, poisson, read_trace

HERE = "here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    traffic: Flags = (
        ("--trace", None, "JSON lines with timestamp (ms), input_length, output_length, hash_ids", {"metavar": "FILE"}),
        ("--speed", 1.0, "how much faster than recorded a trace runs"),
        ("--rate", None, "without a trace: requests a second, as a Poisson process", {"type": float}),
        ("--num-requests", 2000, "requests at that rate"),
        ("--input-len", 1024, "tokens a prompt; they vary by half either way"),
        ("--output-len", 256, "tokens an answer; they vary by half either way"),
        ("--traffic-seed", 0, "of arrivals and lengths"),
    )
    what: Flags = (
        ("--slo", "", "limits: ttft=500ms,tpot=50ms,e2el=10s", {"metavar": "LIMITS"}),
        ("--slo-percentile", 99.0, "share of requests that keep them, in per cent"),
        (
            "--devices",
            None,
            "numbers of devices to try; else the smallest that keeps the limits",
            {"type": positive, "nargs": "+"},
        ),
        ("--most-devices", 256, "the largest number that the search tries"),
        (
            "--try",
            None,
            "settings to try, each with its values: max_num_seqs=64,256",
            {"nargs": "+", "metavar": "S=V,V"},
        ),
        ("--round-robin", False, "give requests to copies in turn, whatever their prefixes"),
        ("--costs", None, "file with fitted costs of a step", {"metavar": "FILE"}),
        ("--save-costs", None, "write the costs that were measured here", {"metavar": "FILE"}),
        ("--save-json", None, "write the result", {"metavar": "FILE"}),
        ("--plot", None, "write a chart of latencies over devices (SVG)", {"metavar": "FILE"}),
    )
    add_flags(parser, {"Traffic": traffic, "Simulation": what})
    EngineArgs.add_cli_args(parser)
    names = ", ".join(DEVICES)
    for action in parser._actions:
        if "--device" in action.option_strings:  # here it names what is simulated
            action.help, action.default = f"what is simulated: {HERE} (this machine, measured) or {names}", HERE


def run(args: argparse.Namespace) -> int:
    slo = parse_slo(args.slo, args.slo_percentile)
    if not (slo.seconds or args.devices):
        raise ConfigError.of("slo", "say what is wanted: limits (--slo ttft=500ms,tpot=50ms), or --devices 1 2 4")
    arrivals = _traffic(args)
    trials: list[Trial] = []
    told: dict[str, Any] = {}
    for settings in _grid(getattr(args, "try") or []):
        site = _site(args, settings)
        told = told or _describe(args, site)
        trials += _try(args, site, slo, settings, arrivals)
    _print(trials, slo)
    if args.save_json:
        _save(args.save_json, {**told, "slo": dict(slo.seconds), "percentile": slo.percentile}, trials)
    if args.plot:
        _plot(args.plot, trials, slo)
    return 0 if any(trial.meets for trial in trials) else 1


def _traffic(args: argparse.Namespace) -> "Callable[[], Iterable[Arrival]]":
    """Makes the same traffic each time."""
    if args.trace is not None:
        if args.rate is not None:
            raise ConfigError.of("rate", "--trace says when requests come; --speed changes how fast")
        arrivals = read_trace(args.trace, args.speed)
        return lambda: arrivals
    if args.rate is None or not args.rate > 0:
        raise ConfigError.of("rate", f"{args.rate} must be above 0, or give a --trace")
    lengths = args.input_len, args.output_len
    return lambda: poisson(args.rate, args.num_requests, *lengths, seed=args.traffic_seed)


def _grid(words: list[str]) -> list[dict[str, str]]:
    """Every combination of the settings' values."""
    axes: list[list[tuple[str, str]]] = []
    for word in words:
        name, _, values = word.partition("=")
        if not values:
            raise ConfigError.of("try", f"{word!r} is no setting with values: write max_num_seqs=64,256")
        axes.append([(name.replace("-", "_").lstrip("_"), value) for value in values.split(",")])
    return [dict(combination) for combination in itertools.product(*axes)]


def _site(args: argparse.Namespace, settings: dict[str, str]) -> "Site":
    from quire.simulator import capacity

    wanted = EngineArgs.from_cli_args(args)
    parser = EngineArgs.add_cli_args(ArgumentParser())
    for name, value in settings.items():
        if not hasattr(wanted, name):
            raise ConfigError.of("try", f"there is no setting {name!r}")
        setattr(wanted, name, getattr(parser.parse_args([f"--{name.replace('_', '-')}", value]), name))
    device = args.device
    if device != HERE and device not in DEVICES:
        raise ConfigError.of("device", f"{device!r} has no data sheet here; it may be {HERE}, {', '.join(DEVICES)}")
    wanted.device = "auto" if device == HERE else "cpu"
    config = wanted.create_engine_config(UsageContext.API_SERVER)
    if config.parallel.num_devices > 1:
        message = "a simulated copy has one device; --devices says how many copies"
        raise ConfigError.of("tensor_parallel_size", message)
    costs = None if args.costs is None else read_costs(args.costs)
    if device != HERE:
        return capacity.site_on(config, DEVICES[device], costs)
    site = capacity.site_here(config, costs)
    if args.save_costs:
        write_text(args.save_costs, json.dumps(site.costs.describe(), indent=2) + "\n", "save_costs")
    return site


def _try(
    args: argparse.Namespace,
    site: "Site",
    slo: "Slo",
    settings: dict[str, str],
    arrivals: "Callable[[], Iterable[Arrival]]",
) -> "list[Trial]":
    def simulate(count: int) -> Any:
        print(f"simulating {count} device(s) {settings or ''}".rstrip(), file=sys.stderr, flush=True)
        return site.replay(arrivals(), count, by_prefix=not args.round_robin)

    return search(simulate, slo, settings, args.devices or (), args.most_devices)


def _describe(args: argparse.Namespace, site: "Site") -> dict[str, Any]:
    return {
        "model": model_name(site.config.model.model),
        "device": args.device,
        "kv_pages": site.pages.num_blocks,
        "costs": site.costs.describe(),
        "machine": machine(),
    }


def _print(trials: "list[Trial]", slo: "Slo") -> None:
    share = f"p{slo.percentile:g}"
    header = (
        "devices",
        "settings",
        "TTFT p50",
        f"TTFT {share}",
        "TPOT p50",
        f"TPOT {share}",
        "tokens/s",
        "cached",
        "kept",
        "sim s",
    )
    rows: list[list[Any]] = []
    for trial in trials:
        figures = trial.figures
        times = [
            f"{1e3 * figures.percentile(name, each):.1f} ms"
            for name in ("first_token", "per_token")
            for each in (50, slo.percentile)
        ]
        settings = " ".join(f"{name}={value}" for name, value in trial.settings.items()) or "-"
        cached = f"{figures.num_cached_tokens / max(1, figures.num_prompt_tokens):.0%}"
        kept = ("yes" if trial.meets else "no") if slo.seconds else "-"
        speed = f"{figures.num_output_tokens / (figures.duration or 1.0):.0f}"
        rows.append([str(trial.num_devices), settings, *times, speed, cached, kept, f"{trial.seconds:.1f}"])
    print_columns("Simulation", header, rows)
    kept_by = [trial for trial in trials if trial.meets and slo.seconds]
    if kept_by:
        best = min(kept_by, key=lambda trial: trial.num_devices)
        print(f"{best.num_devices} device(s) keep the limits.")
    elif slo.seconds:
        print("No number of devices that was tried keeps the limits.")


def _save(path: str, told: dict[str, Any], trials: "list[Trial]") -> None:
    rows = [
        {
            "devices": trial.num_devices,
            "settings": dict(trial.settings),
            "meets": trial.meets,
            "simulated_in_s": trial.seconds,
            **trial.figures.summary(),
        }
        for trial in trials
    ]
    write_text(path, json.dumps({**told, "trials": rows}, indent=2) + "\n", "save_json")


def _plot(path: str, trials: "list[Trial]", slo: "Slo") -> None:
    from quire.benchmarks.plot import Curve, line_chart

    curves: list[Curve] = []
    for settings in {str(dict(trial.settings)): dict(trial.settings) for trial in trials}.values():
        own = [trial for trial in trials if dict(trial.settings) == settings]
        for name, field in (("TTFT", "first_token"), ("TPOT", "per_token")):
            points = [(float(t.num_devices), 1e3 * t.figures.percentile(field, slo.percentile)) for t in own]
            words = " ".join(f"{key}={value}" for key, value in settings.items())
            curves.append(Curve(f"{name} {words}".strip(), points))
    title = f"Latency (p{slo.percentile:g}) over devices"
    write_text(path, line_chart(curves, title, "devices", "milliseconds"), "plot")
