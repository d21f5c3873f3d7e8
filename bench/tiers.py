"""`python -m bench tiers MODEL`: what a host tier gives conversations that the device cannot hold, and a disk tier a restart.

Conversations: `--users` take turns. Each turn sends all that was said and something new; the users' pages together are four times
what the device has, so that a user's own are gone when its turn comes. Once without a tier, once with the host's memory as one.

Restart: a prompt of `--prefix` tokens is computed in one process, and asked for again in another one, beside a new prompt of the
same length. Weights are random, prompts token ids: nothing but `config.json` is needed.
"""

import argparse
import multiprocessing
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.tables import print_records

from quire import EngineArgs, LLMEngine, SamplingParams
from quire.benchmarks import common
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind

OVERFLOW = 4
"""Times that the conversations' pages are more than the device's."""
PAGE = 16


class _Turn(NamedTuple):
    """A turn that is answered: its place in its conversation, seconds to the first token, tokens of the prompt and those of them
    that were not computed."""

    number: int
    first: float
    prompt: int
    cached: int


def _draw(source: random.Random, count: int) -> list[int]:
    return [source.randrange(10, 900) for _ in range(count)]


def _engine(model: str, tokens: int, connector: dict[str, Any] | None, **settings: Any) -> LLMEngine:
    args = EngineArgs(
        model=model, load_format="dummy", skip_tokenizer_init=True, block_size=PAGE, num_gpu_blocks_override=tokens // PAGE,
        kv_transfer_config=connector, disable_log_stats=True, **settings,
    )  # fmt: skip
    return LLMEngine.from_engine_args(args)


def _answers(engine: LLMEngine) -> Iterator[Any]:
    while engine.has_unfinished_requests():
        yield from engine.step()


def _first_token(engine: LLMEngine, prompt: list[int]) -> float:
    """Seconds to the one token of a request that is alone."""
    began = time.perf_counter()
    engine.add_request(f"{began}", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, temperature=0.0))
    for _ in _answers(engine):
        pass
    return time.perf_counter() - began


def _converse(engine: LLMEngine, args: argparse.Namespace) -> tuple[list[_Turn], float]:
    """All turns, and the seconds that they took; no more than `active` at once, the user that waited longest first."""
    source, said = random.Random(5), [list[int]() for _ in range(args.users)]
    waiting = deque((user, number) for number in range(args.turns) for user in range(args.users))
    running: dict[str, tuple[int, int, float]] = {}
    turns: list[_Turn] = []
    params = SamplingParams(
        max_tokens=args.answer, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
    )
    first: dict[str, float] = {}
    began = time.perf_counter()
    while waiting or running:
        busy = {user for user, _, _ in running.values()}
        while waiting and len(running) < args.active and waiting[0][0] not in busy:
            user, number = waiting.popleft()
            said[user] += _draw(source, args.turn if number else args.begin)
            running[name := f"{user}-{number}"] = (user, number, time.perf_counter())
            engine.add_request(name, {"prompt_token_ids": said[user]}, params)
        for output in engine.step():
            user, number, asked = running[output.request_id]
            assert isinstance(output, RequestOutput)
            first.setdefault(output.request_id, time.perf_counter() - asked)
            if output.finished:
                del running[output.request_id]
                turns.append(_Turn(number, first[output.request_id], len(said[user]), output.num_cached_tokens or 0))
                said[user] += output.outputs[0].token_ids
    return turns, time.perf_counter() - began


def _conversations(args: argparse.Namespace) -> list[dict[str, Any]]:
    longest = args.begin + (args.turns - 1) * args.turn + args.turns * args.answer
    room = args.users * longest // OVERFLOW
    tier = {"kv_connector": "memory", "kv_connector_extra_config": {"max_bytes": args.tier_gb << 30}}
    rows: list[dict[str, Any]] = []
    for name, connector in (("none", None), ("memory", tier)) * args.rounds:
        engine = _engine(args.model, room, connector, max_model_len=longest + PAGE, max_num_seqs=args.active)
        try:
            for length in (args.turn, args.begin, longest):  # what is compiled or measured once
                _first_token(engine, _draw(random.Random(length), length - 1))
            turns, seconds = _converse(engine, args)
        finally:
            engine.shutdown()
        later = [turn for turn in turns if turn.number]
        rows.append({
            "tier": name,
            "ttft_p50_ms": 1e3 * statistics.median(turn.first for turn in later),
            "ttft_p99_ms": 1e3 * sorted(turn.first for turn in later)[int(0.99 * len(later))],
            "cached": sum(turn.cached for turn in later) / sum(turn.prompt for turn in later),
            "seconds": seconds,
            "tokens_s": sum(turn.prompt + args.answer for turn in turns) / seconds,
        })  # fmt: skip
    return rows


def _disk(args: argparse.Namespace, path: str) -> LLMEngine:
    connector = {"kv_connector": "disk", "kv_connector_extra_config": {"path": path}}
    return _engine(args.model, 4 * args.prefix, connector, max_model_len=args.prefix + PAGE)


def _save(args: argparse.Namespace, path: str) -> None:
    engine = _disk(args, path)
    _first_token(engine, _draw(random.Random(1), args.prefix))
    engine.shutdown()


def _restart(args: argparse.Namespace, path: str, results: Any) -> None:
    engine = _disk(args, path)
    for seed in (2, 3):  # what is compiled or measured once
        _first_token(engine, _draw(random.Random(seed), args.prefix))
    known = _first_token(engine, _draw(random.Random(1), args.prefix))
    new = statistics.median(_first_token(engine, _draw(random.Random(seed), args.prefix)) for seed in (4, 5, 6))
    results.put({"tokens": args.prefix, "known_ms": 1e3 * known, "new_ms": 1e3 * new, "share": known / new})
    engine.shutdown()


def _restarts(args: argparse.Namespace) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    rows: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.disk) as path:
            results: Any = context.Queue()
            for target, given in ((_save, (args, path)), (_restart, (args, path, results))):
                process = context.Process(target=target, args=given)
                process.start()
                if target is _restart:
                    rows.append(results.get())
                process.join()
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder with the config.json of a model whose tokens are at least 900")
    parser.add_argument("--users", type=int, default=50, help="conversations")
    parser.add_argument("--turns", type=int, default=4, help="turns of each")
    parser.add_argument("--begin", type=int, default=2000, help="tokens of a first turn")
    parser.add_argument("--turn", type=int, default=300, help="new tokens of a later turn")
    parser.add_argument("--answer", type=int, default=100, help="tokens of an answer")
    parser.add_argument("--active", type=int, default=8, help="requests at once")
    parser.add_argument("--tier-gb", type=int, default=40, help="GiB of the host tier")
    parser.add_argument("--prefix", type=int, default=8192, help="tokens of the prompt that is known after a restart")
    parser.add_argument("--disk", help="where the disk tier's folder is made")
    parser.add_argument("--rounds", type=int, default=1, help="of everything")
    parser.add_argument("--parts", default="host,disk", help="what is measured")


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if "host" in args.parts:
        result["conversations"] = _conversations(args)
        columns = {"tier": "tier", "TTFT p50, ms": "ttft_p50_ms", "p99": "ttft_p99_ms"}
        columns |= {"found": "cached", "seconds": "seconds", "tokens/s": "tokens_s"}
        print_records("Conversations, turns behind the first one", columns, result["conversations"])
    if "disk" in args.parts:
        result["restart"] = _restarts(args)
        columns = {"tokens": "tokens", "known, ms": "known_ms", "new, ms": "new_ms", "share": "share"}
        print_records("First token after a restart", columns, result["restart"])
    return result | {"machine": common.machine()}
