"""`python -m bench simulate`: the simulator beside a real replay of the same traffic, on this machine with the demo model.

Costs are fitted from loads of their own; then each rate is replayed on the real core and on the virtual clock. Times are this
thread's CPU time, and waits for the next request are skipped: so other work on the machine does not count.
"""

import argparse
import dataclasses
from typing import Any

from bench.tables import print_records
from bench.thread_clock import ThreadClock

from quire.benchmarks import common
from quire.engine.arg_utils import EngineArgs, UsageContext
from quire.engine.core import EngineCore
from quire.processes import settle_collector
from quire.simulator.capacity import Site, fit_costs, measure_turns, noting
from quire.simulator.replay import RealEngine, Replay
from quire.simulator.traffic import poisson

FIGURES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "e2el_p50_ms", "e2el_p99_ms")


def run(
    rates: tuple[float, ...] = (4.0, 8.0),
    count: int = 150,
    lengths: tuple[int, int] = (80, 20),
    rounds: int = 1,
) -> dict[str, Any]:
    """The costs, and a row for each rate and figure: real, simulated, ratio. Each rate is replayed `rounds` times for real; the
    figure is the mean of the rounds. Costs are those of loads before, between and after all replays: a machine's speed drifts."""
    config = EngineArgs(max_model_len=1024, max_num_seqs=64, cpu_threads=1).create_engine_config(
        UsageContext.API_SERVER
    )
    noted, made = noting(config)
    core = EngineCore(noted)
    settle_collector()
    try:
        turns = measure_turns(core, made[0], 1, ThreadClock)
        real: dict[float, list[dict[str, Any]]] = {rate: [] for rate in rates}
        for number in range(rounds):
            for rate in rates:
                core.call_utility("reset_prefix_cache")
                traffic = poisson(rate, count, *lengths, seed=number)
                real[rate].append(Replay([RealEngine(core, ThreadClock())]).run(traffic).summary())
                turns += measure_turns(core, made[0], 1, ThreadClock)
        settled = dataclasses.replace(config, model=core.config.model, cache=core.config.cache)
        site = Site(settled, core.kv_cache, fit_costs(turns))
    finally:
        core.shutdown()
    rows: list[dict[str, Any]] = []
    for rate in rates:
        simulated = [site.replay(poisson(rate, count, *lengths, seed=number), 1).summary() for number in range(rounds)]
        for name in FIGURES:
            one, other = (sum(each[name] for each in some) / rounds for some in (real[rate], simulated))
            rows.append({"rate": rate, "figure": name, "real": one, "simulated": other, "ratio": other / one})
    return {
        "costs": {**site.costs.describe(), "scatter": "left out"},
        "turns": len(turns),
        "requests": count,
        "lengths": lengths,
        "rounds": rounds,
        "rows": rows,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 8.0], help="requests a second")
    parser.add_argument("--count", type=int, default=150, help="requests at each rate")
    parser.add_argument("--rounds", type=int, default=1, help="real replays of each rate")


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    result = run(tuple(args.rates), args.count, rounds=args.rounds)
    columns = {"rate": "rate", "figure": "figure", "real": "real", "simulated": "simulated", "ratio": "ratio"}
    print_records("Simulated and real", columns, result["rows"])
    return result | {"machine": common.machine()}
