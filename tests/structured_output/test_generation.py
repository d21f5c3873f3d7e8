"""Whatever a model would say, its answer has the wanted form; and nobody else's answer changes."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.worker.tiny_engine import TinyEngine, make_request

from quire import LLM, SamplingParams
from quire.core.scheduler import Scheduler
from quire.engine.arg_utils import EngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.errors import RequestError
from quire.executor import selector
from quire.sample.sampler import Sampler
from quire.sampling_params import StructuredOutputsParams, Thinking
from quire.structured_output.grammars import Grammars
from quire.structured_output.rows import Filling
from quire.tokenizers.loader import get_tokenizer

EOS = 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json": PERSON, "disable_any_whitespace": True},
    {"choice": ["red", "green", "gr"]},
    {"regex": r"[a-c]{2,5}-\d{3}"},
    {"grammar": 'root ::= "(" inner ")"\ninner ::= [xy] | "z"'},
    {"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{1,4}/'},
]


def form_of(fields: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


def assert_has_form(text: str, fields: dict[str, Any]) -> None:
    match fields:
        case {"json": schema}:
            jsonschema.validate(json.loads(text), schema)
        case {"choice": choices}:
            assert text in choices
        case {"regex": regex}:
            assert re.fullmatch(regex, text)
        case {"grammar": grammar}:
            assert re.fullmatch(r"\([xyz]\)" if "::=" in grammar else r"<[a-z]{1,4}>", text)


def requests_of(path: Path, **params: Any) -> list[Any]:
    """Every form at several temperatures, and free rows between them."""
    encode = get_tokenizer(str(path)).encode
    requests = []
    for number, temperature in enumerate((0.0, 0.8, 1.6)):
        for index, fields in enumerate(FORMS):
            settings = {
                "temperature": temperature,
                "max_tokens": 80,
                "eos_token_ids": [EOS],
                "ignore_eos": False,
            } | params
            prompt = encode("a prompt of its own " * (index + number) + "end")
            name = f"{index} {number}"
            requests.append(make_request(name, prompt, seed=number, structured_outputs=form_of(fields), **settings))
            requests.append(make_request(f"free {name}", prompt, seed=number, **settings | {"max_tokens": 20}))
    return requests


def make_engine(path: Path, **settings: Any) -> TinyEngine:
    return TinyEngine(path, **{"block_size": 16, "skip_tokenizer_init": False} | settings)


def make_device_engine(
    monkeypatch: pytest.MonkeyPatch, path: Path, kernels: str = "reference", **settings: Any
) -> TinyEngine:
    monkeypatch.setattr(selector, "current_platform", lambda _name: AsyncCpuPlatform(kernels))
    return make_engine(path, **{"depth": 2} | settings)


def assert_all_have_their_form(path: Path, tokens: dict[str, list[int]]) -> None:
    tokenizer = get_tokenizer(str(path))
    for name, ids in tokens.items():
        if not name.startswith("free"):
            assert ids[-1] == EOS
            assert_has_form(tokenizer.decode(ids[:-1]), FORMS[int(name.split()[0])])


def test_answers_have_their_form_and_free_rows_are_untouched(llama: Path) -> None:
    tokens = make_engine(llama).generate(requests_of(llama))
    assert_all_have_their_form(llama, tokens)
    free = [request for request in requests_of(llama) if request.request_id.startswith("free")]
    alone = make_engine(llama).generate(free)
    assert alone == {name: tokens[name] for name in alone}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_device_with_steps_in_flight_gives_the_tokens_of_the_plain_runner(
    llama: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_engine(llama).generate(requests_of(llama))
    draws: list[int] = []
    compute_masked = Sampler.compute_masked
    monkeypatch.setattr(Sampler, "compute_masked", lambda self, *given: (draws.append(1), compute_masked(self, *given)))
    assert make_device_engine(monkeypatch, llama, depth=depth).generate(requests_of(llama)) == plain
    assert draws


def test_forms_beside_other_features_in_one_batch_on_a_device(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = get_tokenizer(str(llama)).encode
    common: dict[str, Any] = {"eos_token_ids": [EOS], "ignore_eos": False, "temperature": 1.0, "max_tokens": 40}
    form = form_of(FORMS[0])

    def requests() -> list[Any]:
        features: list[dict[str, Any]] = [
            {"structured_outputs": form},
            {"structured_outputs": form, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logprobs": 3},
            {"structured_outputs": form, "logit_bias": {encode("4")[0]: 4.0}, "top_k": 5},
            {"bad_words_token_ids": [encode("ab")[:1], [7, 8]], "min_tokens": 4},
            {"structured_outputs": form, "prompt_logprobs": 1},
            {},
        ]
        return [
            make_request(f"r{index}", [5 + index] * (3 + index), seed=index, **common | fields)
            for index, fields in enumerate(features)
        ]

    plain = make_engine(llama).generate(requests())
    for depth in (1, 2):
        assert make_device_engine(monkeypatch, llama, depth=depth).generate(requests()) == plain
    for name in ("r0", "r1", "r2", "r4"):
        text = get_tokenizer(str(llama)).decode([token for token in plain[name] if token != EOS])
        assert text.startswith("{")


def test_masks_are_begun_before_the_next_step_is_planned_and_awaited_after(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def log(owner: Any, method: str, name: str) -> None:
        real = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, method, call)

    log(Grammars, "begin_fill", "begin")
    log(Filling, "finish", "finish")
    log(Scheduler, "schedule", "plan")
    request = make_request(
        "r",
        [5, 6, 7],
        max_tokens=12,
        ignore_eos=True,
        eos_token_ids=[EOS],
        structured_outputs=form_of({"regex": "[a-f]{40}"}),
    )
    assert len(make_device_engine(monkeypatch, llama).generate([request])["r"]) == 12
    text = " ".join(events)
    assert text.count("begin") == text.count("finish") == 12
    assert text.count("begin plan finish") >= 9  # all but the first and the last


@pytest.mark.exhaustive
def test_the_gpu_s_kernels_keep_to_the_masks(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def requests() -> list[Any]:
        common: dict[str, Any] = {"ignore_eos": False, "eos_token_ids": [EOS], "temperature": 1.0}
        form = form_of({"regex": "[a-f]{2,4}"})
        return [
            make_request("free", [5, 6], seed=1, **common | {"max_tokens": 5}),
            make_request("form", [5, 6], seed=1, structured_outputs=form, **common),
        ]

    plain = make_engine(llama).generate(requests())
    assert make_device_engine(monkeypatch, llama, kernels="cuda").generate(requests()) == plain


def test_a_row_thinks_first_and_then_keeps_to_its_form(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = get_tokenizer(str(llama))
    (end,) = tokenizer.encode("z")

    def requests() -> list[Any]:
        form, bias = form_of({"regex": "[a-f]{2,4}"}), {end: 3.0}
        return [
            make_request(
                f"r{seed}",
                [5, 6],
                seed=seed,
                temperature=1.0,
                max_tokens=150,
                ignore_eos=False,
                eos_token_ids=[EOS],
                structured_outputs=form,
                thinking=Thinking([end]),
                logit_bias=bias,
            )
            for seed in range(6)
        ]

    plain = make_engine(llama).generate(requests())
    assert make_device_engine(monkeypatch, llama).generate(requests()) == plain
    for ids in plain.values():
        assert end in ids or EOS in ids  # a model may also end while it thinks
        if end in ids:
            assert re.fullmatch(
                "[a-f]{2,4}", tokenizer.decode([token for token in ids[ids.index(end) + 1 :] if token != EOS])
            )
    assert any(end in ids[1:] for ids in plain.values())


@pytest.mark.parametrize("extra", [{}, {"logit_bias": {7: 1.0}, "frequency_penalty": 0.5}])
def test_a_form_comes_when_the_budget_of_thoughts_is_spent(
    llama: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> None:
    """Without `extra` the masks of rows with a form are all that their draws need, and one graph makes them."""
    tokenizer = get_tokenizer(str(llama))
    (end,) = tokenizer.encode("z")

    def requests() -> list[Any]:
        return [
            make_request(
                f"r{seed}",
                [5, 6],
                seed=seed,
                temperature=1.0,
                max_tokens=60,
                ignore_eos=False,
                eos_token_ids=[EOS],
                structured_outputs=form_of({"regex": "[a-f]{2,4}"}) if seed % 3 else None,
                thinking=Thinking([end]),
                thinking_token_budget=3 * seed,
                min_tokens=30 if seed % 2 else 0,
                **extra,
            )
            for seed in range(6)
        ]

    plain = make_engine(llama).generate(requests())
    assert make_device_engine(monkeypatch, llama).generate(requests()) == plain
    for seed in range(6):
        ids = plain[f"r{seed}"]
        if EOS not in ids[: 3 * seed]:
            assert end in ids[: 3 * seed + 1]
        if seed % 3 and end in ids:
            answer = tokenizer.decode([token for token in ids[ids.index(end) + 1 :] if token != EOS])
            assert re.fullmatch("[a-f]{2,4}", answer) and ids.count(EOS) == 1  # a text that is complete ends


def test_thinking_crosses_a_process_border() -> None:
    params = SamplingParams(structured_outputs=form_of({"regex": "a"}), thinking=Thinking([1, 2], 3))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("device", [False, True])
def test_preempted_rows_go_on_where_they_were(llama: Path, device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def requests() -> list[Any]:
        forms = [{"regex": "[a-f ]{60}"}, {"json": PERSON, "disable_any_whitespace": True}] * 3
        return [
            make_request(
                f"r{index}",
                [5 + index] * 20,
                seed=index,
                temperature=1.0,
                max_tokens=80,
                ignore_eos=False,
                eos_token_ids=[EOS],
                structured_outputs=form_of(fields),
            )
            for index, fields in enumerate(forms)
        ]

    plenty = make_engine(llama, block_size=4).generate(requests())
    page_bytes = 3 * 2 * 2 * 16 * 4 * 4
    small: dict[str, Any] = {"block_size": 4, "kv_cache_memory_bytes": 60 * page_bytes}
    tight = make_device_engine(monkeypatch, llama, **small) if device else make_engine(llama, **small)
    assert tight.generate(requests()) == plenty
    assert tight.scheduler.stats().num_preemptions > 0


def test_other_constraints_narrow_a_form_and_are_told_when_nothing_is_left(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = get_tokenizer(str(llama))
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    common: dict[str, Any] = {
        "ignore_eos": False,
        "eos_token_ids": [EOS],
        "structured_outputs": form_of({"regex": "[ab]{1,9}"}),
    }
    requests = [
        ("only b", {"bad_words_token_ids": [[a]]}),
        ("only a", {"allowed_token_ids": [a, EOS]}),
        ("long", {"min_tokens": 8}),
        ("longer than the form", {"min_tokens": 12, "max_tokens": 14}),
        ("nothing", {"allowed_token_ids": [b + 1]}),
    ]
    for engine in (make_engine(llama), make_device_engine(monkeypatch, llama)):
        tokens = engine.generate([make_request(name, [5, 6], **common | params) for name, params in requests])
        texts = {name: tokenizer.decode([id for id in ids if id != EOS]) for name, ids in tokens.items()}
        assert re.fullmatch("b+", texts["only b"]) and re.fullmatch("a+", texts["only a"])
        assert re.fullmatch("[ab]{1,9}", texts["long"]) and len(tokens["long"]) >= 8
        assert re.fullmatch("[ab]{1,9}", texts["longer than the form"])
        assert "forbid every token" in (engine.news["nothing"][-1].error or "")


def test_siblings_logprobs_and_stop_strings_work_beside_a_form(llama: Path) -> None:
    llm = LLM(str(llama), dtype="float32", max_model_len=128, kv_cache_memory_bytes=8 << 20)
    params = SamplingParams(
        n=4, temperature=1.2, seed=3, max_tokens=60, logprobs=2, structured_outputs=form_of(FORMS[2])
    )
    (output,) = llm.generate("hello", params, use_tqdm=False)
    assert len({sequence.text for sequence in output.outputs}) > 1
    for sequence in output.outputs:
        assert_has_form(sequence.text, FORMS[2])
        assert sequence.logprobs is not None and len(sequence.logprobs) == len(sequence.token_ids)
    stopped = SamplingParams(max_tokens=60, stop="-", structured_outputs=form_of(FORMS[2]))
    (output,) = llm.generate("hello", stopped, use_tqdm=False)
    assert re.fullmatch("[a-c]{2,5}", output.outputs[0].text) and output.outputs[0].finish_reason == "stop"
    with pytest.raises(RequestError, match="look-around") as caught:
        llm.generate("hello", SamplingParams(structured_outputs=form_of({"regex": "(?=a)"})), use_tqdm=False)
    assert caught.value.param == "regex"


@pytest.mark.parametrize("core", ["inproc", "process"])
def test_a_server_s_engine_follows_forms_in_a_thread_and_in_a_process(llama: Path, core: Any) -> None:
    async def run() -> str:
        args = EngineArgs(model=str(llama), dtype="float32", max_model_len=128, kv_cache_memory_bytes=8 << 20)
        engine = AsyncLLM(args.create_engine_config(), core=core)
        try:
            with pytest.raises(RequestError, match="cannot be used"):
                params = SamplingParams(structured_outputs=form_of({"grammar": 'start: "a'}))
                async for _ in engine.generate("hello", params, "bad"):
                    pass
            text = ""
            params = SamplingParams(temperature=1.0, seed=1, max_tokens=80, structured_outputs=form_of(FORMS[0]))
            async for output in engine.generate("hello", params, "good"):
                text = output.outputs[0].text
            return text
        finally:
            engine.shutdown()

    assert_has_form(asyncio.run(run()), FORMS[0])
