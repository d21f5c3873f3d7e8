"""New weights under a running engine on GPUs: a folder, shared memory, a broadcast through NCCL, sleep and wake.

`python tools/gpu/weight_updates.py FOLDER_WITH_A_CONFIG`: two random checkpoints of that shape are written; the tokens of an
engine that got the second one's weights must be those of an engine that was started with them. The broadcast needs a second GPU
for the trainer. Prints a table, writes JSON under $OUT.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.distributed.weight_transfer import TrainerGroup, shared_weights

PROMPTS = [{"prompt_token_ids": [(7 * i + 13 * j) % 5000 for j in range(20 + 9 * i)]} for i in range(16)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {
    "max_model_len": 2048, "skip_tokenizer_init": True, "deterministic": True, "gpu_memory_utilization": 0.3,
}  # fmt: skip


def write_checkpoint(source: Path, folder: Path, seed: int) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(source)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def tokens_of(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def used_gib() -> float:
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) / 2**30


def broadcast(llm: LLM, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """The trainer on the last GPU sends all tensors; seconds of each part."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    group = TrainerGroup(1, device)
    there = {name: tensor.to(device) for name, tensor in tensors.items()}

    def beside(trainer: Callable[[], Any], engine: Callable[[], Any]) -> float:
        thread = threading.Thread(target=trainer)
        begin = time.perf_counter()
        thread.start()
        engine()
        thread.join()
        return time.perf_counter() - begin

    joined = beside(group.connect, lambda: llm.init_weight_transfer_engine({"init_info": group.init_info}))
    llm.start_weight_update()
    info = {"update_info": group.update_info(there)}
    sent = beside(lambda: group.send(there), lambda: llm.update_weights(info))
    ended = timed(lambda: llm.finish_weight_update("broadcast"))
    llm.shutdown_weight_transfer_engine()
    group.close()
    return {"join": joined, "send": sent, "finish": ended}


def check(rows: list[dict[str, Any]], ranks: int, old: Path, new: Path, wanted: dict[str, list[list[int]]]) -> None:
    """Every way from the old weights to the new ones, on this many ranks."""

    def note(name: str, seconds: float, llm: LLM, to: str, **more: Any) -> None:
        row = {
            "ranks": ranks,
            "what": name,
            "seconds": round(seconds, 3),
            "equal": tokens_of(llm) == wanted[to],
            **more,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)

    with LLM(str(old), recovery=True, tensor_parallel_size=ranks, **SETTINGS) as llm:
        note("start", 0.0, llm, "old")
        note("reload from a folder", timed(lambda: llm.reload_weights(str(new))), llm, "new")
        tensors = tensors_of(old)

        def share() -> None:
            llm.start_weight_update()
            with shared_weights(tensors) as info:
                llm.update_weights({"update_info": info})
            llm.finish_weight_update("shared")

        note("shared memory", timed(share), llm, "old")
        if ranks == 1 and torch.cuda.device_count() > 1:
            seconds = broadcast(llm, tensors_of(new))
            note("NCCL broadcast", sum(seconds.values()), llm, "new", parts=seconds)
        llm.reload_weights(str(old))
        awake = used_gib()
        for level in (1, 2):
            asleep_s = timed(lambda level=level: llm.sleep(level))
            asleep = used_gib()
            awake_s = timed(llm.wake_up)
            note(f"sleep {level} and wake", awake_s, llm, "old", sleep_s=asleep_s, awake_gib=awake, asleep_gib=asleep)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        old, new = (write_checkpoint(args.model, Path(place, name), seed) for seed, name in enumerate(("old", "new")))
        torch.cuda.empty_cache()
        for ranks in (1, 2)[: torch.cuda.device_count()]:
            wanted = {}
            for name, folder in (("old", old), ("new", new)):
                with LLM(str(folder), recovery=True, tensor_parallel_size=ranks, **SETTINGS) as llm:
                    wanted[name] = tokens_of(llm)
            assert wanted["old"] != wanted["new"]
            check(rows, ranks, old, new, wanted)
    Path(os.environ.get("OUT", "/tmp"), "weight-updates.json").write_text(json.dumps(rows, indent=1))
    if not all(row["equal"] for row in rows):
        raise SystemExit("tokens differ")


if __name__ == "__main__":
    main()
