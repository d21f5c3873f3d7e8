"""Whole engines on the platform beside the same engines with references on the CPU: equal tokens for tiny models of many
families, however their steps are cut, and across sleep; and the features of requests: sampling, logprobs of prompts, grammars.

Half of the requests are greedy, half draw with a seed.
"""

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from quire.conformance import oracle_platform
from quire.conformance.contract import ENGINE_SETTINGS, Failed, NotClaimed, Subject, check, expect
from quire.conformance.tiny_models import MODELS, VOCAB_SIZE, write_model
from quire.entrypoints.llm import LLM
from quire.errors import ConfigError
from quire.sampling_params import SamplingParams, StructuredOutputsParams

LENGTHS = (5, 30, 61, 17, 1, 44)
NEW_TOKENS, TOP = 16, 5
EXACT, ROUNDED = 2e-3, 0.15
"""How far logprobs may be off: in float32, and in types and codes that round more. Two tokens nearer than that are a tie."""
SURE = "llama"
"""The model that every platform runs."""
QUANTIZED = {"int4": ROUNDED, "int8": ROUNDED, "fp8": 0.4}
"""Number formats, and how far logprobs may be off. A float8 has three bits of fraction, and activations are rounded to it at run
time: a last bit of a sum can change one by 6 %."""


class Answer(NamedTuple):
    """What one request got: tokens, and for each the logprobs of the likeliest and its own."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    num_cached: int


def prompts_of(lengths: Sequence[int] = LENGTHS) -> list[dict[str, list[int]]]:
    """Token prompts, each different."""
    return [{"prompt_token_ids": [(7 * i * i + 13 * n) % (VOCAB_SIZE - 3) + 3 for i in range(n)]} for n in lengths]


def params_of(count: int, **more: Any) -> list[SamplingParams]:
    """Greedy and seeded in turn."""
    turns = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 11}]
    common = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": TOP} | more
    return [SamplingParams(**(turns[number % 2] | common)) for number in range(count)]


@contextlib.contextmanager
def engine(subject: Subject, device: str, model: str = SURE, **settings: Any) -> Iterator[LLM]:
    """An engine in this process."""
    path = write_model(model, subject.folder)
    llm = LLM(str(path), **{**ENGINE_SETTINGS, "device": device, "dtype": subject.dtype_name, **settings})
    try:
        yield llm
    finally:
        llm.shutdown()


def ask(
    llm: LLM,
    prompts: list[dict[str, list[int]]] | None = None,
    params: list[SamplingParams] | None = None,
    **more: Any,
) -> list[Answer]:
    """Each request's answer."""
    prompts = prompts_of() if prompts is None else prompts
    params = params_of(len(prompts), **more) if params is None else params
    found: list[Any] = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    answers: list[Answer] = []
    for output in found:
        completion = output.outputs[0]
        logprobs = [{token: each.logprob for token, each in entry.items()} for entry in completion.logprobs]
        answers.append(Answer(list(completion.token_ids), logprobs, output.num_cached_tokens or 0))
    return answers


def oracle(subject: Subject, model: str = SURE, **settings: Any) -> list[Answer]:
    """What references on the CPU answer; computed once."""
    key = f"oracle {model} {sorted(settings.items())}"
    if key not in subject.memory:
        with engine(subject, oracle_platform.NAME, model, **settings) as llm:
            subject.memory[key] = ask(llm)
    return subject.memory[key]


def compare(got: list[Answer], expected: list[Answer], limit: float) -> str:
    """Tokens are equal, up to a tie, and logprobs near. Raises Failed: they are not."""
    worst, same, total = 0.0, 0, 0
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        total += len(theirs.tokens)
        expect(
            len(ours.tokens) == len(theirs.tokens),
            f"request {number} has another length",
            len(theirs.tokens),
            len(ours.tokens),
        )
        for place, (mine, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
            table = theirs.logprobs[place]
            worst = max(worst, abs(ours.logprobs[place].get(other, -99.0) - table[other]))
            expect(
                worst <= limit,
                f"request {number}, token {place}: the logprob is off",
                f"within {limit} of {table}",
                worst,
            )
            if mine == other:
                same += 1
            elif abs(table.get(mine, -99.0) - table[other]) > limit:
                raise Failed(f"request {number} differs from token {place} on", theirs.tokens, ours.tokens)
            else:  # a tie: what follows is another text
                break
    return f"{same} of {total} tokens compared and equal, logprobs off by {worst:.0e}"


def limit_of(subject: Subject) -> float:
    """How near the platform's most exact type comes to the reference."""
    return EXACT if subject.dtype_name == "float32" else ROUNDED


def check_model(model: str, subject: Subject) -> str:
    """One family, in chunks of prompts beside decodes."""
    expected = oracle(subject, model)
    try:
        with engine(subject, subject.name, model) as llm:
            ask(llm)  # what is captured, recorded or compiled at first is used then
            llm.reset_prefix_cache()
            return compare(ask(llm), expected, limit_of(subject))
    except ConfigError as error:
        if model == SURE:
            raise
        raise NotClaimed(str(error)) from error


for _model in MODELS:
    if _model != "bert":
        check(f"engine/{_model}", f"a tiny {_model} gives the tokens that references on the CPU give")(
            functools.partial(check_model, _model)
        )


def check_quantized(method: str, subject: Subject) -> str:
    """A plain model whose weights become codes when they are loaded."""
    if method == "fp8":
        subject.claims("fp8")
    expected = oracle(subject, quantization=method)
    greedy = slice(0, None, 2)  # noise turns what is nearly a tie into another draw
    with engine(subject, subject.name, quantization=method) as llm:
        return compare(ask(llm)[greedy], expected[greedy], QUANTIZED[method])


for _method in QUANTIZED:
    check(f"engine/quantized-{_method}", f"weights in {_method} give what references give with the same weights")(
        functools.partial(check_quantized, _method)
    )


@check("engine/pooling", "embeddings are those of references on the CPU")
def check_pooling(subject: Subject) -> str:
    """An encoder's."""
    embeddings: list[list[list[float]]] = []
    try:
        for device in (oracle_platform.NAME, subject.name):
            with engine(subject, device, "bert", runner="pooling", max_num_batched_tokens=256) as llm:
                outputs: list[Any] = llm.embed(prompts_of(), use_tqdm=False)  # type: ignore[arg-type]
                embeddings.append([list(output.outputs.embedding) for output in outputs])
    except ConfigError as error:
        raise NotClaimed(str(error)) from error
    worst = max(abs(a - b) for pair in zip(*embeddings, strict=True) for a, b in zip(*pair, strict=True))
    limit = 1e-4 if subject.dtype_name == "float32" else 0.05
    expect(worst <= limit, "embeddings differ", f"values within {limit}", worst)
    return f"{len(embeddings[0])} embeddings off by {worst:.0e}"


@check("engine/dtypes", "the model runs in every type that is claimed, near to float32")
def check_dtypes(subject: Subject) -> str:
    """Greedy requests, each type beside references in the same type."""
    told: list[str] = []
    for name in subject.capabilities.dtypes.value:
        expected = oracle(subject, dtype=name)[::2]
        with engine(subject, subject.name, dtype=name) as llm:
            told.append(f"{name}: {compare(ask(llm)[::2], expected, EXACT if name == 'float32' else ROUNDED)}")
    return "; ".join(told)


def check_same(settings: dict[str, Any], subject: Subject) -> str:
    """Other settings of the scheduler change no token."""
    told = ""
    for model in ("qwen3-next",) if subject.is_quick else (SURE, "gemma3", "qwen3-next"):
        with engine(subject, subject.name, model, **settings) as llm:
            told = compare(ask(llm), oracle(subject, model), limit_of(subject))
    return told


_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "small-chunks": ("prompts in small chunks", {"max_num_batched_tokens": 16}),
    "whole-prompts": ("prompts at once", {"max_num_batched_tokens": 256}),
    "one-at-a-time": ("requests one after another", {"max_num_seqs": 1}),
    "eager": ("steps without recording or graphs", {"enforce_eager": True}),
    "synchronous": ("one step in flight", {"async_scheduling": False}),
}
for _name, (_what, _settings) in _WAYS.items():
    check(f"engine/{_name}", f"{_what}: the same tokens")(functools.partial(check_same, _settings))


@check("engine/prefix-cache", "a prompt that was computed before is not computed again, and gives the same tokens")
def check_prefix_cache(subject: Subject) -> str:
    """The same requests twice."""
    with engine(subject, subject.name, enable_prefix_caching=True) as llm:
        ask(llm)
        second = ask(llm)
    told = compare(second, oracle(subject), limit_of(subject))
    cached = sum(answer.num_cached for answer in second)
    expect(cached, "nothing was found in the cache", "cached tokens above 0", 0)
    return f"{cached} prompt tokens from the cache; {told}"


def check_preemption(mode: str, subject: Subject) -> str:
    """More requests than there are pages for."""
    settings: dict[str, Any] = {"num_gpu_blocks_override": 10, "max_model_len": 100, "preemption_mode": mode}
    settings["disable_log_stats"] = False
    if mode == "swap":
        subject.claims("swap")
        settings["swap_space"] = 0.01
    with engine(subject, subject.name, **settings) as llm:
        told = compare(ask(llm), oracle(subject), limit_of(subject))
        count = sum(getattr(each, "value", 0) for each in llm.get_metrics() if "preemptions" in each.name)
    expect(count, "nothing was preempted", "preemptions above 0, with pages for few of the requests", count)
    return f"{count:.0f} preemptions; {told}"


for _mode in ("recompute", "swap"):
    check(f"engine/preemption-{_mode}", f"requests whose pages are taken away ({_mode}) go on with the same tokens")(
        functools.partial(check_preemption, _mode)
    )


@check("engine/deterministic", "with --deterministic a request has the same logprobs, to the bit, alone and in a batch")
def check_deterministic(subject: Subject) -> str:
    """One by one and together."""
    subject.claims_settings(deterministic=True)
    with engine(subject, subject.name, deterministic=True, enable_prefix_caching=False) as llm:
        together = ask(llm)
        requests = zip(prompts_of(), params_of(len(LENGTHS)), strict=True)
        alone = [ask(llm, [prompt], [params])[0] for prompt, params in requests]
    for number, (one, other) in enumerate(zip(together, alone, strict=True)):
        expect(one.logprobs == other.logprobs, f"request {number} depends on its batch", other.tokens, one.tokens)
    return f"{len(alone)} requests, {NEW_TOKENS} tokens each"


def check_sleep(level: int, subject: Subject) -> str:
    """Sleep, wake, and the same tokens."""
    subject.claims("sleep")
    with engine(subject, subject.name) as llm:
        before = ask(llm)
        free, _ = subject.runtime.memory_info()
        llm.sleep(level)
        freed = subject.runtime.memory_info()[0] - free
        llm.wake_up()
        after = ask(llm)
    least = int(0.9 * ENGINE_SETTINGS["kv_cache_memory_bytes"])
    expect(
        freed >= least or subject.runtime.kv_cache_cap() is not None,
        "sleep gives no memory back",
        f"{least} bytes, most of the pages'",
        freed,
    )
    expect(
        [each.tokens for each in before] == [each.tokens for each in after],
        "other tokens after waking up",
        before[0].tokens,
        after[0].tokens,
    )
    return compare(after, oracle(subject), limit_of(subject))


for _level in (1, 2):
    _about = f"an engine that sleeps (level {_level}) gives memory back, and gives the same tokens when it wakes up"
    check(f"sleep/level-{_level}", _about, is_alone=True)(functools.partial(check_sleep, _level))


SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 7},
    {"temperature": 0.7, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.6, "presence_penalty": 0.7, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    {"temperature": 0.9, "logit_bias": {5: 4.0, 9: -100.0}, "min_tokens": 4, "stop_token_ids": [300]},
    {"temperature": 1.0, "allowed_token_ids": [3, 50, 200, 380]},
    {"temperature": 0.0, "bad_words_token_ids": [[5], [7, 8]]},
)
TEXT = "A city, and its size:"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "size": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, tuple[StructuredOutputsParams, str]] = {
    "choice": (StructuredOutputsParams(choice=["heron", "hen", "swan"]), "heron|hen|swan"),
    "regex": (StructuredOutputsParams(regex=r"[A-C]{3}-\d{4}"), r"[A-C]{3}-\d{4}"),
    "json": (StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), r"\{.*\}"),
}


@check("engine/sampling", "requests with every sampling feature, side by side, draw the references' tokens")
def check_sampling(subject: Subject) -> str:
    """Steps in which some rows are plain and others are edited, filtered or masked."""
    params = [
        SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=TOP, seed=number, **given)
        for number, given in enumerate(SAMPLING)
    ]
    prompts = prompts_of([3 * (number + 2) for number in range(len(params))])
    answers = []
    for device in (oracle_platform.NAME, subject.name):
        with engine(subject, device) as llm:
            answers.append(ask(llm, prompts, params))
    return f"{len(params)} kinds of requests: {compare(answers[1], answers[0], limit_of(subject))}"


@check("engine/prompt-logprobs", "the logprobs of a prompt's own tokens are those of references, in any chunks")
def check_prompt_logprobs(subject: Subject) -> str:
    """Prompts that take several steps."""
    params, found = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0), []
    for device in (oracle_platform.NAME, subject.name):
        with engine(subject, device, max_num_batched_tokens=32) as llm:
            outputs: list[Any] = llm.generate(prompts_of(), params, use_tqdm=False)  # type: ignore[arg-type]
            entries = [entry for output in outputs for entry in output.prompt_logprobs if entry is not None]
            found.append([each.logprob for entry in entries for each in entry.values()])
    worst = max(abs(ours - theirs) for ours, theirs in zip(*found, strict=True))
    expect(worst <= limit_of(subject), "logprobs of prompts differ", f"at most {limit_of(subject)}", worst)
    return f"{len(found[0])} logprobs off by {worst:.0e}"


@check("engine/grammars", "texts that follow a grammar are those that references write, and follow it")
def check_grammars(subject: Subject) -> str:
    """The built-in demo model, which has a tokenizer."""
    settings: dict[str, Any] = {"dtype": subject.dtype_name, "max_model_len": 128, "kv_cache_memory_bytes": 16 << 20}
    params = [
        SamplingParams(temperature=0.8, seed=5, max_tokens=40, structured_outputs=grammar)
        for grammar, _ in GRAMMARS.values()
    ]
    texts: list[list[str]] = []
    for device in (oracle_platform.NAME, subject.name):
        with LLM(device=device, disable_log_stats=True, **settings) as llm:
            outputs = llm.generate([TEXT] * len(params), params, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
    for name, (_, pattern), theirs, ours in zip(GRAMMARS, GRAMMARS.values(), *texts, strict=True):
        follows = re.fullmatch(pattern, ours) and (name != "json" or set(json.loads(ours)) == set(SCHEMA["required"]))
        expect(follows, f"a text does not follow its grammar ({name})", theirs, ours)
        is_same = ours == theirs or subject.dtype_name != "float32"
        expect(is_same, f"another text follows the grammar ({name})", theirs, ours)
    return ", ".join(texts[1])
