"""Who waits for whom in an engine core alone: no server, one thread, and a clock that counts what this thread computes. So the
figures are the scheduler's and the model's, and another program on the machine changes them little.

`tenants`: one tenant's requests fill the rows and the queue under `fair`; the time to the first token of another one's short
prompts, alone and beside it. `neighbours`: the time between tokens of streams beside which long prompts arrive.

    python -m bench shares --json bench/results/shares.json
"""

import argparse
import random
from typing import Any

from bench.thread_clock import ThreadClock

from quire.benchmarks import common
from quire.engine.arg_utils import EngineArgs, UsageContext
from quire.engine.core import EngineCore
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.simulator.replay import RealEngine

FIRST_ID, LAST_ID = 300, 2000
"""Prompts are of random ids between these."""


class Load:
    """One core, and what its requests got. `add` a request, `step`, and see when tokens came; `rate`: requests of the flood that
    ended, a second."""

    def __init__(self, args: argparse.Namespace, **settings: Any) -> None:
        made: dict[str, Any] = {
            "kv_cache_memory_bytes": 128 << 20, "max_num_seqs": args.max_num_seqs, "cpu_threads": 1,
            "async_scheduling": False, "max_model_len": 2048,
        }  # fmt: skip
        config = EngineArgs(**made | settings).create_engine_config(UsageContext.API_SERVER)
        self.engine = RealEngine(EngineCore(config), ThreadClock())
        self.draw, self.times = random.Random(1), dict[str, list[float]]()
        self.ended: set[str] = set()
        self.rate = 0.0

    def add(self, num_prompt: int, num_tokens: int, tenant: str = "", at: float | None = None) -> str:
        """A request that came at some second, by default now; its id."""
        name = f"{tenant}{len(self.times)}"
        ids = [self.draw.randrange(FIRST_ID, LAST_ID) for _ in range(num_prompt)]
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        now = self.engine.now if at is None else at
        self.times[name] = []
        self.engine.add(EngineRequest(name, ids, params, arrival_time=now, tenant=tenant))
        return name

    def step(self) -> None:
        outputs = self.engine.step()
        if outputs is None:
            return
        for name in (*outputs.plain_ids, *(one.request_id for one in outputs.outputs if one.new_token_ids)):
            self.times[name].append(self.engine.now)
        self.ended |= {one.request_id for one in outputs.outputs if one.finish_reason is not None}

    def close(self) -> None:
        self.engine.core.shutdown()


def first_tokens(load: Load, args: argparse.Namespace, floods: bool) -> list[float]:
    """Seconds to the first token of one short prompt after another, which come at random moments."""
    found: list[float] = []
    waiting, due, came = "", load.engine.now, 0.0
    flooding: set[str] = set()
    began, load.ended = load.engine.now, set()
    while len(found) < args.quiet_requests:
        flooding -= load.ended
        while floods and len(flooding) < 4 * args.max_num_seqs:
            flooding.add(load.add(args.prompt, args.tokens, "flood"))
        if not waiting and load.engine.now >= due:
            waiting, came = load.add(args.prompt, 8, "quiet", at=due), due
        if not load.engine.core.has_work():
            load.engine.wait_until(due)
        load.step()
        if waiting in load.ended:
            found.append(load.times[waiting][0] - came)
            waiting, due = "", load.engine.now + load.draw.expovariate(1 / 0.02)
    if floods:
        load.rate = sum(name.startswith("flood") for name in load.ended) / (load.engine.now - began)
    load.engine.core.abort_requests(list(flooding))
    while load.engine.core.has_work():
        load.step()
    return found


def gaps(load: Load, args: argparse.Namespace, long_prompt: int) -> list[float]:
    """Seconds between tokens of streams, beside long prompts of which the next one comes when the last one has its token."""
    streams = [load.add(args.prompt, args.stream_tokens) for _ in range(args.streams)]
    beside = ""
    while not load.ended.issuperset(streams):
        if long_prompt and (not beside or beside in load.ended):
            beside = load.add(long_prompt, 1)
        load.step()
    while load.engine.core.has_work():
        load.step()
    return [
        after - before
        for name in streams
        for before, after in zip(load.times[name][2:], load.times[name][3:], strict=False)
    ]


def summary(alone: list[float], beside: list[float], share: float) -> dict[str, Any]:
    ms = {
        name: {f"p{part}": round(1e3 * common.percentile(values, part), 2) for part in (50, 99)}
        for name, values in (("alone_ms", alone), ("beside_ms", beside))
    }
    return {**ms, "p99_ratio": round(common.percentile(beside, 99) / common.percentile(alone, share), 2)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=30, help="tokens of a short prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer of the flood")
    parser.add_argument("--quiet-requests", type=int, default=300)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=300)
    parser.add_argument("--long-prompt", type=int, default=1500)
    parser.add_argument("--parts", nargs="+", choices=("tenants", "neighbours"), default=["tenants", "neighbours"])


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; each part has a core of its own."""
    results: dict[str, Any] = {}
    if "tenants" in args.parts:
        load = Load(args, scheduling_policy="fair", enable_prefix_caching=False)
        first_tokens(
            load, argparse.Namespace(**vars(args) | {"quiet_requests": 40}), floods=True
        )  # the cost model learns
        results["tenants"] = summary(first_tokens(load, args, False), first_tokens(load, args, True), 99)
        results["tenants"]["flood_requests_per_s"] = round(load.rate, 2)
        load.close()
    for step_ms in (None, 0) if "neighbours" in args.parts else ():
        load = Load(args, enable_prefix_caching=False, **({} if step_ms is None else {"max_step_ms": step_ms}))
        gaps(load, args, args.long_prompt)  # the cost model learns
        found = summary(gaps(load, args, 0), gaps(load, args, args.long_prompt), 50)
        results["neighbours" if step_ms is None else "neighbours without short steps"] = found
        load.close()
    print(results, flush=True)
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    return {"settings": settings, "machine": common.machine(), **results}
