"""A training run of a small part: on one core, by the time that the core worked, in as many pieces as one likes; or on a GPU."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from .train import learning_rate

BatchT = TypeVar("BatchT")


def run_arguments(parser: argparse.ArgumentParser, minutes: float, out: Path) -> argparse.ArgumentParser:
    """The arguments that each such run has."""
    parser.add_argument("--out", type=Path, default=out, help="the checkpoint's folder")
    parser.add_argument("--minutes", type=float, default=minutes, help="of the core's time, in all pieces")
    parser.add_argument("--seconds", type=float, default=1e9, help="until this piece ends, by the clock")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="where a piece leaves off, and the next one goes on"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=0, help="processes that prepare batches (0: none)")
    return parser


def ahead(make: Callable[[int], BatchT], first: int, workers: int) -> Iterator[BatchT]:
    """Batches without end, by the numbers of steps: made when they are asked for, or before that by worker processes."""
    if not workers:
        while True:
            yield make(first)
            first += 1
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        waiting = deque(pool.apply_async(make, (first + number,)) for number in range(4 * workers))
        while True:
            first += 1
            waiting.append(pool.apply_async(make, (first + 4 * workers - 1,)))
            yield waiting.popleft().get()


class PartRun:
    """Steps of AdamW over the parameters of `model` that learn.

    Args:
        peak: the learning rate; it rises, stays and falls with the share of the time that has passed.
    """

    def __init__(self, model: nn.Module, arguments: argparse.Namespace, peak: float) -> None:
        self.model, self.arguments, self.peak = model, arguments, peak
        self.clock = time.process_time if arguments.device == "cpu" else time.monotonic
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, weight_decay=0.02, betas=(0.9, 0.95))
        self.step, self.seconds = 0, 0.0
        if arguments.checkpoint.exists():
            kept = torch.load(arguments.checkpoint, map_location=arguments.device)
            model.load_state_dict(kept["model"], strict=False)
            self.optimizer.load_state_dict(kept["optimizer"])
            self.step, self.seconds = kept["step"], kept["seconds"]
        print(f"{sum(each.numel() for each in self.parameters):,} parameters, {self.seconds:.0f} s so far", flush=True)

    @property
    def progress(self) -> float:
        """The share of the run that has passed."""
        return self.seconds / (60 * self.arguments.minutes)

    def steps(self) -> Iterator[int]:
        """The numbers of the steps, until the time of this piece or of the run is over."""
        ends, started, before = time.monotonic() + self.arguments.seconds, self.clock(), self.seconds
        while self.progress < 1.0 and time.monotonic() < ends:
            yield self.step
            self.seconds = before + self.clock() - started
        learnt = {name for name, each in self.model.named_parameters() if each.requires_grad}
        state = {name: value for name, value in self.model.state_dict().items() if name in learnt}
        kept = {"model": state, "optimizer": self.optimizer.state_dict(), "step": self.step, "seconds": self.seconds}
        torch.save(kept, self.arguments.checkpoint)

    def learn(self, loss: Tensor, told: str) -> None:
        """One step against a loss; `told` is printed at times."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.progress, self.peak) + 1e-5
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step % 50 == 0:
            print(f"step {self.step}, {self.seconds:.0f} s: loss {float(loss.detach()):.4f}, {told}", flush=True)
