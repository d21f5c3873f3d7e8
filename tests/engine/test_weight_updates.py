"""New weights under a running engine: afterwards its tokens are those of an engine that was started with them."""

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.test_engine_parity import assert_parity, make_prompts
from tests.oracles.tiny_models import load_oracle, make_tiny_model

from quire import LLM, SamplingParams
from quire.distributed.weight_transfer import TrainerGroup, shared_weights
from quire.engine.arg_utils import AsyncEngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import EngineCore
from quire.engine.core_loop import ThreadInbox
from quire.engine.messages import FrontendMessage
from quire.errors import CapacityError, EngineError, RequestError
from quire.outputs import WeightVersionSpan
from quire.request import EngineCoreOutputs

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_batched_tokens": 64, "max_model_len": 128, "num_gpu_blocks_override": 200,
    "skip_tokenizer_init": True,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1, detokenize=False)
PROMPTS = [{"prompt_token_ids": ids} for ids in make_prompts()]

DEFAULT, MORE = (
    ("LlamaForCausalLM", "Gemma3ForCausalLM"),
    ("GPT2LMHeadModel", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "JambaForCausalLM"),
)
ARCHITECTURES = [*DEFAULT, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)]


@pytest.fixture(autouse=True)
def restored_choice(kept_selection: None) -> None:
    """Which kernels are chosen is the process's state."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """Two checkpoints of one architecture with different weights."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(architecture: str = "LlamaForCausalLM") -> tuple[Path, Path]:
        if architecture not in made:
            old, new = (
                make_tiny_model(architecture, tmp_path_factory.mktemp("tiny"), tokenizer=False, seed=seed)
                for seed in (0, 1)
            )
            made[architecture] = old, new
        return made[architecture]

    return make


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def tokens_of(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def fresh(path: Path, **settings: Any) -> list[list[int]]:
    with LLM(str(path), **(SETTINGS | settings)) as llm:
        return tokens_of(llm)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_that_were_read_or_sent_are_those_of_transformers(architecture, pair):
    old, new = pair(architecture)
    prompts = [prompt["prompt_token_ids"] for prompt in PROMPTS]
    with LLM(str(old), **SETTINGS) as llm:
        assert_parity(load_oracle(old), prompts, llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        llm.reload_weights(str(new))
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert_parity(load_oracle(new), prompts, outputs)
        assert outputs[0].outputs[0].weight_versions == [WeightVersionSpan("1", 0, 8)]
        llm.start_weight_update()
        names = list(tensors := tensors_of(old))
        for part in (names[::2], names[1::2]):
            with shared_weights({name: tensors[name] for name in part}) as info:
                llm.update_weights({"update_info": info})
        llm.finish_weight_update("from the trainer")
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert_parity(load_oracle(old), prompts, outputs)
        assert outputs[0].outputs[0].weight_versions == [WeightVersionSpan("from the trainer", 0, 8)]
        assert llm.get_weight_version() == "from the trainer"


def send(group: TrainerGroup, tensors: dict[str, torch.Tensor]) -> threading.Thread:
    """A trainer that sends, in a thread of its own."""
    thread = threading.Thread(target=group.send, args=(tensors,))
    thread.start()
    return thread


def connected(llm: LLM, num_ranks: int = 1) -> TrainerGroup:
    group = TrainerGroup(num_ranks)
    thread = threading.Thread(target=group.connect)
    thread.start()
    llm.init_weight_transfer_engine({"init_info": group.init_info})
    thread.join()
    return group


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.exhaustive)])
def test_a_trainer_broadcasts_weights_to_every_rank(pair, ranks, quantization):
    old, new = pair()
    settings = {"tensor_parallel_size": ranks, "quantization": quantization}
    expected = fresh(new, **settings)
    with LLM(str(old), **SETTINGS, **settings) as llm:
        group, tensors = connected(llm, ranks), tensors_of(new)
        for _ in range(2):
            llm.start_weight_update()
            sender = send(group, tensors)
            llm.update_weights({"update_info": group.update_info(tensors)})
            sender.join()
            llm.finish_weight_update()
            assert tokens_of(llm) == expected
        assert llm.get_weight_version() == "2"
        llm.shutdown_weight_transfer_engine()
        group.close()
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(old)})
        assert tokens_of(llm) == fresh(old, **settings)


def test_what_does_not_fit_changes_nothing(pair, tmp_path):
    old, new = pair()
    tensors = tensors_of(new)
    expected = fresh(old)
    name = "model.layers.0.self_attn.q_proj.weight"
    with LLM(str(old), **SETTINGS) as llm:
        with pytest.raises(RequestError, match="start_weight_update first"):
            llm.update_weights({"path": str(new)})
        llm.start_weight_update()
        wrong = {
            "no tensors of the checkpoint": {"model.nothing": tensors[name]},
            "config.json asks for": {name: tensors[name][:3]},
            "I64, not": {name: tensors[name].long()},
        }
        for why, given in wrong.items():
            with shared_weights(given, tmp_path) as info, pytest.raises(RequestError, match=why):
                llm.update_weights(info)
        for why, info in {
            "no trainer is connected": TrainerGroup.update_info({name: tensors[name]}),
            "unknown field": {"packed": True},
            "has no": {"path": str(tmp_path / "absent")},
        }.items():
            with pytest.raises(RequestError, match=why):
                llm.update_weights(info)
        with pytest.raises(RequestError, match="wake it up"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)  # until it is finished nothing is computed
        llm.finish_weight_update()
        assert tokens_of(llm) == expected
        (tmp_path / "other").mkdir()
        save_file({name: tensors[name]}, tmp_path / "other" / "model.safetensors")
        for why, path in {"no folder": tmp_path / "absent", "Missing": tmp_path / "other"}.items():
            with pytest.raises(RequestError, match=why):
                llm.reload_weights(str(path))
        assert tokens_of(llm) == expected and llm.get_weight_version() == "1"


def test_a_part_of_a_module_is_no_update(pair):
    old, new = pair()
    tensors = tensors_of(new)
    q, *others = (f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkv")
    with LLM(str(old), **SETTINGS) as llm:
        llm.start_weight_update()
        with shared_weights({q: tensors[q]}) as info:
            llm.update_weights(info)
            with pytest.raises(RequestError, match="came already"):
                llm.update_weights(info)
        with pytest.raises(RequestError, match="not whole: 2 tensors are missing"):
            llm.finish_weight_update()
        with shared_weights({name: tensors[name] for name in others}) as info:
            llm.update_weights(info)
        llm.finish_weight_update()
        with shared_weights({name: tensor for name, tensor in tensors.items() if name not in (q, *others)}) as info:
            llm.start_weight_update()
            llm.update_weights(info)
            llm.finish_weight_update()
        assert tokens_of(llm) == fresh(new)


def test_an_update_that_breaks_off_leaves_nothing_to_compute_with(pair):
    old, new = pair()
    tensors = tensors_of(new)
    with LLM(str(old), **SETTINGS) as llm:
        group = connected(llm)
        llm.start_weight_update()
        half = dict(list(tensors.items())[: len(tensors) // 2])

        def leave() -> None:
            group.send(half)
            group.close()

        trainer = threading.Thread(target=leave)
        trainer.start()
        with pytest.raises(EngineError, match="left in the middle"):
            llm.update_weights(group.update_info(tensors))
        trainer.join()
        assert "old weights and new ones" in llm.weight_info()["problem"]
        refused = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert all("no weights to compute with" in str(output.error) for output in refused)
        with pytest.raises(RequestError, match="start_weight_update first"):
            llm.finish_weight_update()
        llm.reload_weights()
        assert llm.weight_info()["problem"] is None
        assert tokens_of(llm) == fresh(old)


async def an_answer(engine: AsyncLLM, request_id: str, max_tokens: int = 8) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    async for output in engine.generate(PROMPTS[0], params, request_id):
        last = output
    assert last.finished
    answers.append(last.outputs[0])
    return list(last.outputs[0].token_ids)


answers: list[Any] = []


async def a_new_core(engine: AsyncLLM) -> None:
    """Kill the core; returns when another one serves."""
    client: Any = engine._client
    pid = client.client.pid
    os.kill(pid, signal.SIGKILL)
    while client.client.pid == pid or engine._restarting:
        engine._handle_inbox()
        await asyncio.sleep(0.01)


def test_a_core_that_is_started_again_has_the_newest_weights_or_says_that_it_has_not(pair):
    old, new = pair()
    expected = {path: fresh(path)[0] for path in (old, new)}

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(old), **SETTINGS), core="process")
        try:
            assert await an_answer(engine, "a") == expected[old]
            await engine.reload_weights(str(new))
            assert await an_answer(engine, "b") == expected[new]
            await engine.start_weight_update()
            waits = asyncio.ensure_future(an_answer(engine, "d", 100))  # until the update has ended
            with shared_weights(tensors_of(old)) as info:
                await engine.update_weights(info)
            await a_new_core(engine)  # in the middle of an update: it is given up, and the weights before it are there
            assert (await waits)[:8] == expected[new]
            assert (await engine.weight_info())["weight_version"] == "1"
            with pytest.raises(RequestError, match="start_weight_update first"):
                await engine.finish_weight_update()
            await engine.start_weight_update()
            with shared_weights(tensors_of(old)) as info:
                await engine.update_weights(info)
            await engine.finish_weight_update("sent")
            assert await an_answer(engine, "e") == expected[old]
            await a_new_core(engine)
            with pytest.raises(CapacityError, match="'sent' came from a trainer, and went with the engine core"):
                await an_answer(engine, "f")
            await engine.reload_weights(str(new))
            assert await an_answer(engine, "g") == expected[new]
            versions = [answer.weight_versions[0].version for answer in answers]
            assert versions == ["default", "1", "1", "sent", "3"]
        finally:
            engine.shutdown()

    answers.clear()
    asyncio.run(main())


@pytest.mark.parametrize("core", ["inproc", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_what_runs_goes_on_with_the_new_weights_and_the_output_says_from_where_on(pair, core, monkeypatch):
    old, new = pair()
    wait_for_a_message(monkeypatch, after_steps=40)

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(old), **SETTINGS), core=core)
        try:
            params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
            tokens: list[int] = []
            outputs = engine.generate(PROMPTS[4], params, "r")
            async for output in outputs:
                last = output
                tokens = list(output.outputs[0].token_ids)
                if len(tokens) >= 20:
                    break
            await engine.pause_generation(mode="keep")
            await engine.reload_weights(str(new), weight_version="second")
            await engine.resume_generation()
            async for output in outputs:
                last = output
            (first, second) = last.outputs[0].weight_versions
            assert (first.version, first.start, second.version, second.end) == ("default", 0, "second", 60)
            tokens, middle = list(last.outputs[0].token_ids), first.end
            assert 20 <= middle == second.start < 60
            prompt = PROMPTS[4]["prompt_token_ids"]
            assert tokens[:middle] == continued(old, prompt, middle)
            assert tokens[middle:] == continued(new, [*prompt, *tokens[:middle]], 60 - middle)
        finally:
            engine.shutdown()

    asyncio.run(main())


def wait_for_a_message(monkeypatch: pytest.MonkeyPatch, after_steps: int) -> None:
    """A core in a thread takes no more than some steps before it is sent something, so that it has not ended by then."""
    receive, step = ThreadInbox.receive, EngineCore.step
    steps = 0

    def count(core: EngineCore) -> EngineCoreOutputs:
        nonlocal steps
        steps += 1
        return step(core)

    def wait(inbox: ThreadInbox, block: bool) -> list[FrontendMessage]:
        nonlocal steps
        taken = receive(inbox, block or steps >= after_steps)
        if taken and steps:
            steps = -1000
        return taken

    monkeypatch.setattr(EngineCore, "step", count)
    monkeypatch.setattr(ThreadInbox, "receive", wait)


def continued(path: Path, prompt: list[int], count: int) -> list[int]:
    """Transformers' next tokens."""
    oracle, ids = load_oracle(path), list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(oracle(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("level", [1, 2])
def test_a_trainer_s_loop_sleeps_wakes_up_and_goes_on_with_new_weights(pair, level):
    old, new = pair()
    expected = {path: fresh(path) for path in (old, new)}
    with LLM(str(old), **SETTINGS) as llm:
        assert tokens_of(llm) == expected[old]
        llm.sleep(level)
        with pytest.raises(RequestError, match="wake it up"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        if level == 2:
            with pytest.raises(RequestError, match="weights sleep"):
                llm.start_weight_update()
        assert llm.wake_up(["weights"]) is False
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
        assert llm.wake_up(["kv_cache"]) is True
        assert tokens_of(llm) == expected[new]
        llm.sleep(level)
        llm.wake_up()
        assert tokens_of(llm) == expected[new]
        llm.sleep(level)
        llm.wake_up(["weights"])
        llm.start_weight_update()
        if level == 2:
            with pytest.raises(RequestError, match="finish it first"):
                llm.sleep(2)
        with shared_weights(tensors_of(old)) as info:
            llm.update_weights(info)
        llm.finish_weight_update()
        llm.wake_up(["kv_cache"])
        assert tokens_of(llm) == expected[old]
        llm.sleep(level)
        llm.wake_up()
        if level == 1:
            assert tokens_of(llm) == expected[old]
        else:
            (refused, *_) = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert "came from a trainer, and sleep level 2 dropped them" in str(refused.error)
