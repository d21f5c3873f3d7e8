"""Calls as the makers' own packages write them: read back, and allowed where a call is forced.

Mistral's tokenizers are part of mistral-common, Llama 4's chat template of Transformers.
"""

import json
from pathlib import Path
from typing import Any

import jinja2
import mistral_common
import pytest
from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tests.parsers.writing import accepts

from quire.parsers.call_grammar import calls_only
from quire.parsers.formats import TOOLS
from quire.parsers.offered import offered_functions
from quire.parsers.pieces import Answer
from quire.parsers.stream import AnswerParser

DATA = Path(mistral_common.__file__).parent / "data"
MISTRALS = sorted(path.name for path in DATA.iterdir() if ".v1" not in path.name and path.suffix != ".py")
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": 'K"öln\n', "days": [1, 2.5]}), ("now", {})]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
OFFERED: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


def read(name: str, parts: list[str]) -> Answer:
    parser, answer = AnswerParser(tools=TOOLS[name], offered=OFFERED), Answer()
    pieces = [piece for part in parts for piece in parser.push(part)]
    for piece in (*pieces, *parser.finish()):
        answer.add(piece)
    return answer


def calls_of(answer: Answer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def written_by_mistral(file: str) -> str:
    """What the model writes, by its own tokenizer: all behind the user's message, without the token that ends it."""
    tokenizer = MistralTokenizer.from_file(str(DATA / file), mode=ValidationMode.finetuning)
    calls = [
        ToolCall(id=f"abcDEF12{index}", function=FunctionCall(name=name, arguments=json.dumps(arguments)))
        for index, (name, arguments) in enumerate(CALLS)
    ]
    request = ChatCompletionRequest(model="m", messages=[UserMessage(content="Hi"), AssistantMessage(tool_calls=calls)])
    tokens = tokenizer.encode_chat_completion(request).tokens
    text = tokenizer.instruct_tokenizer.tokenizer.decode(tokens, special_token_policy=SpecialTokenPolicy.KEEP)
    return text.partition("[/INST]")[2].removesuffix("</s>").replace("▁", " ")


@pytest.mark.parametrize("file", MISTRALS)
def test_calls_as_mistrals_tokenizers_write_them_are_read(file: str) -> None:
    text = written_by_mistral(file)
    assert text.startswith("[TOOL_CALLS]")
    for parts in ([text], list(text)):
        answer = read("mistral", parts)
        assert (calls_of(answer), answer.content) == (CALLS, "")
    # A forced call has no id: the server makes one.
    is_allowed = accepts(calls_only(TOOLS["mistral"], offered_functions(OFFERED), {}, only_one=False), text)
    assert is_allowed == ('"id"' not in text)


@pytest.mark.parametrize("call", CALLS)
def test_calls_as_llama_4s_template_writes_them_are_read(call: tuple[str, dict[str, Any]]) -> None:
    template = pytest.importorskip("transformers.models.llama4.processing_llama4").chat_template
    function = {"name": call[0], "arguments": call[1]}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
    ]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)  # as Transformers has it
    text = environment.from_string(template).render(messages=messages, bos_token="")
    written = text.rpartition("<|header_end|>\n\n")[2].removesuffix("<|eot|>")
    written = written.replace("<|python_start|><|python_end|>", "")  # special tokens, which are no part of the text
    for parts in ([written], list(written)):
        assert calls_of(read("llama4_json", parts)) == [call]
    assert accepts(calls_only(TOOLS["llama4_json"], offered_functions(OFFERED), {}, only_one=True), written)
