"""`python -m bench NAME`: measurements for those who change Quire, from a checkout. Users' own are `quire bench`."""

import importlib
import sys

from quire.entrypoints import exit_codes
from quire.entrypoints.cli.bench import measure, parser_of
from quire.errors import QuireError

BENCHMARKS = {
    "scheduler": "microseconds a request and step, without a model",
    "grammars": "structured outputs: microseconds a mask, milliseconds of all masks of a step, by kind of grammar",
    "forms": "answers that follow a JSON schema beside free ones, in rounds that alternate",
    "answers": "how long the making of a long answer keeps other requests waiting, in pieces and in one go",
    "frontend": "the server around the engine: microseconds a streamed token by part, and added latency",
    "servers": "two ways to run `quire serve`, in rounds that alternate: the core in a process beside the core in a thread",
    "host": "the engine's own thread around the device's work: microseconds a step and a request, by stage",
    "client": "what the client of `quire bench serve` can take, beside a server that computes nothing",
    "step": "one step: host and device time, bytes and operations moved, share of the read bandwidth",
    "compare": "beside other engines, in rounds that alternate: ratios on the same machine in the same minutes",
    "chaos": "the table of faults: streams on servers whose processes are killed and stopped, at random and at named points",
    "overload": "a flood, a tenant beside another one's flood, and streams beside long prompts",
    "shares": "who waits for whom in an engine core alone, on the clock of its thread: tenants, and streams beside long prompts",
    "simulate": "the capacity simulator beside a real replay of the same traffic",
    "tiers": "conversations that do not fit on the device with a host tier and without, and a prompt that a disk tier kept",
    "copies": "two copies of an engine core beside one, with a model that only waits",
    "adapters": "a thousand adapters on disk, asked for by Zipf's law: throughput and time to first token beside the base's",
    "media": "an image at two frontends: milliseconds when it is new, and when the other one had it; and the cache alone",
    "demo": "accuracy of the built-in demo model, task by task",
}


def main(argv: list[str] | None = None) -> int:
    """Run one; the exit code."""
    name, *words = (sys.argv[1:] if argv is None else argv) or [""]
    if name not in BENCHMARKS:
        width = max(map(len, BENCHMARKS))
        print("usage: python -m bench NAME [options]\n")
        print("\n".join(f"  {each:<{width}}  {about}" for each, about in BENCHMARKS.items()))
        return 0 if name in ("", "-h", "--help") else 2
    benchmark = importlib.import_module(f"bench.{name}")
    try:
        return measure(
            name, parser_of(f"python -m bench {name}", BENCHMARKS[name], benchmark).parse_args(words), benchmark
        )
    except QuireError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return exit_codes.of_error(error)


if __name__ == "__main__":
    sys.exit(main())
