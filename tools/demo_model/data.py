"""Training batches without end: worker processes generate conversations, tokenize them and pack them into streams.

No example is seen twice. Short and long documents travel in separate batches, so that attention is sized for them.
Knows no model.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Full

import numpy as np

from tokenizers import Tokenizer

from .rendering import compile_template, render_document, template_source
from .tasks.examples import training_example
from .voices import spoken

SHORT, LONG = 512, 3072
"""Token limits of a short document and of any document; longer ones are left out."""


@dataclass(frozen=True)
class Batch:
    """One packed stream of T tokens.

    Attributes:
        tokens, positions: (T,) int16; a position counts from its document's start.
        targets: (T,) int16, the next token where the assistant speaks, -100 elsewhere.
        starts: (documents + 1,) int32 offsets, padded with T to a fixed length.
        longest: the limit of a document's length in this batch.
    """

    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    starts: np.ndarray
    longest: int


def assistant_targets(ids: list[int], opening: list[int], end: int) -> list[int]:
    """For each token the next one where the assistant wrote it (its end mark included), -100 elsewhere."""
    targets = [-100] * len(ids)
    place, width = 0, len(opening)
    while True:
        try:
            place = ids.index(opening[0], place)
        except ValueError:
            return targets
        if ids[place : place + width] != opening:
            place += 1
            continue
        place += width
        stop = ids.index(end, place)
        targets[place - 1 : stop] = ids[place : stop + 1]
        place = stop


class Packer:
    """Fills one stream after another with whole documents."""

    def __init__(self, size: int, longest: int) -> None:
        self.size, self.longest = size, longest
        self.max_documents = size // (48 if longest == SHORT else 256)
        self._clear()

    def _clear(self) -> None:
        self.tokens = np.zeros(self.size, np.int16)
        self.positions = np.zeros(self.size, np.int16)
        self.targets = np.full(self.size, -100, np.int16)
        self.starts = [0]

    def add(self, ids: list[int], targets: list[int]) -> Batch | None:
        """Put one document into the stream; gives the finished stream when it does not fit any more."""
        finished = None
        if self.starts[-1] + len(ids) > self.size or len(self.starts) > self.max_documents - self.size // self.longest:
            finished = self._finish()
        start = self.starts[-1]
        end = start + len(ids)
        self.tokens[start:end] = ids
        self.targets[start:end] = targets
        self.positions[start:end] = np.arange(len(ids))
        self.starts.append(end)
        return finished

    def _finish(self) -> Batch:
        while self.starts[-1] < self.size:
            start = self.starts[-1]
            end = min(start + self.longest, self.size)
            self.positions[start:end] = np.arange(end - start)
            self.starts.append(end)
        starts = np.full(self.max_documents + 2, self.size, np.int32)
        starts[: len(self.starts)] = self.starts
        batch = Batch(self.tokens, self.positions, self.targets, starts, self.longest)
        self._clear()
        return batch


def batches(tokenizer_file: Path, size: int, first_seed: int, stride: int, voice: str = "") -> Iterator[Batch]:
    """Batches of the documents with seeds `first_seed`, `first_seed + stride`, and so on; replies in a voice, if one is named."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    template = compile_template(template_source())
    opening = tokenizer.encode("<|im_start|>assistant\n").ids
    end = tokenizer.token_to_id("<|im_end|>")
    short, long = Packer(size, SHORT), Packer(size, LONG)
    seed = first_seed
    while True:
        documents = []
        for _ in range(256):
            example = training_example(seed)
            documents.append(render_document(template, spoken(voice, example) if voice else example))
            seed += stride
        for encoding in tokenizer.encode_batch(documents, add_special_tokens=False):
            ids = encoding.ids
            if len(ids) <= LONG:
                packer = short if len(ids) <= SHORT else long
                batch = packer.add(ids, assistant_targets(ids, opening, end))
                if batch is not None:
                    yield batch


def _work(queue: multiprocessing.Queue, stop: multiprocessing.Event, *arguments: object) -> None:
    for batch in batches(*arguments):  # type: ignore[arg-type]
        while not stop.is_set():
            try:
                queue.put(batch, timeout=1.0)
                break
            except Full:
                continue
        if stop.is_set():
            queue.cancel_join_thread()
            return


class BatchSource:
    """Worker processes that keep a queue of batches filled; close it when done."""

    def __init__(self, tokenizer_file: Path, size: int, workers: int, seed: int, voice: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self._queue = context.Queue(maxsize=4 * workers)
        self._stop = context.Event()
        self._processes = [
            context.Process(
                target=_work,
                args=(self._queue, self._stop, tokenizer_file, size, seed + index, workers, voice),
                daemon=True,
            )
            for index in range(workers)
        ]
        for process in self._processes:
            process.start()

    def next(self) -> Batch:
        """The next batch; waits for it."""
        return self._queue.get(timeout=120)

    def waiting(self) -> int:
        """How many batches are ready (about)."""
        return self._queue.qsize()

    def close(self) -> None:
        """Stop the workers."""
        self._stop.set()
        for process in self._processes:
            process.join(timeout=0.2)
            if process.is_alive():
                process.terminate()
