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
    *(
        "<|open|>",
        "<|close|>",
        "<|sep|>",
        "｜DSML｜",
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        "<|tool_call>",
        "<tool_call|>",
    ),
    *('<|"|>', "]<]minimax[>[", "<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    *(
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|eom|>",
        "<|eot|>",
        "<|message_model|>",
        "<|content_text|>",
        "<|end_message|>",
    ),
    *("<|content_invoke_tool_json|>",),
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


def _qwen(calls: Calls, begin: str = "<tool_call>", end: str = "</tool_call>", line: str = "\n") -> str:
    written = []
    for name, arguments in calls:
        parameters = "".join(
            f"<parameter={key}>{line}{_text(value)}{line}</parameter>\n" for key, value in arguments.items()
        )
        written.append(f"{begin}\n<function={name}>\n{parameters}</function>\n{end}")
    return "\n".join(written)


def _glm(calls: Calls, line: str = "\n", separator: str = "", tag: str = "") -> str:
    written = []
    for name, arguments in calls:
        pairs = "".join(
            f"<{tag}arg_key>{k}</{tag}arg_key>{line}<{tag}arg_value>{_text(v)}</{tag}arg_value>{line}"
            for k, v in arguments.items()
        )
        written.append(f"<{tag}tool_call>{name}{separator}{line}{pairs}</{tag}tool_call>")
    return line.join(written)


def _cdata(value: Any) -> str:
    return f"<![CDATA[{value}]]>" if isinstance(value, str) else _json(value)


def _invokes(calls: Calls, space: str = "") -> str:
    return "\n".join(
        f'<{space}invoke name="{name}">\n'
        + "".join(
            f'<{space}parameter name="{key}">{_text(value)}</{space}parameter>\n' for key, value in arguments.items()
        )
        + f"</{space}invoke>"
        for name, arguments in calls
    )


def _dsml(calls: Calls, section: str, space: str = "") -> str:
    tag = f"｜DSML｜{space}"
    written = "\n".join(
        f'<{tag}invoke name="{name}">\n'
        + "".join(
            f'<{tag}parameter name="{key}" string="{_json(isinstance(value, str))}">{_text(value)}</{tag}parameter>\n'
            for key, value in arguments.items()
        )
        + f"</{tag}invoke>"
        for name, arguments in calls
    )
    return f"<{tag}{section}>\n{written}\n</{tag}{section}>"


def _kimi_k3(calls: Calls) -> str:
    types = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    written = []
    for index, (name, arguments) in enumerate(calls):
        pairs = "".join(
            f'<|open|>argument key="{key}" type="{types.get(type(value), "null")}"<|sep|>{_text(value)}<|close|>argument<|sep|>'
            for key, value in arguments.items()
        )
        written.append(f'<|open|>call tool="{name}" index="{index + 1}"<|sep|>{pairs}<|close|>call<|sep|>')
    return f"<|open|>tools<|sep|>{''.join(written)}<|close|>tools<|sep|>"


def _minimax_m3(calls: Calls) -> str:
    mark = "]<]minimax[>["

    def element(name: str, value: Any) -> str:
        if isinstance(value, dict):
            inner = "".join(element(key, part) for key, part in value.items())
        elif isinstance(value, list):
            inner = "".join(element("item", part) for part in value)
        else:
            inner = _text(value)
        return f"{mark}<{name}>{inner}{mark}</{name}>"

    written = [
        f'{mark}<invoke name="{name}">\n'
        + "".join(f"{element(key, value)}\n" for key, value in arguments.items())
        + f"{mark}</invoke>\n"
        for name, arguments in calls
    ]
    return f"{mark}<tool_call>\n{''.join(written)}{mark}</tool_call>"


def _braces(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_braces(part)}' for key, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_braces, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else _json(value)


def _plamo3(calls: Calls) -> str:
    def tag(name: str) -> str:
        return f"<|plamo:{name}:plamo|>"

    written = [
        f"{tag('begin_tool_request')}{tag('begin_tool_name')}{name}{tag('end_tool_name')}{tag('begin_tool_arguments')}"
        f"<|plamo:constrain|>json<|plamo:msg|>{_json(arguments)}{tag('end_tool_arguments')}{tag('end_tool_request')}"
        for name, arguments in calls
    ]
    return f"{tag('begin_tool_requests')}{''.join(written)}{tag('end_tool_requests')}"


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
        case "longcat":
            return "\n".join(f"<longcat_tool_call>\n{each}\n</longcat_tool_call>" for each in _objects(calls))
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
        case "qwen3_coder" | "qwen3_xml" | "step3p5" | "step5":
            return _qwen(calls)
        case "mimo":
            return _qwen(calls, line="")
        case "seed_oss":
            return _qwen(calls, "<seed:tool_call>", "</seed:tool_call>")
        case "glm45" | "poolside_v1":
            return _glm(calls)
        case "glm47" | "ling3":
            return _glm(calls, line="")
        case "hy_v3":
            return f"<tool_calls>\n{_glm(calls, separator='<tool_sep>')}\n</tool_calls>"
        case "hy_v4":
            return f"<tool_calls>{_glm(calls, line='')}</tool_calls>"
        case "k2_horizon":
            return f"<ifm|tool_calls>\n{_glm(calls, tag='ifm|')}\n</ifm|tool_calls>"
        case "apertus":
            return (
                f"<|tools_prefix|>[{', '.join(_json({name: arguments}) for name, arguments in calls)}]<|tools_suffix|>"
            )
        case "cohere_command3" | "cohere_command4":
            objects = [
                _json({"tool_call_id": str(index), "tool_name": name, "parameters": arguments})
                for index, (name, arguments) in enumerate(calls)
            ]
            return f"<|START_ACTION|>[\n{', '.join(objects)}\n]<|END_ACTION|>"
        case "gigachat3":
            return "".join(f"<|function_call|>{each}" for each in _objects(calls))
        case "dots":
            return f"<dots_function_call>\n{_invokes(calls)}\n</dots_function_call>"
        case "muse" | "muse_glimmer" | "musespark1x":
            return "<|eom|><|start|>assistant ".join(
                f"to={call[0]}<|message|><atem:function_calls>\n{_invokes([call], 'atem:')}\n</atem:function_calls>"
                for call in calls
            )
        case "inkling":
            objects = [_json({"name": name, "args": arguments}) for name, arguments in calls]
            return "<|message_model|>".join(f"<|content_invoke_tool_json|>{each}<|end_message|>" for each in objects)
        case "deepseek_v32":
            return _dsml(calls, "function_calls")
        case "deepseek_v4":
            return _dsml(calls, "tool_calls")
        case "deepseek_v41":
            return _dsml(calls, "calls", " ")
        case "kimi_k3":
            return _kimi_k3(calls)
        case "minicpm5":
            return "\n".join(
                f'<function name="{name}">'
                + "".join(f'<param name="{key}">{_cdata(value)}</param>' for key, value in arguments.items())
                + "</function>"
                for name, arguments in calls
            )
        case "minimax_m3":
            return _minimax_m3(calls)
        case "gemma4":
            return "".join(f"<|tool_call>call:{name}{_braces(arguments)}<tool_call|>" for name, arguments in calls)
        case "functiongemma":
            return "".join(
                f"<start_function_call>call:{name}{{"
                + ",".join(f"{key}:<escape>{_text(value)}<escape>" for key, value in arguments.items())
                + "}<end_function_call>"
                for name, arguments in calls
            )
        case "plamo3":
            return _plamo3(calls)
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
