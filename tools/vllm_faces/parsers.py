"""vLLM's parser classes over Quire's parsers: the same constructors and methods, as far as they are about an answer's text."""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.vllm_faces.outcomes import Absent, NotBlackBox, Watch
from tools.vllm_faces.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)

from quire.entrypoints.openai.answers import reasoning_count
from quire.parsers.call_ids import count_calls, new_call_id
from quire.parsers.choice import AnswerFormats, apply_response_template, choose_formats, reasoning_of_request
from quire.parsers.formats import PLAIN
from quire.parsers.pieces import Answer, Piece
from quire.parsers.reasoning import Reasoning
from quire.parsers.response_template import NAMES as RESPONSE_TEMPLATE
from quire.parsers.stream import AnswerParser
from quire.parsers.thinking import PROMPT_END

ENDS_OF_ANSWERS = ("<｜end▁of▁sentence｜>", "<turn|>")
"""The tokens with which answers end in those cases that write them."""


def _function(tool: Any) -> dict[str, Any] | None:
    """A request's tool in the protocol's form, whatever class it is of; None of one that is no function."""
    if not isinstance(tool, dict):
        dump = getattr(tool, "model_dump", None)
        tool = dump(exclude_none=True) if callable(dump) else getattr(tool, "__dict__", None)
    if not isinstance(tool, dict):
        return None
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        function = function.model_dump(exclude_none=True) if hasattr(function, "model_dump") else vars(function)
    return {"type": "function", "function": function} if isinstance(function.get("name"), str) else None


def _offered(*sources: Any) -> list[dict[str, Any]]:
    """The first source that is a list of tools."""
    for source in sources:
        if isinstance(source, list | tuple) and source:
            return [found for tool in source if (found := _function(tool)) is not None]
    return []


class _Ids:
    """A tokenizer as Quire's server sees it."""

    def __init__(self, tokenizer: Any) -> None:
        self._vocab = dict(tokenizer.get_vocab())

        self.special_ids: Any = frozenset(self._vocab.values()) or range(1 << 30)
        self._encode = getattr(tokenizer, "encode", None)

    def token_to_id(self, token: str) -> int | None:
        return self._vocab.get(token)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        if self._encode is None:
            return self._longest_tokens(text)
        try:
            return list(self._encode(text, add_special_tokens=add_special_tokens))
        except TypeError:  # a tokenizer of the case's own, which adds none
            return list(self._encode(text))

    def _longest_tokens(self, text: str) -> list[int]:
        """A text's tokens where a case gives no more than a vocabulary; none where it has not all of them."""
        ids: list[int] = []
        while text:
            token = max((each for each in self._vocab if each and text.startswith(each)), key=len, default=None)
            if token is None:
                return []
            ids.append(self._vocab[token])
            text = text[len(token) :]
        return ids


class Face:
    """A parser of vLLM's, which has a name in either of its registries, or in both.

    Attributes:
        reasoning_names, tools_names: its names; the first one that Quire has is used.
        looks_for_calls: `parse` looks for calls although it is not told to.
        gives_whole_calls: in a stream, vLLM gives all of a call at once, and the cases count it. Quire streams the arguments:
            the parts of a call are joined, as clients do.
    """

    reasoning_names: tuple[str, ...] = ()
    tools_names: tuple[str, ...] = ()
    reasoning_parser_cls: Any = None
    tool_parser_cls: Any = None
    supports_required_and_named = True
    looks_for_calls = False
    gives_whole_calls = False
    tool_strict_level: Any = None

    def __init__(self, tokenizer: Any = None, tools: Any = None, *args: Any, **kwargs: Any) -> None:
        del args
        names = type(self)._names()
        if names == ("none", "none") and not self._may_be_nothing():
            raise NotBlackBox(type(self).__name__)
        self.formats = _formats(*names)
        if self.reasoning_parser_cls is not None and hasattr(self.reasoning_parser_cls, "markers"):
            reasoning = self.reasoning_parser_cls.markers(tokenizer)
            self.formats = dataclasses.replace(self.formats, reasoning=reasoning)
        if {self.formats.reasoning_name, self.formats.tools_name} & set(RESPONSE_TEMPLATE):
            self.formats = _with_template(self.formats, tokenizer)
        self.model_tokenizer, self.tools = tokenizer, tools
        self._variables: dict[str, Any] = dict(kwargs.get("chat_template_kwargs") or {})
        if kwargs.get("reasoning_effort"):
            self._variables.setdefault("reasoning_effort", kwargs["reasoning_effort"])
        self._stream: AnswerParser | None = None
        self._call: list[Piece] = []
        self._prompt: list[int] | None = None

    def _may_call(self, request: Any) -> bool:
        """Whether calls are looked for; without tools and a choice, some classes look for any."""
        looks = self.looks_for_calls or getattr(self.tool_parser_cls, "looks_for_calls", False)
        return getattr(request, "tool_choice", None) != "none" or (looks and not getattr(request, "tools", None))

    def _has_refused(self, request: Any) -> bool:
        """Whether the request offers tools and wants no call."""
        given = getattr(request, "model_fields_set", None)
        chosen = not isinstance(given, set) or "tool_choice" in given
        return chosen and getattr(request, "tool_choice", None) == "none" and bool(getattr(request, "tools", None))

    @classmethod
    def _may_be_nothing(cls) -> bool:
        return False

    @classmethod
    def _names(cls) -> tuple[str, str]:
        parts = [part for part in (cls.reasoning_parser_cls, cls.tool_parser_cls) if part is not None]
        reasoning = next((part.reasoning_names for part in parts if part.reasoning_names), cls.reasoning_names)
        tools = next((part.tools_names for part in reversed(parts) if part.tools_names), cls.tools_names)
        return _first_known(reasoning, "reasoning"), _first_known(tools, "tools")

    def __getattr__(self, name: str) -> Any:
        raise NotBlackBox(f"{type(self).__name__}.{name}")

    @property
    def vocab(self) -> dict[str, int]:
        """Each token's id."""
        return self.model_tokenizer.get_vocab()

    # --- reading ---

    def _parser(self, request: Any, with_tools: bool | None = True, text: str = "") -> AnswerParser:
        """`with_tools`: None where a request wants no calls. `text`: the answer, or its beginning."""
        Watch.num_read += 1
        formats, (reasoning, inside) = self.formats, self._reasoning(request)
        variables = self._variables | (getattr(request, "chat_template_kwargs", None) or {})
        hides = formats.tools is not None and with_tools is None and formats.tools.hides
        tools = formats.tools.of_request(variables) if formats.tools is not None and (with_tools or hides) else None
        if tools is not None and getattr(request, "tool_choice", None) == "required" and text.lstrip()[:1] == "[":
            tools = dataclasses.replace(
                PLAIN, ids=tools.ids
            )  # vLLM's grammar has forced JSON: Quire's has it for some models
        is_forced = tools is not None and tools.bare and tools.body is PLAIN.body
        offered = _offered(getattr(request, "tools", None), self.tools)
        named = getattr(getattr(getattr(request, "tool_choice", None), "function", None), "name", None)
        return AnswerParser(
            reasoning,
            tools,
            is_harmony=formats.is_harmony,
            offered=[]
            if is_forced
            else [each for each in offered if not isinstance(named, str) or each["function"]["name"] == named],
            in_reasoning=inside,
            hides_calls=hides,
            tokenizer=self.model_tokenizer,
            response_template=formats.response_template,
            prompt=self._prompt_text() if formats.response_template is not None else "",
            has_tools=bool(with_tools),
        )

    def _prompt_text(self) -> str:
        return self.model_tokenizer.decode(self._prompt) if self._prompt else ""

    def _reasoning(self, request: Any = None) -> tuple[Reasoning | None, bool | None]:
        """As the server has it, if there is a prompt; else as the format and the template's variables have it."""
        reasoning = self.formats.reasoning
        if reasoning is None:
            return None, None
        variables = self._variables | (getattr(request, "chat_template_kwargs", None) or {})
        if self._prompt and hasattr(self.model_tokenizer, "decode"):
            end = self.model_tokenizer.decode(list(self._prompt)[-PROMPT_END:])
            if isinstance(end, str):
                return reasoning_of_request(reasoning, end, variables)
        return reasoning.of_request(variables), False if reasoning.is_off(variables) else None

    def _whole(self, text: str, request: Any, with_tools: bool | None = True) -> Answer:
        text = _without_end(text)
        parser, answer = self._parser(request, with_tools, text), Answer()
        for piece in (*parser.push(text), *parser.finish()):
            if _wanted(piece, request):
                answer.add(piece)
        if parser.has_filled:
            answer.reasoning = ""
        return answer

    def _more(
        self, text: str, request: Any, is_first: bool, finished: bool = False, with_tools: bool | None = True
    ) -> DeltaMessage | None:
        text = _without_end(text)
        if is_first or self._stream is None:
            self._stream = self._parser(request, with_tools, text)
        pieces = self._stream.push(text)
        if finished:
            pieces += self._stream.finish()
            self._stream = None
        return self._delta([piece for piece in self._joined(pieces) if _wanted(piece, request)], request)

    def _joined(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces; those of a call come when its arguments are whole, if cases want them so."""
        if not self.gives_whole_calls:
            return pieces
        ready: list[Piece] = []
        for piece in pieces:
            if piece.kind not in ("call", "arguments"):
                ready.append(piece)
                continue
            self._call.append(piece)
            if piece.kind == "arguments" and _is_json("".join(part.text for part in self._call[1:])):
                ready += self._call
                self._call = []
        return ready

    def _prime(self, previous: str, request: Any, with_tools: bool = True) -> None:
        """Read what a stream had before the first part that a case gives."""
        if self._stream is None and previous:
            self._stream = self._parser(request, with_tools)
            self._stream.push(previous)

    def _call_id(self, name: str, index: int, request: Any, written: str) -> str:
        messages = getattr(request, "messages", None)
        number = index + (count_calls(messages) if isinstance(messages, list) else 0)
        return new_call_id(self.formats.tools, name, number, written)

    def _delta(self, pieces: Sequence[Piece], request: Any) -> DeltaMessage | None:
        """Pieces of one step as one message, as the server's chunks add up."""
        if not pieces:
            return None
        delta, calls = DeltaMessage(), dict[int, DeltaToolCall]()
        for piece in pieces:
            if piece.kind == "reasoning":
                delta.reasoning = (delta.reasoning or "") + piece.text
            elif piece.kind == "content":
                delta.content = (delta.content or "") + piece.text
            elif piece.kind == "call":
                function = DeltaFunctionCall(name=piece.text, arguments="")
                call_id = self._call_id(piece.text, piece.index, request, piece.id)
                calls[piece.index] = DeltaToolCall(id=call_id, type="function", index=piece.index, function=function)
            else:
                empty = DeltaToolCall(index=piece.index, function=DeltaFunctionCall(arguments=""))
                call = calls.setdefault(piece.index, empty)
                assert call.function is not None
                call.function.arguments = (call.function.arguments or "") + piece.text
        delta.tool_calls = list(calls.values())
        return delta

    # --- what vLLM's tool parsers do ---

    def extract_tool_calls(
        self, model_output: str, request: Any = None, *args: Any, **kwargs: Any
    ) -> ExtractedToolCallInformation:
        """A whole answer's calls."""
        del args, kwargs
        answer = self._whole(model_output, request, not self._has_refused(request))
        calls = [
            ToolCall(
                id=self._call_id(call.name, index, request, call.id or ""),
                function=FunctionCall(name=call.name, arguments=call.arguments),
            )
            for index, call in enumerate(answer.calls)
        ]
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=answer.content or None)

    extract_tool_calls_from_content = extract_tool_calls

    def initialize_streaming(self) -> None:
        """Another answer begins."""
        self._stream, self._call = None, []

    def extract_tool_calls_streaming(
        self,
        previous_text: str = "",
        current_text: str = "",
        delta_text: str = "",
        previous_token_ids: Any = (),
        current_token_ids: Any = (),
        delta_token_ids: Any = (),
        request: Any = None,
    ) -> DeltaMessage | None:
        """More of an answer."""
        del previous_token_ids, current_token_ids, delta_token_ids
        self._prime(previous_text, request)
        is_first = _begins(previous_text, current_text, delta_text)
        return self._more(delta_text, request, is_first, with_tools=not self._has_refused(request) or None)

    def finish_streaming(self, request: Any = None) -> DeltaMessage | None:
        """What the end of the text adds."""
        return None if self._stream is None else self._more("", request, is_first=False, finished=True)

    # --- what vLLM's reasoning parsers do ---

    def extract_reasoning(self, model_output: str, request: Any = None) -> tuple[str | None, str | None]:
        """A whole answer's reasoning and what follows."""
        answer = self._whole(model_output, request, with_tools=self._leaves_calls_out())
        return answer.reasoning or None, answer.content or None

    def _leaves_calls_out(self) -> bool:
        """Whether this reads reasoning and calls together, so that the content that it hands on has no calls."""
        face = self.reasoning_parser_cls or type(self)
        return face.looks_for_calls and bool(face.reasoning_names and face.tools_names)

    def extract_reasoning_streaming(
        self,
        previous_text: str = "",
        current_text: str = "",
        delta_text: str = "",
        previous_token_ids: Any = (),
        current_token_ids: Any = (),
        delta_token_ids: Any = (),
    ) -> DeltaMessage | None:
        """More of an answer."""
        del previous_token_ids, current_token_ids, delta_token_ids
        with_tools = self._leaves_calls_out()
        self._prime(previous_text, None, with_tools)
        return self._more(delta_text, None, _begins(previous_text, current_text, delta_text), with_tools=with_tools)

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """The prompt that is answered."""
        self._prompt = list(prompt_token_ids)

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the last marker among some tokens ends the reasoning."""
        if not Watch.num_read or self.formats.reasoning is None:
            raise NotBlackBox("is_reasoning_end")
        if self.formats.reasoning.is_off(self._variables):
            return True
        text = self.model_tokenizer.decode(list(input_ids))
        if not self.formats.reasoning.implied and not any(map(text.count, self.formats.reasoning.start)):
            return True
        last = {kind: max(map(text.rfind, markers)) for kind, markers in _reasoning_markers(self.formats).items()}
        return last["end"] > last["start"]

    def extract_content_ids(self, input_ids: Sequence[int]) -> list[int]:
        """The tokens behind the reasoning's end."""
        if not Watch.num_read or self.formats.reasoning is None:
            raise NotBlackBox("extract_content_ids")
        ends = {self.vocab.get(marker) for marker in self.formats.reasoning.end}
        at = next((index for index, token_id in enumerate(input_ids) if token_id in ends), None)
        return [] if at is None else list(input_ids[at + 1 :])

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """As the server counts them for `usage`."""
        Watch.num_read += 1
        count = reasoning_count(*self._reasoning(), _Ids(self.model_tokenizer))
        if count is None:
            return 0
        count.add(0, token_ids)
        return count.total

    # --- what vLLM's combined parsers do ---

    def parse(
        self,
        model_output: str,
        request: Any = None,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        """A whole answer's reasoning, content and calls."""
        del model_output_token_ids
        answer = self._whole(
            model_output, request, ((enable_auto_tools or self.looks_for_calls) and self._may_call(request)) or None
        )
        calls = [FunctionCall(name=call.name, arguments=call.arguments) for call in answer.calls]
        for index, call in enumerate(calls):
            call.id = self._call_id(call.name, index, request, call.id or "")
        looks = (enable_auto_tools or self.looks_for_calls) and getattr(request, "tool_choice", None) == "auto"
        return answer.reasoning or None, answer.content or None, calls or (None if looks else [])

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: Any = (),
        request: Any = None,
        prompt_token_ids: Sequence[int] | None = None,
        *,
        finished: bool = False,
    ) -> DeltaMessage | None:
        """More of an answer."""
        del delta_token_ids
        if prompt_token_ids:
            self.set_prompt_token_ids(prompt_token_ids)
        return self._more(
            delta_text, request, is_first=False, finished=finished, with_tools=self._may_call(request) or None
        )


class Delegating(Face):
    """Base of classes that name their two parts; both may be missing."""

    @classmethod
    def _may_be_nothing(cls) -> bool:
        return True


def extract_required_tool_call_streaming(
    previous_text: str,
    current_text: str,
    tool_call_idx: int | None = None,
    tool_call_id_type: str = "random",
    **others: Any,
) -> tuple[DeltaMessage | None, None]:
    """What more text adds to the JSON list of calls that an answer has to be."""
    del others
    Watch.num_read += 1
    parser, calls = AnswerParser(tools=PLAIN), dict[int, DeltaToolCall]()
    parser.push(previous_text)
    tools = dataclasses.replace(PLAIN, ids="numbered" if tool_call_id_type == "kimi_k2" else "any")
    for piece in parser.push(current_text[len(previous_text) :]):
        if piece.kind == "call":
            call_id = new_call_id(tools, piece.text, (tool_call_idx or 0) + piece.index)
            function = DeltaFunctionCall(name=piece.text, arguments="")
            calls[piece.index] = DeltaToolCall(id=call_id, type="function", index=piece.index, function=function)
        elif piece.kind == "arguments":
            call = calls.setdefault(piece.index, DeltaToolCall(index=piece.index, function=DeltaFunctionCall()))
            assert call.function is not None
            call.function.arguments = (call.function.arguments or "") + piece.text
    return (DeltaMessage(tool_calls=list(calls.values())) if calls else None), None


def _without_end(text: str) -> str:
    """The text without the token that ends answers, which the server leaves out before parsers read it."""
    for end in ENDS_OF_ANSWERS:
        text = text.removesuffix(end)
    return text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _begins(previous: str, current: str, delta: str) -> bool:
    """Whether an answer begins here; cases that leave the earlier text out have one answer."""
    return not previous and bool(current) and current == delta


def _wanted(piece: Piece, request: Any) -> bool:
    """What the server would send to this request."""
    if piece.kind == "reasoning":
        return getattr(request, "include_reasoning", True) is not False
    return piece.kind == "content" or piece.index == 0 or getattr(request, "parallel_tool_calls", True) is not False


def _first_known(names: tuple[str, ...], kind: str) -> str:
    for name in names:
        if _is_known(name, kind):
            return name
    if names:
        raise Absent(f"{kind} parser {names[0]}")
    return "none"


def _is_known(name: str, kind: str) -> bool:
    try:
        choose_formats(name if kind == "reasoning" else "none", name if kind == "tools" else "none", None)
    except ValueError:
        return False
    return True


def _formats(reasoning: str, tools: str) -> AnswerFormats:
    return choose_formats(reasoning, tools, None)


def _with_template(formats: AnswerFormats, tokenizer: Any) -> AnswerFormats:
    """The formats with the response template that a tokenizer has."""
    template = getattr(tokenizer, "response_template", None) or getattr(tokenizer, "init_kwargs", {}).get(
        "response_template"
    )
    if not isinstance(template, dict):
        raise NotBlackBox("a response template")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer_config.json").write_text(json.dumps({"response_template": template}), encoding="utf-8")
        return apply_response_template(formats, folder)


def _reasoning_markers(formats: AnswerFormats) -> dict[str, tuple[str, ...]]:
    assert formats.reasoning is not None
    return {"start": formats.reasoning.start, "end": formats.reasoning.end}
