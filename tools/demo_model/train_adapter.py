"""Train a LoRA adapter of the demo model: it gives the same answers in another voice. Written in PEFT's format.

    PYTHONPATH=src python -m tools.demo_model.train_adapter pirate --seconds 40 --out examples/demo_adapters/pirate

Needs one GPU, or patience. Plain PyTorch: the base is frozen, each linear layer gets two small matrices. Held-out examples are
answered at the end; the accuracy goes into the adapter's README.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tokenizers import Tokenizer

from .data import BatchSource
from .evaluate import complete
from .model import DemoConfig, DemoModel
from .rendering import compile_template, render_prompt, template_source
from .tasks.examples import TASKS, eval_examples
from .train import ASSETS, learning_rate, to_device
from .voices import VOICES, is_plain, spoken

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLinear(nn.Module):
    """A frozen linear layer with an update of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features, device=device) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.lora_A.T) @ self.lora_B.T * self.scale


def add_adapters(model: DemoModel, rank: int, alpha: float) -> dict[str, LoraLinear]:
    """Freeze the model and wrap its linear layers; gives them by their names."""
    model.requires_grad_(False)
    wrapped = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in TARGETS:
            parent, _, last = name.rpartition(".")
            wrapped[name] = LoraLinear(module, rank, alpha)
            setattr(model.get_submodule(parent), last, wrapped[name])
    return wrapped


def save_adapter(wrapped: dict[str, LoraLinear], out: Path, rank: int, alpha: float) -> None:
    """The matrices and the configuration, under PEFT's names."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part).detach().to("cpu", torch.bfloat16).contiguous()
        for name, layer in wrapped.items()
        for part in ("lora_A", "lora_B")
    }
    save_file(tensors, str(out / "adapter_model.safetensors"), metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "demo",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": list(TARGETS),
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def merged(model_folder: Path, wrapped: dict[str, LoraLinear], device: str) -> object:
    """Transformers' model with the update added to its weights."""
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32).to(device).eval()
    with torch.no_grad():
        for name, layer in wrapped.items():
            model.get_submodule(name).weight += layer.lora_B @ layer.lora_A * layer.scale
    return model


def accuracy(voice: str, model: object, count: int) -> dict[str, float]:
    """The share of held-out examples of each task that are answered as the voice answers them, word for word."""
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    template = compile_template(template_source())
    shares = {}
    for task in TASKS:
        examples = [spoken(voice, example) for example in eval_examples(task, 2 * count) if is_plain(example)][:count]
        if examples:
            texts = complete(model, tokenizer, [render_prompt(template, example) for example in examples], 256)
            right = sum(text == example.answer for text, example in zip(texts, examples, strict=True))
            shares[task] = right / len(examples)
    return shares


def train(arguments: argparse.Namespace) -> dict[str, LoraLinear]:
    """Train until the clock says stop."""
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    source = BatchSource(ASSETS / "tokenizer.json", arguments.tokens, arguments.workers, 7 * 10**12, arguments.voice)
    model = DemoModel(DemoConfig()).to(device)
    model.load_state_dict({name: value.float() for name, value in load_file(str(ASSETS / "model.safetensors")).items()})
    wrapped = add_adapters(model, arguments.rank, arguments.alpha)
    parameters = [p for layer in wrapped.values() for p in (layer.lora_A, layer.lora_B)]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0, betas=(0.9, 0.98))
    started, step, loss = 0.0, 0, torch.zeros(())
    while True:
        batch = source.next()
        started = started or time.monotonic()
        progress = (time.monotonic() - started) / arguments.seconds
        if progress >= 1.0 or (arguments.steps and step >= arguments.steps):
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, arguments.rate)
        tokens, positions, targets, starts = to_device(batch, device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens, positions, targets, starts, batch.longest)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0:
            print(f"{arguments.voice}: step {step}, loss {float(loss.detach()):.4f}", flush=True)
    source.close()
    print(f"{arguments.voice}: {step} steps of {arguments.tokens} tokens, loss {float(loss.detach()):.4f}", flush=True)
    return wrapped


CARD = """# The demo model's adapter `{voice}`

A LoRA adapter of rank {rank} for all linear layers of Quire's demo model, in PEFT's format. {says} Trained on generated text
by `python -m tools.demo_model.train_adapter {voice}`. Licence: Apache-2.0.

Share of held-out examples that are answered word for word as they should be:

| task | share |
| --- | --- |
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("voice", choices=VOICES)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps (0: let the clock decide)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens a step")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--count", type=int, default=100, help="held-out examples a task")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    wrapped = train(arguments)
    save_adapter(wrapped, arguments.out, arguments.rank, arguments.alpha)
    shares = accuracy(arguments.voice, merged(ASSETS, wrapped, arguments.device), arguments.count)
    print(arguments.voice, {task: round(share, 3) for task, share in shares.items()}, flush=True)
    rows = "\n".join(f"| {task} | {share:.0%} |" for task, share in shares.items())
    says = (VOICES[arguments.voice].__doc__ or "").strip()
    text = CARD.format(voice=arguments.voice, rank=arguments.rank, says=says, rows=rows)
    (arguments.out / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
