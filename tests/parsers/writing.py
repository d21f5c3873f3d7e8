"""Calls as models write them, by the layouts of their published chat templates; and a grammar's judgement of texts.

Independent of `quire.parsers`: the tests compare the two.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

Calls = list[tuple[str, dict[str, Any]]]

SPECIAL = (
    *("<|python_tag|>", "<|tool_call|>", "<|action_start|>", "<|plugin|>", "<|action_end|>", "[TOOL_CALLS]", "[ARGS]"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"),
    *("<|start|>", "<tool_call>", "</tool_call>", "</arg_value>"),
)
"""What is special in some tokenizer or other; the grammars of all formats are tested with and without."""
EOS = 256
SPECIAL_IDS = {token: EOS + 1 + index for index, token in enumerate(SPECIAL)}


class _Bytes:
    bos_token_id = None
    eos_token_id = EOS
    tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>", *(token.encode() for token in SPECIAL)]
    special_token_ids = [EOS, *SPECIAL_IDS.values()]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


_TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=[EOS])


def matcher(grammar: str) -> LLMatcher:
    """At the beginning of a grammar of bytes and special tokens."""
    found = LLMatcher(_TOKENIZER, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not found.is_error(), f"{found.get_error()[:800]}\n{grammar}"
    return found


def tokens_of(text: str, special: dict[str, int]) -> list[int]:
    """A text's bytes, and the special tokens in it."""
    ids: list[int] = []
    while text:
        token = next((token for token in special if text.startswith(token)), None)
        ids += list(text[0].encode()) if token is None else [special[token]]
        text = text[len(token or text[0]) :]
    return ids


def accepts(grammar: str, text: str, special: dict[str, int] | None = None) -> bool:
    """Whether a text is a whole text of the grammar."""
    ids = tokens_of(text, special or {})
    start = matcher(grammar)
    return start.try_consume_tokens(ids) == len(ids) and start.is_accepting()


def walk(grammar: str, seed: int, most: int = 1500, begin: Sequence[int] = ()) -> str | None:
    """A text that random choices lead to after `begin`; None where that is refused, or they have not come to an end."""
    draw, at, ids = random.Random(seed), matcher(grammar), list(begin)
    if at.try_consume_tokens(ids) != len(ids):
        return None
    while len(ids) < most:
        bits = np.unpackbits(np.frombuffer(at.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: len(_Bytes.tokens)]).tolist()
        if EOS in allowed and (len(allowed) == 1 or draw.random() < 0.4):
            return b"".join(_Bytes.tokens[token_id] for token_id in ids).decode("utf-8", "replace")
        closing = [token_id for token_id in allowed if token_id in set(b'"}]></)`')]
        plain = [token_id for token_id in allowed if 32 <= token_id < 127 or token_id > EOS] or allowed
        plain = [token_id for token_id in plain if token_id != EOS]
        ids.append(draw.choice(closing if closing and draw.random() < 0.6 else plain))
        assert at.consume_token(ids[-1])
    return None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(calls: Calls, key: str = "arguments") -> list[str]:
    return [f'{{"name": {_json(name)}, "{key}": {_json(arguments)}}}' for name, arguments in calls]


def _list(calls: Calls, key: str = "arguments") -> str:
    return f"[{', '.join(_objects(calls, key))}]"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _qwen(calls: Calls, begin: str = "<tool_call>", end: str = "</tool_call>") -> str:
    written = []
    for name, arguments in calls:
        parameters = "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())
        written.append(f"{begin}\n<function={name}>\n{parameters}</function>\n{end}")
    return "\n".join(written)


def _glm(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n" for k, v in arguments.items())
        written.append(f"<tool_call>{name}\n{pairs}</tool_call>")
    return "\n".join(written)


def _minimax(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        parameters = "".join(
            f'<parameter name="{key}">{_text(value)}</parameter>\n' for key, value in arguments.items()
        )
        written.append(f'<invoke name="{name}">\n{parameters}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(written)}</minimax:tool_call>"


def _step3(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        pairs = "".join(f'<steptml:parameter name="{k}">{_text(v)}</steptml:parameter>' for k, v in arguments.items())
        invoke = f'<steptml:invoke name="{name}">{pairs}</steptml:invoke>'
        written.append(f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoke}<｜tool_call_end｜>")
    return f"<｜tool_calls_begin｜>{''.join(written)}<｜tool_calls_end｜>"


def _python(calls: Calls, between: str = ", ") -> str:
    return between.join(f"{name}({', '.join(f'{k}={_literal(v)}' for k, v in args.items())})" for name, args in calls)


def _literal(value: Any) -> str:
    """A boolean parameter in Python's words; what stands within other values is JSON."""
    return str(value) if isinstance(value, bool) else _json(value)


def _deepseek(calls: Calls, opening: str, closing: str) -> str:
    written = [
        f"<｜tool▁call▁begin｜>{opening.format(name)}{_json(arguments)}{closing}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def _kimi(calls: Calls) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def write(name: str, calls: Calls, special: dict[str, int] | None = None) -> str:
    """Calls in a format, as the models write them that it is named after."""
    match name:
        case "hermes" | "qwen3_json" | "ernie45" | "granite4":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in _objects(calls))
        case "xlam":
            return _list(calls)
        case "llama3_json" | "llama4_json":
            return "; ".join(_objects(calls, "parameters"))
        case "granite":
            return f"<|tool_call|>{_list(calls)}"
        case "granite-20b-fc":
            return "\n".join(f"<function_call> {each}" for each in _objects(calls))
        case "internlm":
            objects = _objects(calls, "parameters")
            return "\n".join(f"<|action_start|><|plugin|>\n{each}<|action_end|>" for each in objects)
        case "jamba" | "hunyuan_a13b":
            return f"<tool_calls>[\n{_list(calls)[1:-1]}\n]</tool_calls>"
        case "phi4_mini_json":
            return f"functools{_list(calls)}"
        case "lfm2":
            return f"<|tool_call_start|>[{_python(calls)}]<|tool_call_end|>"
        case "mistral" if special:
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)
        case "mistral":
            return f"[TOOL_CALLS] {_list(calls)}"
        case "deepseek_v3":
            return _deepseek(calls, "function<｜tool▁sep｜>{}\n```json\n", "\n```")
        case "deepseek_v31":
            return _deepseek(calls, "{}<｜tool▁sep｜>", "")
        case "kimi_k2":
            return _kimi(calls)
        case "qwen3_coder" | "qwen3_xml":
            return _qwen(calls)
        case "seed_oss":
            return _qwen(calls, "<seed:tool_call>", "</seed:tool_call>")
        case "glm45":
            return _glm(calls)
        case "minimax_m2":
            return _minimax(calls)
        case "step3":
            return _step3(calls)
        case "pythonic" | "llama4_pythonic":
            return f"[{_python(calls)}]"
        case "olmo3":
            lines = _python(calls, "\n")
            return f"<function_calls>\n{lines}\n</function_calls>"
        case _:
            raise ValueError(name)
