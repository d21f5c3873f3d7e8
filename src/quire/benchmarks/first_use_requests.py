"""What `quire bench first-use` asks a server for: one request of each feature.

Each is what a client would send; the prompt is added later, because it depends on the model's vocabulary.
"""

import dataclasses
from typing import Any

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Lima"]}}, "required": ["city"]},
    },
}
_MESSAGES = [{"role": "user", "content": "Say something short."}]


@dataclasses.dataclass(frozen=True)
class Feature:
    """A request that uses one feature.

    Attributes:
        name: as the table calls it.
        body: fields of the request beside `model`, `max_tokens` and the prompt.
        path: the route.
        prompt: how the prompt of a completion is made: `short` (16 tokens), `long` (as long as is asked for), `repeated` (always
            the same), `text`; `none` where the body has it.
        needs_tokenizer: a server without a tokenizer refuses it.
    """

    name: str
    body: dict[str, Any] = dataclasses.field(default_factory=dict)
    path: str = COMPLETIONS
    prompt: str = "short"
    needs_tokenizer: bool = False


def _named(**fields: Any) -> list[Feature]:
    return [Feature(name, {name: value}) for name, value in fields.items()]


def _chat(name: str, **fields: Any) -> Feature:
    return Feature(name, {"messages": _MESSAGES, **fields}, CHATS, "none", needs_tokenizer=True)


def _form(kind: str, value: Any) -> Feature:
    return Feature(kind, {"structured_outputs": {kind: value}}, needs_tokenizer=True)


def generating(vocab_size: int) -> list[Feature]:
    """One request of each feature of a model that generates; ids stay below the vocabulary's size."""
    ids = [token for token in (20, 21, 22, 40, 50) if token < vocab_size]
    return [
        Feature("greedy"),
        Feature("temperature", {"temperature": 0.8}),
        Feature("seed", {"temperature": 0.8, "seed": 7}),
        *(Feature(name, {"temperature": 0.8, name: value}) for name, value in (("top_p", 0.9), ("top_k", 20), ("min_p", 0.05))),
        Feature("top_p, large", {"temperature": 1.5, "top_p": 0.999}),
        Feature("top_k, top_p, min_p", {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.02}),
        *_named(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
        Feature("logit_bias", {"logit_bias": {str(ids[0]): 5, str(ids[1]): -5}}),
        *_named(allowed_token_ids=ids, min_tokens=4, logprobs=1),
        Feature("logprobs, 5, sampled", {"logprobs": 5, "temperature": 0.8}),
        Feature("logprobs, 20, all", {"logprobs": 20, "temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5}),
        *_named(prompt_logprobs=1),
        Feature("prompt_logprobs, 5, long", {"prompt_logprobs": 5}, prompt="long"),
        Feature("echo, logprobs", {"echo": True, "logprobs": 1}),
        *_named(n=3),
        Feature("n, sampled", {"n": 3, "temperature": 0.8, "top_p": 0.9}),
        Feature("best_of", {"n": 1, "best_of": 2, "temperature": 0.8, "stream": False}),
        Feature("beam search", {"use_beam_search": True, "n": 2, "stream": False}),
        Feature("stop", {"stop": ["zzz", "\n\n\n"]}, needs_tokenizer=True),
        Feature("stop_token_ids", {"stop_token_ids": [ids[0]], "ignore_eos": False}),
        Feature("bad_words", {"bad_words": ["hello", "quick brown fox"]}, needs_tokenizer=True),
        Feature("text prompt", prompt="text", needs_tokenizer=True),
        Feature("long prompt", prompt="long"),
        Feature("cached prefix", prompt="repeated"),
        Feature("cached prefix, again", prompt="repeated"),
        _form("json", _PERSON),
        _form("regex", r"[a-c]{3,5}\d{2}"),
        _form("choice", ["yes", "no", "perhaps"]),
        _form("grammar", 'root ::= "a" | "b" root'),
        _form("json_object", True),
        Feature("json, sampled", {"structured_outputs": {"json": _PERSON}, "temperature": 0.8, "top_p": 0.9, "logprobs": 2},
                needs_tokenizer=True),
        _chat("chat"),
        _chat("chat, logprobs", logprobs=True, top_logprobs=3),
        _chat("chat, json_schema", response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": _PERSON}}),
        _chat("chat, tools", tools=[_WEATHER], tool_choice="auto"),
        _chat("chat, required tool", tools=[_WEATHER], tool_choice="required"),
    ]  # fmt: skip


def pooling() -> list[Feature]:
    """One request of each route and task of pooling models; a model refuses what it cannot do."""
    pair = {"text_1": "one", "text_2": ["two", "three"]}
    tasks = ("embed", "token_embed", "classify", "token_classify")
    routes = [Feature(task, {"task": task}, "/pooling") for task in tasks]
    routes += [Feature("embeddings", path="/v1/embeddings"), Feature("classes", path="/classify")]
    return [
        *routes,
        *(dataclasses.replace(feature, name=f"{feature.name}, long", prompt="long") for feature in routes),
        Feature("score", pair, "/score", "none", needs_tokenizer=True),
        Feature("rerank", {"query": "one", "documents": ["two", "three"]}, "/rerank", "none", needs_tokenizer=True),
    ]
