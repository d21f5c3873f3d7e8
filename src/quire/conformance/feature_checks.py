"""Requests' features in whole engines: sampling, logprobs of prompts, and grammars, beside references on the CPU."""

import json
import re
from typing import Any

from quire.conformance import oracle_platform
from quire.conformance.contract import Failed, Subject, check
from quire.conformance.engine_checks import NEW_TOKENS, TOP, ask, compare, engine, limit_of, prompts_of
from quire.entrypoints.llm import LLM
from quire.sampling_params import SamplingParams, StructuredOutputsParams

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
    if not worst <= limit_of(subject):
        raise Failed("logprobs of prompts differ", f"at most {limit_of(subject)}", worst)
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
        if not re.fullmatch(pattern, ours) or (name == "json" and set(json.loads(ours)) != set(SCHEMA["required"])):
            raise Failed(f"a text does not follow its grammar ({name})", theirs, ours)
        if ours != theirs and subject.dtype_name == "float32":
            raise Failed(f"another text follows the grammar ({name})", theirs, ours)
    return ", ".join(texts[1])
