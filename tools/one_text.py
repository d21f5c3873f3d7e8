"""What tokenizing one text takes by either call of the library, and for how long other threads stand still meanwhile.

    python tools/one_text.py [--tokenizer tokenizer.json] [--json FILE]

A short text of 512 random tokens, in turns; a long one of 235,000 characters beside a thread that wants to run.
"""

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

DEMO = Path(__file__).parents[1] / "src/quire/assets/demo/tokenizer.json"


def longest_gap(call: Callable[[str], object], text: str) -> float:
    """Seconds between two turns of this thread while another one tokenizes."""
    worker = threading.Thread(target=call, args=(text,))
    gap, last = 0.0, time.perf_counter()
    worker.start()
    while worker.is_alive():
        time.sleep(0.0005)
        now = time.perf_counter()
        gap, last = max(gap, now - last), now
    return gap


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tokenizer", default=str(DEMO))
    parser.add_argument("--json")
    args = parser.parse_args()
    tokenizer, draw = Tokenizer.from_file(args.tokenizer), random.Random(0)
    calls: dict[str, Callable[[str], object]] = {
        "encode": lambda text: tokenizer.encode(text).ids,
        "encode_batch_fast": lambda text: tokenizer.encode_batch_fast([text])[0].ids,
    }
    short = [tokenizer.decode([draw.randrange(tokenizer.get_vocab_size()) for _ in range(512)]) for _ in range(200)]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for text in short:
        for name, call in calls.items():
            began = time.perf_counter()
            call(text)
            times[name].append(time.perf_counter() - began)
    long = "the quick brown fox jumps over lazy dogs 12345 " * 5000
    figures = {
        name: {
            "short_ms": round(1e3 * statistics.median(times[name]), 3),
            "gap_ms": round(1e3 * statistics.median(longest_gap(call, long) for _ in range(7)), 2),
        }
        for name, call in calls.items()
    }
    for name, row in figures.items():
        print(
            f"{name:<20}{row['short_ms']:>8} ms for 512 tokens{row['gap_ms']:>10} ms in which another thread stood still"
        )
    if args.json:
        Path(args.json).write_text(
            json.dumps({"command": "python tools/one_text.py", "calls": figures}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
