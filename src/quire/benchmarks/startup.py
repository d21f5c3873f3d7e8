"""`quire bench startup`: fresh processes: how long until the first token, and where the time goes.

Each run is a new interpreter that reports when it had imported, built the engine and got a token. The clock starts before the
process does. The second table is the engine's own account of its start (`quire.timeline`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from quire.benchmarks import common
from quire.engine.arg_parser import Flags
from quire.errors import EngineError

PHASES = ("interpreter", "import", "engine", "first_token", "total")

_CHILD = """
import json, os, sys, time
if len(sys.argv) > 4:
    os.environ["QUIRE_CACHE_ROOT"] = sys.argv[4]
phases = {"interpreter": time.time() - float(sys.argv[1])}
mark = time.perf_counter()
from quire import LLM, SamplingParams
phases["import"] = time.perf_counter() - mark
mark = time.perf_counter()
from quire.engine.arg_utils import EngineArgs
llm = LLM.from_engine_args(EngineArgs(**json.loads(sys.argv[2])))
phases["engine"] = time.perf_counter() - mark
mark = time.perf_counter()
prompt = {"prompt_token_ids": [i % 7 + 10 for i in range(int(sys.argv[3]))]}
llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), use_tqdm=False)
phases["first_token"] = time.perf_counter() - mark
phases["total"] = time.time() - float(sys.argv[1])
phases["timeline"] = llm.llm_engine.explain()["startup"]
try:
    import resource
    phases["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
except ImportError:
    pass
print("@startup " + json.dumps(phases), flush=True)
"""


FLAGS: Flags = (
    ("--num-iters", 5, "processes that are measured"),
    ("--num-iters-warmup", 1, "processes before that", {"type": int}),
    ("--input-len", 128, "tokens of the prompt"),
    ("--cold", False, "each process finds Quire's own caches empty (compiled kernels, tuned sizes)"),
)

add_arguments = common.with_engine({"": FLAGS})


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    engine_args = changed_engine_args(args)
    runs: list[dict[str, Any]] = []
    total = args.num_iters_warmup + args.num_iters
    for number in common.progress(range(total), total, "processes"):
        phases = _one_process(engine_args, args.input_len, args.cold)
        if number >= args.num_iters_warmup:
            runs.append(phases)
    names = [name for name in (*PHASES, "peak_rss_mib") if name in runs[0]]
    figures: dict[str, Any] = {name: common.summary([run[name] for run in runs]) for name in names}
    shown = {name.replace("_", " "): figures[name] for name in names}
    common.print_summaries("Startup, seconds from process start", shown, ("p50", "min", "max"))
    own = {name: common.summary(seconds) for name, seconds in _phase_seconds(runs).items()}
    common.print_summaries("The engine's own account, seconds", own, ("p50", "min", "max"))
    return {**figures, "phases": own, "runs": runs, "machine": common.machine()}


def _phase_seconds(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds of each phase in each run; those that ran beside others have brackets around their names."""
    seconds: dict[str, list[float]] = {}
    for number, run in enumerate(runs):
        for phase in run["timeline"]["phases"]:
            name = f"[{phase['name']}]" if phase.get("beside") else phase["name"]
            column = seconds.setdefault(name, [0.0] * len(runs))
            column[number] += (phase["end_s"] or phase["begin_s"]) - phase["begin_s"]
    return seconds


def changed_engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's flags that differ from their defaults: what the child is told."""
    import dataclasses

    from quire.engine.arg_utils import EngineArgs

    given, default = vars(EngineArgs.from_cli_args(args)), vars(EngineArgs())
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    return {name: given[name] for name in names if given[name] != default[name]}


def _one_process(engine_args: dict[str, Any], input_len: int, is_cold: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="quire-cold-") as empty:
        command = [sys.executable, "-c", _CHILD, repr(time.time()), json.dumps(engine_args), str(input_len)]
        done = subprocess.run([*command, *([empty] if is_cold else [])], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("@startup "):
            return json.loads(line.removeprefix("@startup "))
    raise EngineError(f"A measured process ended with code {done.returncode}: {done.stderr.strip()[-1500:]}")
