"""Adapters of random numbers for the matrices of a model, as PEFT would save them: for benchmarks and checks."""

import json
import os
from collections.abc import Collection

import torch

from quire.adapters import CONFIG
from quire.lora.peft_folder import PREFIX
from quire.lora.placement import Places


def write_random_adapter(
    places: Places, folder: str, rank: int, seed: int, targets: Collection[str], dtype: torch.dtype, scale: float
) -> int:
    """Write one into a folder, which is made; returns how many matrices it changes.

    Args:
        targets: last parts of names of matrices; none: every matrix of the layers.
        scale: of what it adds to a product, beside the product of a matrix that keeps lengths.
    """
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    found: set[str] = set()
    for name, segment in places.segments().items():
        last = name.rpartition(".")[2]
        if last not in targets if targets else not segment.module.name.startswith("layers.") or segment.module.plain:
            continue
        found.add(last)
        shapes = {"A": (rank, segment.module.columns), "B": (segment.rows, rank)}
        for which, (rows, columns) in shapes.items():
            numbers = torch.randn(rows, columns, generator=generator) * columns**-0.5 * (scale if which == "B" else 1.0)
            tensors[f"{PREFIX}{places.prefix}{name}.lora_{which}.weight"] = numbers.to(dtype)
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(found)}
    with open(os.path.join(folder, CONFIG), "w", encoding="utf-8") as file:
        json.dump(config, file)
    return len(tensors) // 2
