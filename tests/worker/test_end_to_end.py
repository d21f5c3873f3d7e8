"""Scheduler, executor and model together: tokens equal Transformers' whatever the schedule does to the requests."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracles.tiny_models import VOCAB_SIZE, load_oracle
from tests.worker.tiny_engine import TinyEngine, make_request

from quire.request import EngineRequest

LENGTHS = (5, 30, 61, 17, 1, 44)
MAX_TOKENS = 12


def make_prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def greedy_oracle(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = load_oracle(path)
    outputs = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(MAX_TOKENS):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        outputs.append(tokens[len(prompt) :])
    return outputs


def run(engine: TinyEngine, requests: list[EngineRequest]) -> list[list[int]]:
    tokens = engine.generate(requests)
    return [tokens[request.request_id] for request in requests]


def greedy_requests(prompts: list[list[int]], **params: Any) -> list[EngineRequest]:
    return [make_request(f"r{index}", prompt, **params) for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("model", ["llama", "gpt2", "mistral", "gemma"])
def test_greedy_tokens_equal_transformers_with_chunked_prefill(
    model: str, depth: int, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    prompts = make_prompts()
    engine = TinyEngine(path, depth=depth, max_num_batched_tokens=16)
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(path, prompts)
    assert any((step.num_scheduled_tokens > 1).any() and not step.needs_sample.all() for step in engine.steps)


def test_greedy_tokens_equal_transformers_without_recording(llama: Path) -> None:
    prompts = make_prompts()
    engine = TinyEngine(llama, enforce_eager=True)
    assert engine.executor.explain()["recorded_step"] is False
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(llama, prompts)


@pytest.mark.parametrize("attention_backend", ["cpu", "reference"])
def test_both_attention_backends_give_the_same_tokens(llama: Path, attention_backend: str) -> None:
    prompts = make_prompts()
    try:
        engine = TinyEngine(llama, attention_backend=attention_backend)
    except ValueError as error:
        pytest.skip(str(error))
    assert engine.executor.explain()["attention_backend"]["chosen"] == attention_backend
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(llama, prompts)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_greedy_tokens_survive_preemption(model: str, mode: str, depth: int, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    # A window frees pages as it moves: with two groups, short prompts that grow run out sooner than long ones.
    prompts = make_prompts((30, 28, 33, 21, 26) if model == "llama" else (6, 7, 8, 5, 9))
    pages = 26 if model == "llama" else 30 + 8 * depth
    engine = TinyEngine(
        path,
        depth=depth,
        max_model_len=64,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=pages,
        preemption_mode=mode,
        swap_space=0.01,
        enable_prefix_caching=False,
    )
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(path, prompts)
    assert engine.scheduler.stats().num_preemptions > 0
    assert any(step.swap_ins for step in engine.steps) == (mode == "swap")


def test_greedy_tokens_survive_prefix_hits(llama: Path) -> None:
    shared = make_prompts((40,), seed=3)[0]
    prompts = [shared + tail for tail in make_prompts((9, 1, 15, 3), seed=4)] + [shared[:24]]
    engine = TinyEngine(llama)
    first = run(engine, greedy_requests(prompts[:1]))
    computed_before = sum(step.total_num_tokens for step in engine.steps)
    rest = run(engine, greedy_requests(prompts[1:]))
    assert first + rest == greedy_oracle(llama, prompts)
    computed = sum(step.total_num_tokens for step in engine.steps) - computed_before
    assert computed < sum(len(prompt) + MAX_TOKENS - 1 for prompt in prompts[1:]) - 3 * 36


def test_greedy_tokens_do_not_depend_on_the_order_of_requests(llama: Path) -> None:
    prompts = make_prompts()
    expected = greedy_oracle(llama, prompts)
    for order in (range(6), [5, 3, 1, 0, 2, 4], [2, 5, 0, 4, 1, 3]):
        engine = TinyEngine(llama, max_num_seqs=3, max_num_batched_tokens=24)
        requests = greedy_requests(prompts)
        tokens = engine.generate([requests[index] for index in order])
        assert [tokens[f"r{index}"] for index in range(6)] == expected


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    {"temperature": 1.0, "frequency_penalty": 0.8, "logit_bias": {5: 4.0}, "logprobs": 3},
]


def sampled_requests(prompts: list[list[int]]) -> list[EngineRequest]:
    return [
        make_request(f"r{index}", prompt, seed=1000 + index, **SAMPLED[index]) for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_sampled_tokens_are_the_same_alone_in_a_batch_and_after_preemption(llama: Path, depth: int) -> None:
    prompts = make_prompts((30, 28, 33, 21, 26))
    alone = [run(TinyEngine(llama), [request])[0] for request in sampled_requests(prompts)]
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    together = TinyEngine(llama, depth=depth, max_num_batched_tokens=20)
    assert run(together, sampled_requests(prompts)) == alone
    for mode in ("recompute", "swap"):
        tight = TinyEngine(
            llama, depth=depth, max_model_len=64, num_gpu_blocks_override=26, preemption_mode=mode, swap_space=0.01
        )
        assert run(tight, sampled_requests(prompts)) == alone
        assert tight.scheduler.stats().num_preemptions > 0


def test_a_request_that_resumes_with_emitted_tokens_continues_them(llama: Path) -> None:
    prompts = make_prompts((30, 28, 33, 21, 26))
    whole = run(TinyEngine(llama), sampled_requests(prompts))
    resumed = sampled_requests(prompts)
    for request, tokens in zip(resumed, whole, strict=True):
        request.resumed_token_ids = tokens[:5]
    continued = run(TinyEngine(llama), resumed)
    assert [tokens[-7:] for tokens in continued] == [tokens[5:] for tokens in whole]


@pytest.mark.parametrize("budget", [16, 200])
def test_logprobs_and_prompt_logprobs_agree_with_transformers(llama: Path, budget: int) -> None:
    prompts = make_prompts((37, 12, 25))
    engine = TinyEngine(llama, max_num_batched_tokens=budget, max_num_seqs=4)
    requests = greedy_requests(prompts, logprobs=3, prompt_logprobs=2)
    requests.append(make_request("bystander", prompts[0]))
    tokens = engine.generate(requests)
    assert tokens["bystander"] == tokens["r0"]
    model = load_oracle(llama)
    for request, prompt in zip(requests[:3], prompts, strict=True):
        name = request.request_id
        with torch.no_grad():
            sequence = prompt + tokens[name]
            expected = torch.log_softmax(model(torch.tensor([sequence])).logits[0], -1).numpy()
        first = engine.news[name][0]
        assert first.prompt_logprobs is not None
        ids, values, ranks = (
            first.prompt_logprobs.token_ids,
            first.prompt_logprobs.logprobs,
            first.prompt_logprobs.ranks,
        )
        assert [position[0] for position in ids] == prompt[1:]
        for position, (position_ids, position_values) in enumerate(zip(ids, values, strict=True)):
            np.testing.assert_allclose(position_values, expected[position][position_ids], atol=1e-3)
            assert position_ids[1:] == np.argsort(-expected[position])[:2].tolist()
            assert ranks[position] == 1 + int((expected[position] > expected[position][prompt[position + 1]]).sum())
        sampled = [news.logprobs for news in engine.news[name] if news.logprobs is not None]
        sampled_ids = [entry for logprobs in sampled for entry in logprobs.token_ids]
        sampled_values = [entry for logprobs in sampled for entry in logprobs.logprobs]
        assert [entry[0] for entry in sampled_ids] == tokens[name]
        for index, (entry_ids, entry_values) in enumerate(zip(sampled_ids, sampled_values, strict=True)):
            np.testing.assert_allclose(entry_values, expected[len(prompt) - 1 + index][entry_ids], atol=1e-3)


def test_a_failing_logits_processor_ends_only_its_request(llama: Path) -> None:
    def fail(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 3:
            raise RuntimeError("three is too many")
        return logits

    prompts = make_prompts()
    requests = greedy_requests(prompts)
    assert requests[1].sampling_params is not None
    requests[1].sampling_params.logits_processors = [fail]
    engine = TinyEngine(llama)
    tokens = run(engine, requests)
    expected = greedy_oracle(llama, prompts)
    assert [tokens[index] for index in (0, 2, 3, 4, 5)] == [expected[index] for index in (0, 2, 3, 4, 5)]
    assert tokens[1] == expected[1][:3]
    assert "three is too many" in (engine.news["r1"][-1].error or "")


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_waking_goes_on(llama: Path, level: int) -> None:
    prompts = make_prompts()
    engine = TinyEngine(llama)
    expected = run(engine, greedy_requests(prompts))
    engine.executor.sleep(level)
    report = engine.executor.explain()
    assert report.get("kv_cache_bytes", 0) == 0
    assert ("attention_backend" in report) == (level == 1)
    engine.executor.wake_up()
    engine.scheduler.reset_prefix_cache()
    assert run(engine, greedy_requests(prompts)) == expected
