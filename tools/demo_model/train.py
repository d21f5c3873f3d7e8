"""Train the demo model from nothing on generated conversations, for a given number of minutes.

    PYTHONPATH=src python -m tools.demo_model.train --minutes 8 --out src/quire/assets/demo

Needs `tokenizer.json` (see `tokenizer.py`), one GPU, and a dozen CPU cores to generate text. Plain PyTorch: bfloat16
autocast over float32 weights, one packed stream a step, loss on what the assistant says. The learning rate follows the
clock: a short warm-up, a plateau, then a straight descent to zero. Writes the checkpoint in bfloat16, and now and then
before the end.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .data import LONG, Batch, BatchSource
from .model import DemoConfig, DemoModel
from .optimizer import MuonAdamW

ASSETS = Path(__file__).resolve().parents[2] / "src" / "quire" / "assets" / "demo"
DRAFT = DemoConfig(hidden_size=128, intermediate_size=384, num_layers=2, num_heads=4, num_kv_heads=2)
"""A draft model: 0.7 million parameters, the same tokenizer."""
GENERATION_CONFIG = {"do_sample": True, "temperature": 0.2, "eos_token_id": [2, 0], "pad_token_id": 0}


def learning_rate(progress: float, peak: float, warmup: float = 0.02, descent: float = 0.45) -> float:
    """The rate at `progress` (0 to 1) of the run."""
    return peak * min(1.0, progress / warmup, max(0.0, (1.0 - progress) / descent))


def to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arrays of `batch` as tensors, copied without waiting where the device allows it."""
    arrays = (batch.tokens, batch.positions, batch.targets, batch.starts)
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cuda":
        tensors = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    tokens, positions, targets, starts = tensors
    return tokens.long(), positions.long(), targets.long(), starts


def save_checkpoint(model: DemoModel, out: Path) -> None:
    """The weights in bfloat16 under Hugging Face's names, and the two configuration files."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    partial = out / "model.safetensors.partial"
    save_file(weights, str(partial), metadata={"format": "pt"})
    partial.replace(out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(model.config.to_hf(), indent=2) + "\n", encoding="utf-8")
    (out / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n", encoding="utf-8")


def train(arguments: argparse.Namespace) -> None:
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    source = BatchSource(arguments.tokenizer, arguments.tokens, arguments.workers, arguments.seed * 10**12)
    config = DemoConfig()
    if arguments.draft:
        config = DRAFT
    if arguments.layers:
        config = replace(config, num_layers=arguments.layers)
    model = DemoModel(config).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    if arguments.start_from:
        model.load_state_dict(load_file(str(arguments.start_from)))
    optimizer = MuonAdamW(model, weight_decay=arguments.weight_decay)
    forward = torch.compile(model) if arguments.compile else model

    started, step, trained = time.monotonic(), 0, 0
    running, saved, logged = torch.zeros((), device=device), time.monotonic(), time.monotonic()
    warm = False
    counts = {"short": 0, "long": 0}
    while True:
        progress = (time.monotonic() - started) / (60 * arguments.minutes)
        if progress >= 1.0 or (arguments.steps and step >= arguments.steps):
            break
        batch = source.next()
        counts["long" if batch.longest == LONG else "short"] += 1
        tokens, positions, targets, starts = to_device(batch, device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(tokens, positions, targets, starts, batch.longest)
        loss.backward()
        optimizer.step(learning_rate(progress, arguments.rate))
        running += loss.detach()
        step, trained = step + 1, trained + tokens.numel()
        if not warm and min(counts.values()) > 1:
            warm = True
            print(f"both shapes compiled after {time.monotonic() - started:.0f} s", flush=True)
        if step % arguments.log_every == 0:
            value, now = float(running) / arguments.log_every, time.monotonic()
            rate = arguments.log_every * arguments.tokens / (now - logged)
            print(
                f"step {step} {now - started:.0f} s loss {value:.4f} {rate / 1e6:.2f} Mtok/s queue {source.waiting()} "
                f"{trained / 1e6:.0f} Mtok {counts}",
                flush=True,
            )
            running.zero_()
            logged = now
            if now - saved > 120:
                save_checkpoint(model, arguments.out)
                saved = now
    save_checkpoint(model, arguments.out)
    source.close()
    print(f"{step} steps, {trained / 1e6:.0f} million tokens, {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps (0: let the clock decide)")
    parser.add_argument("--out", type=Path, default=ASSETS)
    parser.add_argument("--tokenizer", type=Path, default=ASSETS / "tokenizer.json")
    parser.add_argument("--tokens", type=int, default=131072, help="tokens a step")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--draft", action="store_true", help="train the small model that drafts for the demo model")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers, for a trial run")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--start-from", type=Path, help="go on from these weights (model.safetensors)")
    parser.add_argument("--seed", type=int, default=1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
