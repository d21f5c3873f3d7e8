"""What docs/migrating-from-vllm.md calls the same is called as vLLM's signature allows: every method, on small models, with each
keyword alone at its default and at another legal value.

`tools/migration/signatures.json` holds vLLM's parameters; a default that is no literal is `...`.
"""

import ast
import asyncio
import importlib
import inspect
import json
import threading
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.tiny_models import make_tiny_model
from tools.migration_table import ABSENT, ROOT, check_attributes, notes

from quire import LLM, AsyncLLMEngine, LLMEngine, LoRARequest, PoolingParams, RequestOutput, SamplingParams
from quire.distributed.weight_transfer import TrainerGroup
from quire.engine.arg_utils import AsyncEngineArgs, EngineArgs, UsageContext
from quire.engine.vllm_settings import DEFAULTS
from quire.sampling_params import BeamSearchParams

pytestmark = pytest.mark.timeout(120)

SIGNATURES: dict[str, dict[str, str]] = json.loads((ROOT / "tools/migration/signatures.json").read_text())
SETTINGS: dict[str, Any] = {"cpu_threads": 1, "max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}
POOLING = ("encode", "embed", "classify", "score")
PARAMS = SamplingParams(max_tokens=2, temperature=0.0)
CHAT = [{"role": "user", "content": "hello"}]
TEMPLATE = "{{ messages[0].content }}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TRAINER = TrainerGroup(1)
ADAPTER = LoRARequest("pirate", 1, str(ROOT / "examples/demo_adapters/pirate"))
ADAPTER_VERBS = ("add_lora", "remove_lora", "list_loras", "pin_lora")

REQUIRED: dict[str, Any] = {
    "prompts": ["hello"], "prompt": "hello", "messages": CHAT, "data_1": "one", "data_2": "two", "method": "bandwidth",
    "request_id": "r", "request_ids": ["r"], "engine_args": EngineArgs(**SETTINGS), "sampling_params": PARAMS, "params": PARAMS,
    "pooling_params": PoolingParams(), "new_version": "1", "request": {"init_info": TRAINER.init_info},
    "lora_request": ADAPTER, "lora_id": 1,
}  # fmt: skip
LEGAL: dict[str, list[Any]] = {
    "use_tqdm": [False], "lora_request": [], "priority": [1], "tokenization_kwargs": [{"add_special_tokens": False}],
    "mm_processor_kwargs": [{}], "chat_template": [TEMPLATE], "chat_template_content_format": ["string", "openai"],
    "add_generation_prompt": [], "continue_final_message": [False], "tools": [[TOOL]], "chat_template_kwargs": [{"extra": 1}],
    "output_type": [RequestOutput, (RequestOutput, str)], "concurrency_limit": [1], "include_dp": [False], "timeout": [60.0],
    "args": [()], "kwargs": [{}], "profile_prefix": ["mine"], "delay_iterations": [1], "max_iterations": [2],
    "profiler_kwargs": [{"record_shapes": True}], "reset_running_requests": [True], "reset_connector": [True], "level": [0, 2],
    "mode": ["keep", "wait"], "tags": [["weights", "kv_cache"]], "usage_context": [UsageContext.LLM_CLASS], "internal": [True],
    "enable_multiprocessing": [], "start_engine_loop": [False], "stat_loggers": [[]], "arrival_time": [1.0],
    "trace_headers": [{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}], "session_id": ["s"],
    "prompt_text": ["hello"], "kv_hints": [], "data_parallel_rank": [], "reasoning_ended": [], "reasoning_parser_kwargs": [],
    "clear_cache": [False], "drain_timeout": [1], "pooling_task": ["embed"], "sampling_params": [PARAMS, [PARAMS]],
    "pooling_params": [PoolingParams(), [PoolingParams()]], "weight_version": ["1"],
}  # fmt: skip
"""Beside each default; an empty list where only the default means anything here."""


def theirs(text: str) -> dict[str, inspect.Parameter]:
    """vLLM's parameters of a method."""
    arguments = ast.parse(f"lambda {text}: 0", mode="eval").body.args  # type: ignore[attr-defined]
    found: dict[str, inspect.Parameter] = {}
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    kind = inspect.Parameter
    for one, default in zip(positional, defaults, strict=True):
        is_bare = one in arguments.posonlyargs
        value = kind.empty if default is None else ast.literal_eval(default)
        found[one.arg] = kind(one.arg, kind.POSITIONAL_ONLY if is_bare else kind.POSITIONAL_OR_KEYWORD, default=value)
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        assert default is not None
        found[one.arg] = kind(one.arg, kind.KEYWORD_ONLY, default=ast.literal_eval(default))
    return found


def accepted_names(method: Any) -> set[str]:
    """Keywords that ours takes, those of an unpacked TypedDict too."""
    names: set[str] = set()
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            (options,) = typing.get_args(typing.get_type_hints(method)[name])
            names |= set(options.__annotations__)
        elif parameter.kind is not parameter.POSITIONAL_ONLY:
            names.add(name)
    return names


def there() -> Iterator[tuple[str, str]]:
    """Class and method of everything that the guide does not call absent."""
    told = notes()["absent"].get("attribute", {})
    for of, methods in SIGNATURES.items():
        for name, verdict in check_attributes({"of": of, "names": list(methods)}):
            if verdict.status != ABSENT and name not in told:
                yield of, name


METHODS = sorted(there())


@pytest.mark.parametrize(("of", "name"), METHODS)
def test_every_parameter_of_vllms_is_taken_by_its_name_and_in_its_place(of: str, name: str) -> None:
    module, _, owner = of.partition(":")
    method = getattr(getattr(importlib.import_module(module), owner), name)
    parameters = theirs(SIGNATURES[of][name])
    by_name = {each for each, parameter in parameters.items() if parameter.kind is not parameter.POSITIONAL_ONLY}
    assert by_name <= accepted_names(method)
    own = [parameter for parameter in inspect.signature(method).parameters.values() if parameter.name != "self"]
    in_place = [each.name for each in own if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    expected = [each for each, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    common = [each for each in in_place if each in expected]
    assert common == expected[: len(common)] == in_place[: len(common)], "what is ours alone comes after theirs"


def calls(of: str, name: str) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Positional and keyword arguments: the required ones alone, then each other with every legal value."""
    parameters = theirs(SIGNATURES[of][name])
    required = [REQUIRED[each] for each, parameter in parameters.items() if parameter.default is parameter.empty]
    if name == "update_weights":
        required = [{"update_info": {"path": EngineArgs(**SETTINGS).create_engine_config().model.path}}]
    if name == "beam_search":
        required[1] = BeamSearchParams(beam_width=2, max_tokens=2)
    if name == "from_engine_args" and of == "quire:AsyncLLMEngine":
        required = [AsyncEngineArgs(**SETTINGS)]
    yield required, {}
    for each, parameter in parameters.items():
        if parameter.default is not parameter.empty:
            assert each in LEGAL, f"give {each} a legal value"
            defaults = [] if parameter.default is ... else [parameter.default]
            for value in [*defaults, *LEGAL[each]]:
                if each == "chat_template" and value and name == "score":
                    continue  # for cross-encoders
                if name == "score" and isinstance(value, list):
                    continue  # one for all
                yield required, {each: value}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    traces = str(tmp_path_factory.mktemp("traces"))
    return {**SETTINGS, "profiler_config": {"torch_profiler_dir": traces, "torch_profiler_with_stack": False}}


@pytest.fixture(scope="module")
def llm(settings: dict[str, Any]) -> Iterator[LLM]:
    with LLM(disable_log_stats=False, chat_template=TEMPLATE, **settings) as made:
        yield made


@pytest.fixture(scope="module")
def poolers(tmp_path_factory: pytest.TempPathFactory, llm: LLM) -> Iterator[dict[str, LLM]]:
    tokenizer = llm.model_config.tokenizer_path
    made: dict[str, LLM] = {}
    for architecture, methods in (
        ("BertModel", ("encode", "embed", "score")),
        ("BertForSequenceClassification", ("classify",)),
    ):
        folder = make_tiny_model(
            architecture, tmp_path_factory.mktemp(architecture), vocab_size=llm.model_config.vocab_size
        )
        made |= dict.fromkeys(
            methods, LLM(str(folder), tokenizer=tokenizer, num_gpu_blocks_override=64, max_num_seqs=4)
        )
    yield made
    for one in made.values():
        one.shutdown()


def prepare(engine: Any, name: str) -> Any:
    """What must have happened before a method can be called."""
    if name == "stop_profile":
        return engine.start_profile()
    if name == "wait_for_completion":
        return engine.enqueue(["hello"], PARAMS)
    if name in ("wake_up", "resume_generation"):
        return engine.sleep(0 if name == "resume_generation" else 1)
    if name in ("update_weights", "finish_weight_update"):
        return engine.start_weight_update()
    if name == "pin_lora":
        return engine.add_lora(ADAPTER)
    if name == "init_weight_transfer_engine":
        threading.Thread(target=TRAINER.connect).start()
    return None


def tidy_up(engine: Any, name: str, arguments: dict[str, Any]) -> list[Any]:
    """What makes the engine fit for the next call."""
    done = []
    if name == "start_profile":
        done.append(engine.stop_profile())
    if name in ("sleep", "release_kv_cache_memory", "wake_up", "pause_generation"):
        done.append(engine.wake_up())
    if name in ("start_weight_update", "update_weights"):
        done.append(engine.finish_weight_update())
    return done


@pytest.mark.parametrize("name", [name for of, name in METHODS if of == "quire:LLM"])
def test_methods_of_llm_take_each_keyword(llm: LLM, poolers: dict[str, LLM], name: str) -> None:
    target = poolers[name] if name in POOLING else llm
    for required, keywords in calls("quire:LLM", name):
        prepare(target, name)
        result = getattr(target, name)(*required, **keywords)
        if name == "from_engine_args":
            result.shutdown()
        tidy_up(target, name, keywords)
        if name.startswith("enqueue"):
            assert len(target.wait_for_completion(use_tqdm=False)) == len(result) == 1
        if name in ("generate", "chat"):
            assert len(result[0].outputs[0].token_ids) <= 16 and result[0].finished
        assert target.llm_engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("name", [name for of, name in METHODS if of == "quire:LLMEngine" and name != "tokenizer"])
def test_methods_of_llm_engine_take_each_keyword(llm: LLM, name: str) -> None:
    engine = llm.llm_engine
    if name in ADAPTER_VERBS:
        engine = LLMEngine.from_engine_args(EngineArgs(**SETTINGS, enable_lora=True))
    for required, keywords in calls("quire:LLMEngine", name):
        prepare(engine, name)
        result = getattr(engine, name)(*required, **keywords)
        if name == "from_engine_args":
            result.shutdown()
        tidy_up(engine, name, keywords)
        while engine.has_unfinished_requests():
            engine.step()
        if name == "add_request":
            assert result == "r"


@pytest.mark.parametrize("name", [name for of, name in METHODS if of == "quire:AsyncLLMEngine"])
def test_methods_of_async_llm_engine_take_each_keyword(
    settings: dict[str, Any], llm: LLM, tmp_path: Path, name: str
) -> None:
    async def finish(value: Any) -> Any:
        if inspect.isasyncgen(value):
            return [each async for each in value]
        return await value if inspect.isawaitable(value) else value

    async def main() -> None:
        values = dict(settings)
        if name == "encode":
            folder = make_tiny_model("BertModel", tmp_path, vocab_size=llm.model_config.vocab_size)
            values = {"model": str(folder), "tokenizer": llm.model_config.tokenizer_path, "num_gpu_blocks_override": 64}
        if name in ADAPTER_VERBS:
            values = SETTINGS | {"enable_lora": True}  # of the demo model, which has adapters
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**values))
        try:
            for required, keywords in calls("quire:AsyncLLMEngine", name):
                await finish(prepare(engine, name))
                result = await finish(getattr(engine, name)(*required, **keywords))
                if name == "from_engine_args":
                    result.shutdown()
                for each in tidy_up(engine, name, keywords):
                    await finish(each)
                if name in ("generate", "encode"):
                    assert result[-1].finished
        finally:
            engine.shutdown()

    asyncio.run(main())


def test_every_class_of_the_table_is_called() -> None:
    assert {of for of, _ in METHODS} == set(SIGNATURES)
    assert len(METHODS) > 60


TABLES: list[dict[str, Any]] = json.loads((ROOT / "tools/migration/vllm.json").read_text())["tables"]
(ARGUMENTS,) = (table["names"] for table in TABLES if table["title"] == "Arguments of `LLM(…)`")


@pytest.mark.parametrize("name", sorted(set(ARGUMENTS) - {"model"}))
def test_every_argument_of_vllms_llm_is_taken_at_its_default(name: str) -> None:
    EngineArgs(**{**SETTINGS, name: DEFAULTS[name]}).create_engine_config(UsageContext.LLM_CLASS)
