"""`quire bench first-use`: how long the first use of each feature stops the other streams of a fresh server.

A server is started on empty caches. While a few streams run, one request of each feature is sent, and then a second. Of each the
table has the longest gap between two tokens of any other stream, and the time to its own first token. A second server gets all
features at once. The gaps of streams that run undisturbed come first, to compare with. The streams are read by a process of their
own: what this one does with a long answer is no gap of theirs.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import msgspec

from quire.benchmarks import common
from quire.benchmarks.http_load import Client, RequestRecord
from quire.benchmarks.load import read_child, run_coroutine, write_child
from quire.benchmarks.own_server import started_server
from quire.benchmarks.startup import changed_engine_args
from quire.engine.arg_parser import Flags
from quire.entrypoints.http_client import Target, ask, control
from quire.processes import read_message, start_child, write_message

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ORDERS = {"in-turn": "one after another", "at-once": "all at once"}
SHORT_PROMPT = 16
SETTLE_S = 0.3
"""How long streams run undisturbed between two features."""
REFUSED = (400, 404, 422)


@dataclasses.dataclass(frozen=True)
class Feature:
    """A request that uses one feature.

    Attributes:
        name: as the table calls it.
        body: fields of the request beside `model`, `max_tokens` and the prompt.
        path: the route.
        prompt: how the prompt of a completion is made: `short` (16 tokens), `long` (as long as is asked for), `repeated` (always
            the same), `text`; `none` where the body has it.
        needs_tokenizer: a server without a tokenizer refuses it.
    """

    name: str
    body: dict[str, Any] = dataclasses.field(default_factory=dict)
    path: str = COMPLETIONS
    prompt: str = "short"
    needs_tokenizer: bool = False


@dataclasses.dataclass
class Use:
    """One request of a feature.

    Attributes:
        gap_ms: the longest time without a token in any other stream, while the request was there.
        first_ms: from sending it to its first token, or to its answer where that comes at once.
        gap_at_s: when that time without a token began, in seconds of `time.perf_counter()`.
    """

    gap_ms: float
    first_ms: float
    error: str = ""
    gap_at_s: float = 0.0


class Gap(NamedTuple):
    """A time without a token: how long, and when it began, in seconds of `time.perf_counter()`."""

    ms: float
    at_s: float


FLAGS: Flags = (
    ("--num-streams", 4, "streams that run beside"),
    ("--stream-len", 512, "tokens of such a stream; then another one begins"),
    ("--long-input-len", 3000, "tokens of a long prompt"),
    ("--output-len", 8, "tokens of a feature's answer (structured outputs get 64)"),
    ("--vocab-size", 300, "ids of random prompts are below it"),
    ("--wait", 0.0, "seconds between the server's start and the first request"),
    ("--features", None, "only those whose name begins so (all)", {"nargs": "+", "metavar": "NAME"}),
    (
        "--orders",
        tuple(ORDERS),
        "a fresh server for each: in-turn, at-once (both)",
        {"nargs": "+", "choices": tuple(ORDERS)},
    ),
    (
        "--quantizations",
        ("",),
        "a fresh server for each of these values of --quantization (as that flag says)",
        {"nargs": "+", "metavar": "NAME"},
    ),
    ("--warm", False, "keep the caches of this machine, in place of empty ones"),
    ("--max-gap-ms", None, "exit with 1 if a gap is longer than this", {"type": float, "metavar": "MS"}),
)

add_arguments = common.with_engine({"": FLAGS})


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    changed = changed_engine_args(args)
    runs: list[dict[str, Any]] = []
    for quantization in args.quantizations:
        settings = {**changed, **({"quantization": quantization} if quantization not in ("", "none") else {})}
        for order in args.orders:
            with _fresh_server(settings, args.warm) as (url, ready_s):
                time.sleep(args.wait)
                measured = run_coroutine(_measure(args, Target.parse(url), order, settings))
            name = f"{ORDERS[order]}{', ' + quantization if quantization else ''}"
            runs.append({"order": order, "quantization": quantization or None, "ready_s": ready_s, **measured})
            _print(name, runs[-1])
    longest = max(run["longest_gap_ms"] for run in runs)
    sizes = {
        name: getattr(args, name) for name in ("num_streams", "stream_len", "long_input_len", "output_len", "wait")
    }
    model = common.model_name(args.model) if args.model else None
    figures = {"model": model, **sizes, "longest_gap_ms": longest, "runs": runs, "machine": common.machine()}
    is_too_long = args.max_gap_ms is not None and longest > args.max_gap_ms
    return {**figures, **({"exit_code": 1} if is_too_long else {})}


@contextmanager
def _fresh_server(settings: dict[str, Any], is_warm: bool) -> Iterator[tuple[str, float]]:
    """The URL of a server, and the seconds from its process's start until it was ready."""
    with tempfile.TemporaryDirectory(prefix="quire-first-use-") as folder:
        file = os.path.join(folder, "settings.yaml")
        with open(file, "w", encoding="utf-8") as stream:
            json.dump(settings, stream)  # JSON is YAML
        caches = {} if is_warm else {"QUIRE_CACHE_ROOT": os.path.join(folder, "cache"), "TRITON_CACHE_DIR": None}
        began = time.perf_counter()
        with started_server(["--config", file], caches) as url:
            yield url, time.perf_counter() - began


def _print(name: str, run: dict[str, Any]) -> None:
    rows = [
        [row["feature"], *(row[use][figure] for use in ("first", "second") for figure in ("gap_ms", "first_ms"))]
        for row in run["features"]
        if "refused" not in row
    ]
    common.print_columns(
        f"First use, {name} (ready after {run['ready_s']:.1f} s; longest gap {run['longest_gap_ms']:.0f} ms)",
        ("", "others' gap, ms", "own first token", "gap, second use", "first token, second use"),
        rows,
    )
    for row in run["features"]:
        if error := row.get("refused") or row["first"]["error"] or row["second"]["error"]:
            print(f"{row['feature']}: {error[:200]}")


async def _measure(args: argparse.Namespace, target: Target, order: str, settings: dict[str, Any]) -> dict[str, Any]:
    model = (await asyncio.to_thread(control, target, "GET", "/v1/models"))["data"][0]["id"]
    is_pooling = await _refuses_to_generate(target, model)
    features = pooling() if is_pooling else generating(args.vocab_size)
    has_tokenizer = not settings.get("skip_tokenizer_init")
    features = [
        feature
        for feature in features
        if (has_tokenizer or not feature.needs_tokenizer)
        and (not args.features or feature.name.startswith(tuple(args.features)))
    ]
    asker = _Asker(target, model, args.vocab_size, args.seed or 0, args.output_len, args.long_input_len)
    with _StreamsElsewhere(asker, args.num_streams, args.stream_len, is_pooling) as streams:
        began = time.perf_counter()
        await asyncio.sleep(max(SETTLE_S, 1.0 if order == "in-turn" else 0.0))
        undisturbed = streams.longest_gap(began, time.perf_counter())
        rows = await (_in_turn if order == "in-turn" else _at_once)(asker, streams, features)
    asker.client.close()
    gaps = [
        undisturbed.ms,
        *(row[use]["gap_ms"] for row in rows if "refused" not in row for use in ("first", "second")),
    ]
    return {
        "undisturbed_gap_ms": undisturbed.ms,
        "undisturbed_gap_at_s": undisturbed.at_s,
        "streams_first_token_ms": streams.first_ms,
        "longest_gap_ms": max(gaps),
        "features": rows,
    }


async def _refuses_to_generate(target: Target, model: str) -> bool:
    body = {"model": model, "prompt": [20] * 4, "max_tokens": 1}
    status, answer = await asyncio.to_thread(ask, target, "POST", COMPLETIONS, body)
    return status >= 400 and b"pooling" in answer


async def _in_turn(asker: "_Asker", streams: "_StreamsElsewhere", features: Sequence[Feature]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for feature in features:
        uses: list[Use] = []
        for _ in range(2):
            await asyncio.sleep(SETTLE_S)
            began = time.perf_counter()
            first_ms, error = await asker.use(feature)
            await asyncio.sleep(0.05)
            gap = streams.longest_gap(began, time.perf_counter())
            uses.append(Use(gap.ms, first_ms, error, gap.at_s))
        rows.append(_row(feature, uses))
    return rows


async def _at_once(asker: "_Asker", streams: "_StreamsElsewhere", features: Sequence[Feature]) -> list[dict[str, Any]]:
    """All features at the same time, twice; the gap is the same for all."""
    uses: list[list[Use]] = [[] for _ in features]
    for _ in range(2):
        began = time.perf_counter()
        answers = await asyncio.gather(*(asker.use(feature) for feature in features))
        await asyncio.sleep(SETTLE_S)
        gap = streams.longest_gap(began, time.perf_counter())
        for own, (first_ms, error) in zip(uses, answers, strict=True):
            own.append(Use(gap.ms, first_ms, error, gap.at_s))
    return [_row(feature, own) for feature, own in zip(features, uses, strict=True)]


def _row(feature: Feature, uses: list[Use]) -> dict[str, Any]:
    row = {"feature": feature.name, "first": dataclasses.asdict(uses[0]), "second": dataclasses.asdict(uses[1])}
    is_refused = any(uses[0].error.startswith(f"status {status}") for status in REFUSED)
    return {"feature": feature.name, "refused": uses[0].error} if is_refused else row


class _Asker:
    """Sends requests."""

    def __init__(
        self, target: Target, model: str, vocab_size: int, seed: int, output_len: int = 0, long_input_len: int = 0
    ) -> None:
        self.target, self.model, self.vocab_size, self.seed = target, model, vocab_size, seed
        self._output_len, self._long_input_len = output_len, long_input_len
        self.client = Client(target)
        self._heads = {path: target.request_head(path) for path in (COMPLETIONS, CHATS)}
        self._random = random.Random(seed)

    def random_prompt(self, length: int) -> list[int]:
        return common.random_tokens(self._random, length, self.vocab_size)

    def _prompt(self, kind: str) -> Any:
        if kind == "text":
            return "one two three four five six " + str(self._random.random())
        if kind == "repeated":
            return [common.LOWEST_TOKEN + at % 9 for at in range(200)]
        return self.random_prompt(self._long_input_len if kind == "long" else SHORT_PROMPT)

    async def use(self, feature: Feature) -> tuple[float, str]:
        """Milliseconds until the first token of a request, and its error."""
        body: dict[str, Any] = {"model": self.model, **feature.body}
        is_generating = feature.path in (COMPLETIONS, CHATS)
        if feature.prompt != "none":
            body["prompt" if is_generating else "input"] = self._prompt(feature.prompt)
        if not is_generating:
            return await self.answer(feature.path, body)
        is_structured = "structured_outputs" in body or "response_format" in body or "tools" in body
        body = {"temperature": 0.0, "max_tokens": 64 if is_structured else self._output_len, **body}
        body = {"ignore_eos": not is_structured, "stream": True, **body}
        if not body["stream"]:
            return await self.answer(feature.path, body)
        record = RequestRecord()
        await self.client.send(self.payload(feature.path, {**body, "return_token_ids": True}), record)
        first = record.event_times[0] if record.event_times else record.finished
        return (first - record.sent) * 1e3, record.error

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[float, str]:
        """Milliseconds until a whole answer, and its error."""
        began = time.perf_counter()
        status, text = await asyncio.to_thread(ask, self.target, "POST", path, body)
        error = "" if status < 400 else f"status {status}: {text[:500].decode('utf-8', 'replace')}"
        return (time.perf_counter() - began) * 1e3, error

    def payload(self, path: str, body: dict[str, Any]) -> bytes:
        data = json.dumps(body).encode()
        return self._heads[path] + b"%d\r\n\r\n" % len(data) + data


class _Streams:
    """Streams that run all the time, each as one request after another.

    Attributes:
        first_ms: time to the first token of all streams at the start.
    """

    def __init__(self, asker: _Asker, count: int, length: int) -> None:
        self._asker, self._length = asker, length
        self._times: list[list[float]] = [[] for _ in range(count)]
        self._current: list[RequestRecord] = [RequestRecord() for _ in range(count)]
        self._tasks: list[asyncio.Task[None]] = []
        self.first_ms = 0.0

    async def start(self) -> None:
        """Returns when all of them have a token. Raises EngineError: one of them failed."""
        from quire.errors import EngineError

        began = time.perf_counter()
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(len(self._times))]
        while not all(map(self._moments, range(len(self._times)))):
            if failed := next((task for task in self._tasks if task.done()), None):
                raise EngineError(f"A stream ended: {failed.exception()}")
            await asyncio.sleep(0.001)
        self.first_ms = (time.perf_counter() - began) * 1e3

    def _moments(self, number: int) -> list[float]:
        return [*self._times[number], *self._current[number].event_times]

    async def _run(self, number: int) -> None:
        from quire.errors import EngineError

        body: dict[str, Any] = {"model": self._asker.model, "temperature": 0.0, "ignore_eos": True, "stream": True}
        body |= {"max_tokens": self._length, "return_token_ids": True}
        while True:
            prompt = self._asker.random_prompt(SHORT_PROMPT)
            record = self._current[number] = RequestRecord()
            await self._asker.client.send(self._asker.payload(COMPLETIONS, {**body, "prompt": prompt}), record)
            if record.error:
                raise EngineError(f"a stream beside the features failed: {record.error}")
            self._times[number] += record.event_times
            self._current[number] = RequestRecord()

    def longest_gap(self, begin: float, end: float) -> Gap:
        """The longest time in which some stream had no token between these moments."""
        longest = (0.0, begin)
        for number in range(len(self._times)):
            moments = self._moments(number)
            before = max((moment for moment in moments if moment <= begin), default=begin)
            inside = [moment for moment in moments if begin < moment <= end]
            ends = [*inside, end] if not inside or end - inside[-1] > SETTLE_S else inside
            pairs = zip([before, *ends], ends, strict=False)
            longest = max([longest, *((late - early, early) for early, late in pairs)])
        return Gap(longest[0] * 1e3, longest[1])

    async def tell_gaps(self) -> None:
        """Answers each message, two moments, with the gap between them, until there is none."""
        await self.start()
        write_message(1, msgspec.msgpack.encode(self.first_ms))
        while (asked := await asyncio.to_thread(read_message, 0)) is not None:
            if failed := next((task for task in self._tasks if task.done()), None):
                failed.result()
            write_message(1, msgspec.msgpack.encode(self.longest_gap(*msgspec.msgpack.decode(asked))))


class _PooledStreams(_Streams):
    """Short pooling requests, one after another: a token is an answer."""

    async def _run(self, number: int) -> None:
        from quire.errors import EngineError

        while True:
            body = {"model": self._asker.model, "input": self._asker.random_prompt(SHORT_PROMPT)}
            _, error = await self._asker.answer("/pooling", body)
            if error:
                raise EngineError(f"a request beside the features failed: {error}")
            self._times[number].append(time.perf_counter())


class _StreamsElsewhere:
    """Streams that a process of their own reads. Both processes have one clock, the machine's."""

    def __init__(self, asker: _Asker, count: int, length: int, is_pooling: bool) -> None:
        self._child = start_child(f"{__name__}:run_streams", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        plan = (asker.target, asker.model, asker.vocab_size, asker.seed, count, length, is_pooling)
        write_child(self._child, msgspec.msgpack.encode(plan))
        self.first_ms = msgspec.msgpack.decode(read_child(self._child), type=float)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.communicate()

    def longest_gap(self, begin: float, end: float) -> Gap:
        """As of `_Streams`."""
        write_child(self._child, msgspec.msgpack.encode((begin, end)))
        return msgspec.msgpack.decode(read_child(self._child), type=Gap)


def run_streams(arguments: list[str]) -> int:
    """The process of the streams: a plan in, the time to their first tokens out, then as `_Streams.tell_gaps`."""
    del arguments
    plan = read_message(0)
    if plan is None:
        return 1
    target, model, vocab_size, seed, count, length, is_pooling = msgspec.msgpack.decode(plan)
    asker = _Asker(msgspec.convert(target, Target), model, vocab_size, seed + 1)
    streams = (_PooledStreams if is_pooling else _Streams)(asker, count, length)
    run_coroutine(streams.tell_gaps())
    return 0


# What is asked: one request of each feature, as a client would send it. The prompt is added later: it depends on the vocabulary.

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Lima"]}}, "required": ["city"]},
    },
}
_MESSAGES = [{"role": "user", "content": "Say something short."}]


def _named(**fields: Any) -> list[Feature]:
    return [Feature(name, {name: value}) for name, value in fields.items()]


def _chat(name: str, **fields: Any) -> Feature:
    return Feature(name, {"messages": _MESSAGES, **fields}, CHATS, "none", needs_tokenizer=True)


def _structured(kind: str, value: Any) -> Feature:
    return Feature(kind, {"structured_outputs": {kind: value}}, needs_tokenizer=True)


def generating(vocab_size: int) -> list[Feature]:
    """One request of each feature of a model that generates; ids stay below the vocabulary's size."""
    ids = [token for token in (20, 21, 22, 40, 50) if token < vocab_size]
    return [
        Feature("greedy"),
        Feature("temperature", {"temperature": 0.8}),
        Feature("seed", {"temperature": 0.8, "seed": 7}),
        *(
            Feature(name, {"temperature": 0.8, name: value})
            for name, value in (("top_p", 0.9), ("top_k", 20), ("min_p", 0.05))
        ),
        Feature("top_p, large", {"temperature": 1.5, "top_p": 0.999}),
        Feature("top_k, top_p, min_p", {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.02}),
        *_named(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
        Feature("logit_bias", {"logit_bias": {str(ids[0]): 5, str(ids[1]): -5}}),
        *_named(allowed_token_ids=ids, min_tokens=4, logprobs=1),
        Feature("logprobs, 5, sampled", {"logprobs": 5, "temperature": 0.8}),
        Feature("logprobs, 20, all", {"logprobs": 20, "temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5}),
        *_named(prompt_logprobs=1),
        Feature("prompt_logprobs, 5, long", {"prompt_logprobs": 5}, prompt="long"),
        Feature("echo, logprobs", {"echo": True, "logprobs": 1}),
        *_named(n=3),
        Feature("n, sampled", {"n": 3, "temperature": 0.8, "top_p": 0.9}),
        Feature("best_of", {"n": 1, "best_of": 2, "temperature": 0.8, "stream": False}),
        Feature("beam search", {"use_beam_search": True, "n": 2, "stream": False}),
        Feature("stop", {"stop": ["zzz", "\n\n\n"]}, needs_tokenizer=True),
        Feature("stop_token_ids", {"stop_token_ids": [ids[0]], "ignore_eos": False}),
        Feature("bad_words", {"bad_words": ["hello", "quick brown fox"]}, needs_tokenizer=True),
        Feature("text prompt", prompt="text", needs_tokenizer=True),
        Feature("long prompt", prompt="long"),
        Feature("cached prefix", prompt="repeated"),
        Feature("cached prefix, again", prompt="repeated"),
        _structured("json", _PERSON),
        _structured("regex", r"[a-c]{3,5}\d{2}"),
        _structured("choice", ["yes", "no", "perhaps"]),
        _structured("grammar", 'root ::= "a" | "b" root'),
        _structured("json_object", True),
        Feature(
            "json, sampled",
            {"structured_outputs": {"json": _PERSON}, "temperature": 0.8, "top_p": 0.9, "logprobs": 2},
            needs_tokenizer=True,
        ),
        _chat("chat"),
        _chat("chat, logprobs", logprobs=True, top_logprobs=3),
        _chat(
            "chat, json_schema",
            response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": _PERSON}},
        ),
        _chat("chat, tools", tools=[_WEATHER], tool_choice="auto"),
        _chat("chat, required tool", tools=[_WEATHER], tool_choice="required"),
    ]


def pooling() -> list[Feature]:
    """One request of each route and task of pooling models; a model refuses what it cannot do."""
    pair = {"text_1": "one", "text_2": ["two", "three"]}
    tasks = ("embed", "token_embed", "classify", "token_classify")
    routes = [Feature(task, {"task": task}, "/pooling") for task in tasks]
    routes += [Feature("embeddings", path="/v1/embeddings"), Feature("classes", path="/classify")]
    return [
        *routes,
        *(dataclasses.replace(feature, name=f"{feature.name}, long", prompt="long") for feature in routes),
        Feature("score", pair, "/score", "none", needs_tokenizer=True),
        Feature("rerank", {"query": "one", "documents": ["two", "three"]}, "/rerank", "none", needs_tokenizer=True),
    ]
