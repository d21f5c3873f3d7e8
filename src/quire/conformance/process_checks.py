"""Processes: a core or a rank that dies is replaced and its requests go on; the server answers."""

from typing import Any

from quire import envs
from quire.benchmarks.own_server import started_server
from quire.conformance import oracle_platform
from quire.conformance.contract import Failed, Subject, check
from quire.conformance.engine_checks import ask, compare, engine, limit_of, oracle
from quire.entrypoints.http_client import Target, control
from quire.entrypoints.llm import LLM
from quire.sampling_params import SamplingParams

PROMPT = "The ship came into the harbour, and"
TOKENS = 12


@check(
    "processes/core-dies",
    "a core that is killed in the middle is started again, and the tokens are the same",
    is_long=True,
)
def check_core(subject: Subject) -> str:
    """A kill at the ninth step."""
    expected = oracle(subject)
    mark = subject.folder / "kill-core"
    mark.touch()
    envs.set_variable("QUIRE_FAULTS", f"before-execute@core:kill:9:{mark}")
    try:
        with engine(subject, subject.name, recovery=True) as llm:
            told = compare(ask(llm), expected, limit_of(subject))
    finally:
        envs.set_variable("QUIRE_FAULTS", "")
    if mark.exists():
        raise Failed(
            "the core was not killed", "a core in a process of its own that comes to its ninth step", "no kill"
        )
    return f"killed once; {told}"


@check(
    "processes/server",
    "a server answers a completion and a chat, with the text of references on the CPU",
    is_long=True,
)
def check_server(subject: Subject) -> str:
    """The built-in demo model, greedy."""
    settings = {"dtype": subject.dtype_name, "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
    with LLM(device=oracle_platform.NAME, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        expected = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with started_server(["--device", subject.name, *words]) as url:
        target = Target.parse(url, {}, setting="url")
        model = control(target, "GET", "/v1/models", None)["data"][0]["id"]
        common: dict[str, Any] = {"model": model, "temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
        answer = control(target, "POST", "/v1/completions", common | {"prompt": PROMPT})
        chat = control(
            target, "POST", "/v1/chat/completions", common | {"messages": [{"role": "user", "content": PROMPT}]}
        )
    got = answer["choices"][0]["text"]
    if got != expected and limit_of(subject) < 0.01:
        raise Failed("the server's text differs", expected, got)
    if not chat["choices"][0]["message"]["content"]:
        raise Failed("the chat's answer is empty", "a text", chat)
    return f"{got!r}"
