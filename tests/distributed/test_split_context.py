"""Decode context parallelism: ranks with the same KV head share the tokens of each context, and give one process's tokens."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.thread_ranks import ThreadRanks, on_ranks
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, SamplingParams
from quire.attention.context_parallel import SplitContext
from quire.attention.cpu import CpuBackend
from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.attention.paged import PagedBackend
from quire.attention.reference import ReferenceBackend
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.distributed.communicator import Communicator
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError
from quire.kernels import cpu, ops
from quire.layers.parallel import ParallelPlan
from quire.model_loader.loader import build_model
from quire.platforms.cpu import CpuPlatform

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, "kv_cache_memory_bytes": 8 << 20,
    "max_num_batched_tokens": 32, "disable_log_stats": True, "max_num_seqs": 4, "block_size": 8,
}  # fmt: skip
PROMPTS: Any = [{"prompt_token_ids": [3 + (i * i + 7 * (n % 3)) % 300 for i in range(1 + 21 * n)]} for n in range(6)]


def describe(size: int, past: list[int], counts: list[int], tables: torch.Tensor) -> AttentionMetadata:
    """A step in which each request computes so many tokens behind so many."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    positions = torch.cat([torch.arange(before, before + count) for before, count in zip(past, counts, strict=True)])
    rows = torch.arange(len(past)).repeat_interleave(torch.tensor(counts))
    slots = tables[rows, positions // size].long() * size + positions % size
    lens = torch.tensor([before + count for before, count in zip(past, counts, strict=True)]).int()
    most = (len(positions), len(past), max(counts), int(lens.max()))
    numbers = (torch.arange(len(past)).int(), tables, slots, positions.int(), torch.tensor(most))
    return AttentionMetadata(size, starts, lens, *numbers, *most)


@pytest.mark.parametrize("backend", [ReferenceBackend, CpuBackend])
@pytest.mark.parametrize(("size", "shared"), [(2, 2), (4, 2), (3, 3)])
def test_parts_of_contexts_give_the_attention_over_all_of_them(
    backend: type[PagedBackend], size: int, shared: int
) -> None:
    cpu.register()
    ops.select("cpu" if backend is CpuBackend else "reference")
    heads, head_dim, page = 2, 16, 4 * shared
    groups = size // shared
    torch.manual_seed(size)
    tables = torch.randperm(30)[:24].view(3, 8).int() + 1
    whole_cache = backend().allocate(spec_of(page, groups, head_dim), 32, torch.device("cpu"))
    barrier, sent = threading.Barrier(size), dict[int, Any]()
    ranks = [SplitContext(backend(), ThreadRanks(rank, size, barrier, sent), shared) for rank in range(size)]
    part = spec_of(page, 1, head_dim, shared)
    caches = [rank.allocate(part, 32, torch.device("cpu")) for rank in ranks]
    assert all(cache.numel() * shared * groups == whole_cache.numel() for cache in caches)
    past = [0, 0, 0]
    for counts in ([7, 1, 13], [1, 1, 1], [5, 2, 1], [1], [1, 11, 1], [2, 1, 9]):
        qkv = torch.randn(sum(counts), (heads * size + 2 * groups) * head_dim)
        step = describe(page, past[: len(counts)], counts, tables)
        expected = torch.empty(sum(counts), heads * size * head_dim)
        params = AttentionParams(heads * size, groups, head_dim, head_dim**-0.5, soft_cap=5.0)
        backend().attend(qkv.clone(), whole_cache, step, params, expected, None)
        given = [torch.empty(sum(counts), heads * head_dim) for _ in ranks]

        def attend(rank: int, qkv: Any = qkv, past: Any = past, counts: Any = counts, given: Any = given) -> None:
            q, k, v = qkv.split([heads * size * head_dim, groups * head_dim, groups * head_dim], 1)
            one = slice(rank // shared * head_dim, (rank // shared + 1) * head_dim)
            own = torch.cat((q.split(heads * head_dim, 1)[rank], k[:, one], v[:, one]), 1)
            mine = describe(page, past[: len(counts)], counts, tables)
            ranks[rank].begin_step(mine)
            few = AttentionParams(heads, 1, head_dim, head_dim**-0.5, soft_cap=5.0)
            ranks[rank].attend(own, caches[rank], mine, few, given[rank], None)

        threads = [threading.Thread(target=attend, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.testing.assert_close(torch.cat(given, 1), expected, rtol=1e-4, atol=1e-5)
        past = [before + count for before, count in zip(past, [*counts, 0, 0], strict=False)]


def spec_of(page: int, kv_heads: int, head_dim: int, shared: int = 1) -> KVCacheSpec:
    return KVCacheSpec(KVKind.FULL, page, 2 * kv_heads * head_dim * 4, kv_heads, head_dim, "float32", ranks=shared)


def logprobs(path: Path, plan: ParallelPlan, ranks: Communicator | None) -> torch.Tensor:
    """Of a prompt in chunks beside another request, and of tokens after it."""
    driver = ModelDriver(build_tiny(path, communicator=ranks, plan=plan, block_size=8 * plan.context))
    sequence, other = Sequence([3 + i * i % 300 for i in range(41)], row=2), Sequence([*range(5, 25)], row=1)
    pieces = [driver.step([(other, 20), (sequence, 13)])[1], driver.prefill(sequence, 13)]
    for token in (7, 9, 11):
        sequence.token_ids.append(token)
        pieces.append(driver.prefill(sequence, 1))
    return torch.cat(pieces)


@pytest.mark.parametrize(
    ("architecture", "size", "shared"),
    [
        ("Qwen3ForCausalLM", 2, 2),
        ("Qwen3ForCausalLM", 4, 2),
        ("DeepseekV3ForCausalLM", 2, 2),
        ("MiniCPM3ForCausalLM", 4, 2),
        ("Qwen3ForCausalLM", 3, 3),
        ("DeepseekV3ForCausalLM", 3, 3),
        ("Gemma3ForCausalLM", 2, 2),
        ("GptOssForCausalLM", 4, 2),
        ("Llama4ForCausalLM", 2, 2),
    ],
)
def test_a_model_over_ranks_that_share_contexts_gives_one_rank_s_logprobs(
    tmp_path: Path, architecture: str, size: int, shared: int
) -> None:
    ops.select("any")
    is_grouped = not architecture.startswith(("Deepseek", "MiniCPM3"))
    count = 6 if size == 3 else 4
    heads = {"num_attention_heads": count, "num_key_value_heads": size // shared if is_grouped else count}
    path = make_tiny_model(architecture, tmp_path, tokenizer=False, **heads)
    expected = logprobs(path, ParallelPlan(), None)

    def work(ranks: Communicator) -> torch.Tensor:
        return logprobs(path, ParallelPlan(size, ranks.rank, context=shared), ranks)

    for given in on_ranks(size, work):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


def answers(llm: LLM) -> list[Any]:
    drawn = SamplingParams(temperature=0.8, seed=4, max_tokens=20, ignore_eos=True, detokenize=False, logprobs=1)
    return [output.outputs[0] for output in llm.generate(PROMPTS, drawn, use_tqdm=False)]


def check_ranks(path: Path, kv_heads: float, size: int, shared: int, **settings: Any) -> None:
    with LLM(str(path), **SETTINGS) as alone:
        expected, cache = answers(alone), alone.llm_engine.config.cache
    sizes = {"tensor_parallel_size": size, "decode_context_parallel_size": shared}
    with LLM(str(path), **sizes, **settings, **SETTINGS) as llm:
        for given in (answers(llm), answers(llm)):  # the second time behind cached pages
            assert [list(one.token_ids) for one in given] == [list(one.token_ids) for one in expected]
            for one, other in zip(given, expected, strict=True):
                mine, theirs = (
                    [step[token].logprob for step, token in zip(each.logprobs, each.token_ids, strict=True)]
                    for each in (one, other)
                )
                assert mine == pytest.approx(theirs, abs=1e-4)
        own = llm.llm_engine.config.cache
        # A rank has a part of one head's keys; one process has all heads'.
        assert own.block_size == shared * cache.block_size
        assert own.num_gpu_blocks == pytest.approx(cache.num_gpu_blocks * kv_heads, rel=0.01)


@pytest.mark.exhaustive
def test_two_ranks_that_share_contexts_give_one_process_s_tokens(tmp_path: Path) -> None:
    path = make_tiny_model("LlamaForCausalLM", tmp_path, num_attention_heads=4, num_key_value_heads=1)
    check_ranks(path, 1, 2, 2)


@pytest.mark.exhaustive
def test_the_runner_of_a_gpu_shares_contexts_too(tmp_path: Path) -> None:
    path = make_tiny_model("LlamaForCausalLM", tmp_path, num_attention_heads=4, num_key_value_heads=1)
    check_ranks(path, 1, 2, 2, worker_cls="tests.executor.rank_workers:AsyncWorker")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kv_heads", "shared"), [(2, 2), (1, 2), (1, 4)])
def test_four_ranks_that_share_contexts_give_one_process_s_tokens(tmp_path: Path, kv_heads: int, shared: int) -> None:
    path = make_tiny_model("Qwen3ForCausalLM", tmp_path, num_attention_heads=4, num_key_value_heads=kv_heads)
    check_ranks(path, kv_heads, 4, shared)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_latents_give_one_process_s_tokens(tmp_path: Path, size: int) -> None:
    check_ranks(make_tiny_model("DeepseekV3ForCausalLM", tmp_path), 1, size, size)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("architecture", "kv_heads"), [("Qwen3ForCausalLM", 1), ("DeepseekV3ForCausalLM", 6)])
def test_a_number_of_ranks_that_divides_no_token_s_bytes_works(
    tmp_path: Path, architecture: str, kv_heads: int
) -> None:
    path = make_tiny_model(architecture, tmp_path, num_attention_heads=6, num_key_value_heads=kv_heads)
    check_ranks(path, 1, 3, 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "GptOssForCausalLM"])
def test_layers_with_windows_keep_them_whole(tmp_path: Path, architecture: str) -> None:
    path = make_tiny_model(architecture, tmp_path, num_attention_heads=4, num_key_value_heads=1)
    check_ranks(path, 0.5, 2, 2)  # of pages that are twice as long, and keep all of them in layers with windows


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("LlamaForCausalLM", {"tensor_parallel_size": 3}, "no divisor of tensor_parallel_size=3"),
        ("LlamaForCausalLM", {"deterministic": True}, "does not go with deterministic"),
        ("LlamaForCausalLM", {}, "with tensor_parallel_size=2 and 2 KV heads, 1 ranks have the same KV head"),
        ("MistralForCausalLM", {"hf_overrides": {"sliding_window": 32}}, "every layer of this model has a window"),
        ("DeepseekV32ForCausalLM", {}, "has layers of kind SparseMLA"),
        ("MambaForCausalLM", {}, "has layers of kind Mamba"),
    ],
)
def test_what_ranks_cannot_share_is_refused(
    tmp_path: Path, architecture: str, settings: dict[str, Any], message: str
) -> None:
    path = make_tiny_model(architecture, tmp_path, tokenizer=False)
    sizes = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, **settings}
    with pytest.raises(ConfigError, match=message):
        config = EngineArgs(model=str(path), **sizes, **SETTINGS).create_engine_config()
        build_model(config, CpuPlatform(), torch.device("meta"), 32, 4)
