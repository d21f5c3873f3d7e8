"""Processes that torchrun has started, each with the whole engine: the tokens of one process in each of them."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.engine.builders import make_config
from tests.oracles.tiny_models import make_tiny_model

from quire.config import ParallelConfig
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError
from quire.executor.launched import place_of_rank

PROGRAM = """
import json, os, sys
import torch.distributed as dist
from quire import LLM, SamplingParams

joins_first, folder, out = sys.argv[1] == "1", sys.argv[2], sys.argv[3]
if joins_first:
    dist.init_process_group("gloo")
more = json.loads(sys.argv[4]) | {"distributed_executor_backend": "external_launcher"} if "RANK" in os.environ else {}
prompts = [{"prompt_token_ids": [3 + (i * i + 7 * n) % 300 for i in range(5 + 9 * n)]} for n in range(5)]
with LLM(folder, dtype="float32", skip_tokenizer_init=True, max_model_len=128, max_num_batched_tokens=64, max_num_seqs=4,
         kv_cache_memory_bytes=8 << 20, **more) as llm:
    found = []
    for drawn in ({"temperature": 0.0}, {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.3}):
        params = SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False, **drawn)
        found += [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
with open(os.path.join(out, os.environ.get("RANK", "alone")), "w") as file:
    json.dump(found, file)
if joins_first:
    dist.barrier()  # the trainer's own group is still there
"""


def config_with(**parallel: Any) -> Any:
    return dataclasses.replace(make_config(), parallel=ParallelConfig(**parallel))


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, local: int | None = None) -> None:
    here = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank if local is None else local,
        "MASTER_ADDR": "h",
        "MASTER_PORT": 1,
    }
    for name, value in here.items():
        monkeypatch.setenv(name, str(value))


def test_a_process_takes_its_place_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 5, 8, local=1)
    parallel = place_of_rank(config_with(tensor_parallel_size=2)).parallel
    assert (parallel.rank, parallel.data_parallel_rank, parallel.device_number) == (1, 0, 1)
    launched(monkeypatch, 3, 4)
    parallel = place_of_rank(config_with(tensor_parallel_size=2)).parallel
    assert (parallel.rank, parallel.data_parallel_rank, parallel.device_number) == (1, 1, 3)
    launched(monkeypatch, 13, 16, local=5)  # the second host of two, with two copies on each
    parallel = place_of_rank(
        config_with(tensor_parallel_size=2, pipeline_parallel_size=2, copies_everywhere=4)
    ).parallel
    assert (parallel.stage, parallel.rank, parallel.copy_number, parallel.device_number) == (0, 1, 3, 5)


def test_a_process_knows_its_copy_as_programs_of_vllm_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 3, 4)
    copies = {"data_parallel_size": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    parallel = EngineArgs(**copies).create_engine_config().parallel_config
    assert (parallel.data_parallel_rank, parallel.data_parallel_size) == (1, 2)


def test_without_a_launcher_or_with_other_numbers_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"RANK.*start this program with torchrun"):
        place_of_rank(config_with(tensor_parallel_size=2))
    launched(monkeypatch, 0, 3)
    with pytest.raises(ConfigError, match="does not divide the launcher's 3 processes"):
        place_of_rank(config_with(tensor_parallel_size=2))
    launched(monkeypatch, 0, 6)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 times pipeline_parallel_size=2 does not divide"):
        place_of_rank(config_with(tensor_parallel_size=2, pipeline_parallel_size=2))
    launched(monkeypatch, 0, 4)
    with pytest.raises(ConfigError, match="data_parallel_size=3 times tensor_parallel_size=1 is not"):
        place_of_rank(config_with(copies_everywhere=3))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("joins_first", "sizes"),
    [(False, {"tensor": 2}), (True, {"tensor": 2}), (False, {"pipeline": 2}), (True, {"tensor": 2, "pipeline": 2})],
)
def test_each_process_of_torchrun_has_the_tokens_of_one(
    tmp_path: Path, joins_first: bool, sizes: dict[str, int]
) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path / "llama")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    settings = json.dumps({f"{name}_parallel_size": size for name, size in sizes.items()})
    words = [str(program), str(int(joins_first)), str(folder), str(tmp_path), settings]
    count = math.prod(sizes.values())
    subprocess.run([sys.executable, words[0], "0", *words[2:]], check=True, timeout=240)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--standalone"]
    subprocess.run([*run, *words], check=True, timeout=240)
    found = [json.loads((tmp_path / name).read_text()) for name in ("alone", *map(str, range(count)))]
    assert found == found[:1] * (count + 1)
