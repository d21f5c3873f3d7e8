"""Run in a process of its own, with the example installed: prints what each process of an engine has of patches, as JSON."""

import json
import sys

import quire.patch
from quire import LLM, SamplingParams


def main(path: str, ranks: str, backend: str) -> None:
    settings = {"tensor_parallel_size": int(ranks), "distributed_executor_backend": backend or None}
    llm = LLM(path, device="cpu", max_model_len=64, kv_cache_memory_bytes=1 << 22, **settings)
    llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    steps = llm.collective_rpc("example_step_count")
    sizes = llm.llm_engine.config.scheduler.max_num_batched_tokens
    from quire.worker.worker import Worker

    own = hasattr(Worker, "example_step_count")
    print("\n" + json.dumps({"steps": steps, "size": sizes, "own": own, "here": quire.patch.describe()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
