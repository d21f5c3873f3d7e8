"""What goes on behind the death of a core: requests of all kinds end as they would have, with real models in core processes."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, SamplingParams
from quire.engine.arg_utils import AsyncEngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.engine.core_client import WaitingClient
from quire.engine.process_client import ProcessClient
from quire.engine.recovery import RecoveringClient
from quire.engine.request_record import RequestRecord
from quire.metrics.events import EventKind
from quire.request import EngineCoreOutput, EngineRequest, TokenLogprobs, token_array
from quire.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 8}}}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 1},
    "three answers": {"seed": 2, "n": 3},
    "penalties": {"seed": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "filters": {"seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "bias": {"seed": 5, "logit_bias": {300: 5.0, 301: -100.0}},
    "bad words": {"temperature": 0, "bad_words": ["the", " a"]},
    "least length": {"seed": 6, "min_tokens": 40, "stop": ["e"]},
    "stop strings": {"seed": 7, "stop": ["qzx", "42"], "include_stop_str_in_output": True},
    "logprobs": {"seed": 8, "logprobs": 3},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 2},
    "repetition": {"temperature": 0, "ignore_eos": True},
    "json": {"seed": 9, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "regex": {"seed": 10, "structured_outputs": StructuredOutputsParams(regex=r"[a-f]{6}-[0-9]{20}")},
    "choice": {"seed": 11, "structured_outputs": StructuredOutputsParams(choice=["yes indeed", "no, never"])},
    "grammar": {"seed": 12, "structured_outputs": StructuredOutputsParams(grammar='root ::= ("ab" | "cd"){12}')},
}


def core_of(client: Any) -> int:
    """The process id of the core behind a client."""
    while not isinstance(client, ProcessClient):
        assert isinstance(client, WaitingClient | RecoveringClient)
        client = client.client
    return client.pid


def kill_at_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Kill the core before so many of the engine's steps."""
    engine, count = llm.llm_engine, 0
    step = engine.step

    def step_or_kill() -> Any:
        nonlocal count
        if count in numbers:
            os.kill(core_of(engine._client), signal.SIGKILL)
        count += 1
        return step()

    monkeypatch.setattr(engine, "step", step_or_kill)


def plain(outputs: Any) -> list[Any]:
    """What there is to compare of outputs."""
    return [
        [output.prompt_logprobs, *((o.text, o.token_ids, o.finish_reason, o.logprobs) for o in output.outputs)]
        for output in outputs
    ]


def test_requests_of_every_kind_end_as_without_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["What is 17 + 25? Say it in äöü — 数字: " + str(number) for number in range(len(KINDS))]
    params = [SamplingParams(max_tokens=48, **kind) for kind in KINDS.values()]
    with LLM(recovery=True, deterministic=True, max_model_len=512, kv_cache_memory_bytes=64 << 20) as llm:
        expected = plain(llm.generate(prompts, params, use_tqdm=False))
        beams = llm.beam_search(prompts[:2], BeamSearchParams(beam_width=3, max_tokens=8))
        kill_at_steps(llm, monkeypatch, 1, 12)
        got = plain(llm.generate(prompts, params, use_tqdm=False))
        # A core that runs far ahead of this process may have sent everything before the second kill.
        assert llm.llm_engine.events.totals[EventKind.RESTART] in (1, 2)
        for kind, one, other in zip(KINDS, expected, got, strict=True):
            assert one == other, kind
        kill_at_steps(llm, monkeypatch, 3)
        assert llm.beam_search(prompts[:2], BeamSearchParams(beam_width=3, max_tokens=8)) == beams


def test_pooling_requests_are_computed_by_the_next_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny_model("LlamaForCausalLM", tmp_path)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 4 << 20}
    prompts: list[Any] = [{"prompt_token_ids": [3 + number, 4, 5]} for number in range(6)]
    with LLM(str(path), runner="pooling", skip_tokenizer_init=True, recovery=True, **settings) as llm:
        expected = [one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False)]
        kill_at_steps(llm, monkeypatch, 0)
        assert [one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False)] == expected


def test_prompt_logprobs_of_which_a_part_came_do_not_come_twice() -> None:
    request = EngineRequest("a", token_array(range(6)))
    params = SamplingParams(prompt_logprobs=0)
    record = RequestRecord("a", None, list(range(6)), params, [request], 0.0, None)
    record.begin()

    def chunk(*token_ids: int) -> EngineCoreOutput:
        count = len(token_ids)
        return EngineCoreOutput(
            "a",
            prompt_logprobs=TokenLogprobs([[token_id] for token_id in token_ids], [[-1.0]] * count, [1] * count),
        )

    record.append_prompt_logprobs(chunk(1, 2))
    record.resumption()
    for token_ids in ((1, 2, 3), (4, 5)):
        record.append_prompt_logprobs(chunk(*token_ids))
    record.resumption()
    assert len(record.unread) == 5
    record.append_prompt_logprobs(chunk(1, 2, 3, 4, 5))  # of a core that computes the prompt once more
    record.read_prompt_logprobs(2)
    record.resumption()
    record.read_prompt_logprobs()
    assert record.prompt_logprobs is not None
    assert [None if one is None else list(one) for one in record.prompt_logprobs] == [None, [1], [2], [3], [4], [5]]


BROKEN = "\N{BALLOON}\u5b57\u00e4"
"""Characters of several tokens each."""


def test_a_death_within_a_thought_within_characters_and_while_a_grammar_compiles_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = tmp_path / "now"
    in_grammar = tmp_path / "in grammar"
    faults = f"after-collect@core:kill:4:{now},before-grammar@core:kill:1:{in_grammar}"
    monkeypatch.setenv("QUIRE_FAULTS", faults)
    args = AsyncEngineArgs(deterministic=True, max_model_len=512, kv_cache_memory_bytes=32 << 20)
    known_at_death: list[int] = []

    async def streamed(engine: AsyncLLM, prompt: str, params: SamplingParams, name: str) -> tuple[str, list[int]]:
        params.output_kind = RequestOutputKind.DELTA
        texts, token_ids = list[str](), list[int]()
        async for output in engine.generate(prompt, params, name):
            texts.append(output.outputs[0].text)
            token_ids += output.outputs[0].token_ids
        return "".join(texts), token_ids

    async def both(engine: AsyncLLM, name: str) -> list[tuple[str, list[int]]]:
        tokenizer = engine.get_tokenizer()
        assert tokenizer is not None
        chat = [{"role": "user", "content": "What is 17 + 25?"}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, enable_thinking=True, tokenize=False)
        pieces = tokenizer.encode(BROKEN, add_special_tokens=False)
        assert len(pieces) > 2 * len(BROKEN)
        thought = SamplingParams(max_tokens=80, thinking_token_budget=5, temperature=0, skip_special_tokens=False)
        runs = [streamed(engine, prompt, thought, f"{name} thought")]
        for seed in range(3):
            broken = SamplingParams(max_tokens=80, allowed_token_ids=pieces, seed=seed, ignore_eos=True)
            runs.append(streamed(engine, "a", broken, f"{name} broken {seed}"))
        results = await asyncio.gather(*runs)
        assert results[0][1].index(tokenizer.convert_tokens_to_ids("</think>")) == 6
        return results

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(args, core="process")
        lose_core = engine._lose_core

        def note(message: str, is_whole: bool) -> None:
            known_at_death.extend(len(one.sequences[0].token_ids) for one in engine._outputs.records)
            lose_core(message, is_whole)

        monkeypatch.setattr(engine, "_lose_core", note)
        try:
            now.touch()
            disturbed = await both(engine, "disturbed")
            assert disturbed == await both(engine, "calm")
            form = StructuredOutputsParams(regex="[a-f]{8}-[0-9]{8}")
            in_grammar.touch()
            params = SamplingParams(max_tokens=40, seed=1, structured_outputs=form)
            disturbed = await streamed(engine, "a", params, "while its grammar compiles")
            assert disturbed == await streamed(engine, "a", params, "with a grammar") and not in_grammar.exists()
            assert engine.events.totals[EventKind.RESTART] == 2
        finally:
            engine.shutdown()

    asyncio.run(main())
    assert len(known_at_death) == 5 and all(0 < known < 6 for known in known_at_death[:4]) and not now.exists()
    assert known_at_death[4] == 0  # its grammar was being compiled


async def greedy(engine: AsyncLLM, number: int, name: str, each: Callable[[], None] = lambda: None) -> list[int]:
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, detokenize=False)
    tokens: list[int] = []
    async for output in engine.generate({"prompt_token_ids": [3, 4, 5 + number]}, params, f"{name}{number}"):
        tokens = list(output.outputs[0].token_ids)
        each()
    return tokens


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
def test_streams_go_on_behind_the_death_of_a_rank(size: int, tmp_path: Path) -> None:
    path = make_tiny_model("LlamaForCausalLM", tmp_path, num_attention_heads=4, num_key_value_heads=4)
    args = AsyncEngineArgs(
        model=str(path), dtype="float32", max_model_len=64, kv_cache_memory_bytes=4 << 20,
        tensor_parallel_size=size, skip_tokenizer_init=True, enforce_eager=True,
    )  # fmt: skip

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(args, core="process")
        try:
            expected = await asyncio.gather(*(greedy(engine, number, "before") for number in range(4)))
            for rank in (0, size - 1):
                pid = (await engine.explain())["ranks"][rank]["pid"]
                num_outputs = 0

                def count(pid: int = pid) -> None:
                    nonlocal num_outputs
                    num_outputs += 1
                    if num_outputs == 20:
                        os.kill(pid, signal.SIGKILL)

                streams = (greedy(engine, number, f"rank{rank}-", count) for number in range(4))
                assert await asyncio.gather(*streams) == expected
            assert engine.events.totals[EventKind.RESTART] == 2
        finally:
            engine.shutdown()

    asyncio.run(main())
