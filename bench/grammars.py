"""`python -m bench grammars`: what it costs to keep answers in a form. No model runs: tokens are drawn at random from the masks.

For each form: the time to compile it, and to take in one row's token and make its mask (mean, median, worst). Then, for steps of
many rows, how long the engine's own thread works for all their masks, how long all threads work, and how long it takes until the
masks are made; a device's step hides them if the first and the last are shorter than it is. All but the first and the last are
CPU times: the same on a busy machine. Random text is the dear case, in which rows hardly meet in the same state; records are
followed through ordinary text, too.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.benchmarks.common import machine
from quire.config import StructuredOutputsConfig
from quire.engine.arg_parser import flag
from quire.errors import RequestError
from quire.sampling_params import StructuredOutputsParams
from quire.structured_output.grammars import Grammars, RowGrammar
from quire.structured_output.vocabulary import Vocabulary, read_vocabulary
from quire.tokenizers.loader import get_tokenizer

IntArray = npt.NDArray[np.int32]


def records(name_length: int | None, tag_length: int | None) -> dict[str, Any]:
    """A list of records that does not end early; strings have at most these many characters."""

    def text(most: int | None) -> dict[str, Any]:
        return {"type": "string"} if most is None else {"type": "string", "maxLength": most}

    properties = {
        "name": text(name_length),
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "enum": ["Oslo", "Lima", "Kyoto", "Accra"]},
        "tags": {"type": "array", "maxItems": 3, "items": text(tag_length)},
        "active": {"type": "boolean"},
    }
    item = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "array", "minItems": 500, "items": item}


FORMS: dict[str, dict[str, Any]] = {
    "records": {"json": records(None, None)},
    "records, maxLength 24 and 12": {"json": records(24, 12)},
    "records, maxLength 200 and 100": {"json": records(200, 100)},
    "any object": {"json_object": True},
    "a choice of 200": {"choice": [f"answer number {number}" for number in range(200)]},
    "a date and words": {"regex": r"\d{4}-\d{2}-\d{2}( [a-z]{1,12}){40,60}"},
    "a date-time and an address": {
        "json": {
            "type": "object",
            "properties": {
                "at": {"type": "string", "format": "date-time"},
                "mail": {"type": "string", "format": "email"},
            },
            "required": ["at", "mail"],
        }
    },
}
_WORDS = ("alpha", "house", "river", "the", "of", "stone", "green", "music", "seven", "cloud")


def write_records(rng: random.Random) -> str:
    """The beginning of an answer to the first three forms, as a model that has learnt to write it would."""
    items = [
        {
            "name": " ".join(rng.choices(_WORDS, k=3)),
            "age": rng.randrange(121),
            "city": rng.choice(["Oslo", "Lima", "Kyoto", "Accra"]),
            "tags": rng.choices(_WORDS, k=rng.randrange(4)),
            "active": rng.random() < 0.5,
        }
        for _ in range(10)
    ]
    return json.dumps(items)[:-1]


ENGINES = ("guidance", "xgrammar")
"""Names of `structured_outputs_config.backend`."""


class Walk:
    """Rows that walk through one form at random, all by one step at a time."""

    def __init__(
        self,
        grammars: Grammars,
        form: StructuredOutputsParams,
        eos: Sequence[int],
        load: Callable[[], Vocabulary],
        rows: int,
        seed: int,
    ) -> None:
        self._grammars, self._form, self._eos, self._load = grammars, form, eos, load
        self._rng = np.random.default_rng(seed)
        self.vocab_size = len(load().tokens)
        self.masks_NW: IntArray = np.zeros((rows, -(-self.vocab_size // 32)), dtype=np.int32)
        self._lines: list[int] = []
        self.rows = [self._start() for _ in range(rows)]

    def _start(self) -> tuple[RowGrammar, list[int]]:
        return self._grammars.start(self._form, self._eos, self._load), []

    def choose(self) -> None:
        """Append one allowed token to each row; a row that ends begins anew."""
        for index, (_, output) in enumerate(self.rows):
            bits = np.unpackbits(
                self.masks_NW[self._lines[index]].view(np.uint8), count=self.vocab_size, bitorder="little"
            )
            token_id = int(self._rng.choice(np.flatnonzero(bits)))
            if token_id in self._eos:
                self.rows[index] = self._start()
            else:
                output.append(token_id)

    def follow(self, texts: Sequence[Sequence[int]]) -> None:
        """Append to each row the next token of its text."""
        for (_, output), text in zip(self.rows, texts, strict=True):
            output.append(text[len(output)])

    def step(self) -> tuple[float, float, float]:
        """Make all masks: CPU seconds of the caller's thread and of all threads, and seconds until the masks are made."""
        clocks = (time.thread_time, time.process_time, time.perf_counter)
        began = [clock() for clock in clocks]
        filling = self._grammars.begin_fill(self.rows, self.masks_NW, alone=frozenset())
        errors = filling.finish()
        ended = [clock() for clock in clocks]
        if errors:
            raise RuntimeError(f"a row could not go on: {errors}")
        self._lines = filling.line_N
        own, whole, made = (end - begin for begin, end in zip(began, ended, strict=True))
        return own, whole, made


def measure(
    form: dict[str, Any],
    load: Callable[[], Vocabulary],
    eos: list[int],
    engine: str,
    batches: Sequence[int],
    steps: int,
) -> dict[str, Any]:
    """One form's figures, in milliseconds and microseconds."""
    grammars, params = Grammars(StructuredOutputsConfig(backend=engine)), StructuredOutputsParams(**form)
    grammars.check(StructuredOutputsParams(choice=["warm"]), eos, load)  # the engine reads the vocabulary once
    began = time.perf_counter()
    grammars.check(params, eos, load)
    compiled = time.perf_counter()
    grammars.check(params, eos, load)
    figures: dict[str, Any] = {
        "compile_ms": (compiled - began) * 1e3,
        "again_ms": (time.perf_counter() - compiled) * 1e3,
    }
    walk = Walk(grammars, params, eos, load, 1, 0)
    singles = []
    for _ in range(steps * 8):
        singles.append(walk.step()[1] * 1e6)
        walk.choose()
    singles.sort()
    figures["mask_us"] = {
        "mean": statistics.fmean(singles),
        "median": singles[len(singles) // 2],
        "p99": singles[len(singles) * 99 // 100],
        "worst": singles[-1],
    }
    for batch in batches:
        walk = Walk(grammars, params, eos, load, batch, 1)
        times = []
        for _ in range(steps):
            times.append(walk.step())
            walk.choose()
        _add_times(figures, f"{batch}", times)
        if "json" not in form or form["json"].get("type") != "array":
            continue
        for again in ("first", "again"):  # the second time no text is new, but every row is
            rng = random.Random(batch)
            texts = [load().encode(write_records(rng)) for _ in range(batch)]
            walk, times = Walk(grammars, params, eos, load, batch, 1), []
            for _ in range(min(map(len, texts))):
                times.append(walk.step())
                walk.follow(texts)
            _add_times(figures, f"{again}_{batch}", times)
    return figures


def _add_times(figures: dict[str, Any], label: str, times: Sequence[tuple[float, float, float]]) -> None:
    for name, column in zip(("own", "all", "made"), zip(*times, strict=True), strict=True):
        ordered = sorted(value * 1e3 for value in column)
        figures[f"{name}_{label}_ms"] = {"median": ordered[len(ordered) // 2], "p90": ordered[len(ordered) * 9 // 10]}


def run(path: str, engines: Sequence[str], batches: Sequence[int], steps: int, vocab_size: int) -> dict[str, Any]:
    tokenizer = get_tokenizer(path)
    vocabulary = read_vocabulary(tokenizer, vocab_size or tokenizer.max_token_id + 1)
    eos = [tokenizer.eos_token_id or 0]
    rows: list[dict[str, Any]] = []
    for name, form in FORMS.items():
        for engine in engines:
            row: dict[str, Any] = {"form": name, "backend": engine}
            try:
                row |= measure(form, lambda: vocabulary, eos, engine, batches, steps)
            except RequestError as error:
                row["refused"] = str(error)
            rows.append(row)
            _print(row, batches)
    return {
        "vocabulary": len(vocabulary.tokens),
        "cores": os.cpu_count(),
        "machine": machine(),
        "steps": steps,
        "rows": rows,
    }


def _print(row: dict[str, Any], batches: Sequence[int]) -> None:
    if "refused" in row:
        print(f"{row['form']}, {row['backend']}: {row['refused'][:90]}", flush=True)
        return
    mask = row["mask_us"]
    parts = [f"compiled {row['compile_ms']:.1f} ms", f"mask {mask['mean']:.0f} µs (worst {mask['worst']:.0f})"]
    for batch in batches:
        own, whole, made = (row[f"{name}_{batch}_ms"]["median"] for name in ("own", "all", "made"))
        parts.append(f"{batch} rows: engine's thread {own:.2f} ms, all threads {whole:.2f} ms, made in {made:.2f} ms")
        if f"own_again_{batch}_ms" in row:
            own, whole = (row[f"{name}_again_{batch}_ms"]["median"] for name in ("own", "all"))
            parts.append(f"{batch} rows of ordinary text: {own:.3f} ms, all threads {whole:.3f} ms")
    print(f"{row['form']}, {row['backend']}: {'; '.join(parts)}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tokenizer", help="a folder with a tokenizer")
    flag(parser, "--vocab-size", 0, "logits of the model (the tokenizer's size)")
    parser.add_argument("--backends", default="guidance", help=f"comma-separated: {', '.join(ENGINES)} (guidance)")
    flag(parser, "--batches", "64,256", "rows of a step, comma-separated")
    flag(parser, "--steps", 64, "steps measured a form")


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    batches = [int(part) for part in args.batches.split(",")]
    return run(args.tokenizer, args.backends.split(","), batches, args.steps, args.vocab_size)
