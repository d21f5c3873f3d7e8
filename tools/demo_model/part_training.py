"""A training run of a small part: on one core, by the time that the core worked, in as many pieces as one likes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from .optimizer import AdamW, MuonAdamW
from .train import learning_rate


def run_arguments(parser: argparse.ArgumentParser, minutes: float, out: Path) -> argparse.ArgumentParser:
    """The arguments that each such run has."""
    parser.add_argument("--out", type=Path, default=out, help="the checkpoint's folder")
    parser.add_argument("--minutes", type=float, default=minutes, help="of the core's time, in all pieces")
    parser.add_argument("--seconds", type=float, default=1e9, help="until this piece ends, by the clock")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="where a piece leaves off, and the next one goes on"
    )
    return parser


class PartRun:
    """Steps over the parameters of `model`.

    Args:
        optimizer: none means AdamW for all of them.
        peak: the learning rate; it rises, stays and falls with the share of the time that has passed.
    """

    def __init__(
        self, model: nn.Module, arguments: argparse.Namespace, peak: float, optimizer: MuonAdamW | None = None
    ) -> None:
        self.model, self.arguments, self.peak = model, arguments, peak
        self.optimizer = optimizer or AdamW(model.parameters(), weight_decay=0.02, betas=(0.9, 0.95))
        self.step, self.seconds = 0, 0.0
        if arguments.checkpoint.exists():
            kept = torch.load(arguments.checkpoint)
            model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self.step, self.seconds = kept["step"], kept["seconds"]
        print(
            f"{sum(each.numel() for each in model.parameters()):,} parameters, {self.seconds:.0f} s so far", flush=True
        )

    @property
    def progress(self) -> float:
        """The share of the run that has passed."""
        return self.seconds / (60 * self.arguments.minutes)

    def steps(self) -> Iterator[int]:
        """The numbers of the steps, until the time of this piece or of the run is over. What is learnt is kept each minute."""
        started, before, begun = time.process_time(), self.seconds, time.monotonic()
        saved = begun
        while self.progress < 1.0 and time.monotonic() < begun + self.arguments.seconds:
            yield self.step
            self.seconds = before + time.process_time() - started
            if time.monotonic() > saved + 60:
                self.keep()
                saved = time.monotonic()
        self.keep()

    def keep(self) -> None:
        """Writes the checkpoint, whole or not at all."""
        written = self.arguments.checkpoint.with_suffix(".part")
        kept = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(kept | {"step": self.step, "seconds": self.seconds}, written)
        written.replace(self.arguments.checkpoint)

    def learn(self, loss: Tensor, told: str) -> None:
        """One step against a loss; `told` is printed at times."""
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(learning_rate(self.progress, self.peak) + 1e-5)
        self.step += 1
        if self.step % 25 == 0:
            print(f"step {self.step}, {self.seconds:.0f} s: loss {float(loss.detach()):.4f}, {told}", flush=True)
