"""A chat answer's text as the protocol's parts: reasoning, content and tool calls, whole or while it is written.

Knows the protocol; formats belong to `quire.parsers`.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from quire.entrypoints.http.state import ServerSettings
from quire.entrypoints.openai.prompts import DEFAULT_SETTINGS, template_variables
from quire.entrypoints.openai.protocol import ChatCompletionRequest, FunctionCall, ToolCall
from quire.entrypoints.openai.tool_choice import ToolChoice, enforced, read_tool_choice
from quire.outputs import CompletionOutput
from quire.parsers.call_ids import count_calls, new_call_id
from quire.parsers.choice import AnswerFormats, reasoning_of_request
from quire.parsers.offered import offered_functions
from quire.parsers.pieces import Answer, Kind, Piece
from quire.parsers.reasoning import Reasoning
from quire.parsers.stream import AnswerParser
from quire.parsers.thinking import PROMPT_END, marker_ids
from quire.tokenizers.interface import Tokenizer


class ReasoningCount:
    """Counts the tokens of the reasoning in each of a request's answers, without its markers.

    Args:
        starts, ends: the markers' tokens.
        begins_inside: an answer begins within its reasoning.
        again: an answer may have more than one part that is reasoning.
    """

    def __init__(
        self, starts: Collection[list[int]], ends: Collection[list[int]], begins_inside: bool, again: bool = False
    ) -> None:
        self._starts, self._ends, self._again = starts, ends, again
        self._last_ids = frozenset(marker[-1] for marker in (*starts, *ends))
        self._longest = max(map(len, (*starts, *ends)))
        self._begins_inside = begins_inside
        self._inside: dict[int, bool] = {}
        self._tails: dict[int, list[int]] = {}
        self._over: set[int] = set()
        self.total = 0

    def add(self, index: int, token_ids: Sequence[int]) -> int:
        """More tokens of the answer `index`; returns how many of them are reasoning or its markers."""
        if index in self._over:
            return 0
        num_here, inside = 0, self._inside.get(index, self._begins_inside)
        read = [*self._tails.get(index, ()), *token_ids]
        for count in range(len(read) - len(token_ids) + 1, len(read) + 1):
            self.total += inside
            num_here += inside
            if read[count - 1] not in self._last_ids:
                continue
            if inside and (size := _ends_with(read, count, self._ends)):
                self.total -= size
                inside = False
                if not self._again:
                    self._over.add(index)
                    return num_here
            elif size := _ends_with(read, count, self._starts):
                self.total -= size if inside else 0
                num_here += not inside
                inside = True
        self._inside[index] = inside
        self._tails[index] = read[len(read) - min(len(read), self._longest - 1) :]
        return num_here


def _ends_with(token_ids: list[int], count: int, markers: Collection[list[int]]) -> int:
    """The length of the marker with which the first `count` tokens end; 0 if there is none."""
    return next((len(each) for each in markers if token_ids[max(0, count - len(each)) : count] == each), 0)


def reasoning_count(reasoning: Reasoning | None, in_reasoning: bool | None, tokenizer: Any) -> ReasoningCount | None:
    """A count for answers in a format; None where its markers have no tokens of their own, or there is no reasoning.
    `in_reasoning`: the prompt ended inside the reasoning (or outside of it); None: as the format says."""
    if reasoning is None:
        return None
    starts, ends = _ids(reasoning.start, tokenizer), _ids(reasoning.end, tokenizer)
    inside = reasoning.implied if in_reasoning is None else in_reasoning
    if not ends or not (starts or inside):
        return None
    return ReasoningCount(starts, ends, inside, bool(reasoning.again) and not reasoning.recipient)


def _ids(markers: tuple[str, ...], tokenizer: Any) -> list[list[int]]:
    found: list[list[int]] = []
    for marker in markers:
        token_id = tokenizer.token_to_id(marker)
        if token_id is not None:
            found.append([token_id])
        elif ids := marker_ids(marker, tokenizer) if hasattr(tokenizer, "encode") else None:
            found.append(ids)
    return found


@dataclasses.dataclass(frozen=True)
class AnswerReader:
    """How one request's answers are read.

    Attributes:
        has_tools: calls are looked for.
        keeps_special_tokens: some marker is a special token of the tokenizer, so these must not be left out of the text.
        choice: what the request says of calls.
        call_grammar: what the answer may be, so that it calls as the request wants it; None: anything.
        is_plain: the whole answer is content; there is nothing to parse.
        prompt: its text, which a response template reads.
    """

    formats: AnswerFormats
    request: ChatCompletionRequest
    in_reasoning: bool | None
    has_tools: bool
    keeps_special_tokens: bool
    tokenizer: Tokenizer
    choice: ToolChoice
    call_grammar: str | None
    is_plain: bool = False
    prompt: str = ""

    @property
    def hides_calls(self) -> bool:
        """Whether calls that are not wanted are left out of the answer."""
        return not self.has_tools and self.formats.tools is not None and self.formats.tools.hides

    def parser(self) -> AnswerParser:
        formats, tools = self.formats, self.request.tools or []
        names = {function.name for function in self.choice.functions}
        offered = [
            tool for tool, function in zip(tools, offered_functions(tools), strict=True) if function.name in names
        ]
        return AnswerParser(
            formats.reasoning,
            formats.tools if self.has_tools or self.hides_calls else None,
            is_harmony=formats.is_harmony,
            offered=offered,
            hides_calls=self.hides_calls,
            in_reasoning=self.in_reasoning,
            tokenizer=self.tokenizer,
            response_template=formats.response_template if formats.tools is None else None,
            prompt=self.prompt,
            has_tools=self.choice.kind != "none",
        )

    def reasoning_count(self) -> ReasoningCount | None:
        """A count of the reasoning's tokens; None where the format does not let them be told apart."""
        return reasoning_count(self.formats.reasoning, self.in_reasoning, self.tokenizer)

    def wants(self, piece: Piece) -> bool:
        """Whether the client asked for such a piece."""
        if piece.kind == "reasoning":
            return self.request.include_reasoning is not False
        return piece.kind == "content" or piece.index == 0 or self.request.parallel_tool_calls is not False

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """Why an answer with so many calls ended. For a call of a function that the request names, OpenAI says `stop`."""
        return "tool_calls" if num_calls and reason == "stop" and self.choice.kind != "named" else reason

    def call_id(self, name: str, index: int, written: str = "") -> str:
        """The id of a call; some templates want ids of their own kind. `written`: what the model wrote, if anything."""
        return new_call_id(self.formats.tools, name, count_calls(self.request.messages) + index, written)

    def tool_calls(self, answer: Answer) -> list[ToolCall]:
        return [
            ToolCall(id=self.call_id(call.name, index, call.id), function=FunctionCall(call.name, call.arguments))
            for index, call in enumerate(answer.calls)
        ]

    def delta(self, piece: Piece) -> dict[str, Any]:
        if piece.kind in ("reasoning", "content"):
            return {piece.kind: piece.text}
        if piece.kind == "arguments":
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
        function = {"name": piece.text, "arguments": ""}
        call_id = self.call_id(piece.text, piece.index, piece.id)
        return {"tool_calls": [{"index": piece.index, "id": call_id, "type": "function", "function": function}]}


class PieceReader:
    """Reads one answer, whole or step by step, as pieces: reasoning, content, calls."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._parser = None if reader.is_plain else reader.parser()
        self._wants_reasoning = reader.request.include_reasoning is not False

    @property
    def num_calls(self) -> int:
        return 0 if self._parser is None else self._parser.num_calls

    def plain_kind(self, text: str) -> Kind | None:
        """The kind of the one piece that more text is as it stands, which is then part of the answer: the common case, at the
        cost of one look. None where it has to be read."""
        if self._parser is None:
            return "content" if text else None
        return self._parser.pass_plain(text) if self._wants_reasoning else None

    def read_text(self, text: str) -> list[Piece]:
        """What more text adds to the answer."""
        if self._parser is None:
            return [Piece("content", text)] if text else []
        return [piece for piece in self._parser.push(text) if self._reader.wants(piece)]

    def read(self, choice: CompletionOutput) -> list[Piece]:
        """What a step's text adds to the answer."""
        pieces = self.read_text(choice.text)
        if choice.finish_reason is not None and self._parser is not None:
            pieces += filter(self._reader.wants, self._parser.finish())
        return pieces

    def read_whole(self, choice: CompletionOutput) -> Answer:
        """An answer that is complete."""
        answer = Answer()
        for piece in self.read(choice):
            answer.add(piece)
        if self._parser is not None and self._parser.has_filled:
            answer.reasoning = ""
        return answer


def answer_reader(
    formats: AnswerFormats,
    request: ChatCompletionRequest,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    settings: ServerSettings = DEFAULT_SETTINGS,
) -> AnswerReader:
    """How a request's answers are read."""
    choice = read_tool_choice(request)
    variables = template_variables(request, settings)
    if formats.tools is not None:
        formats = dataclasses.replace(formats, tools=formats.tools.of_request(variables))
    formats, grammar = enforced(formats, choice, tokenizer, request.parallel_tool_calls is False)
    has_tools = choice.kind != "none" and formats.tools is not None
    is_own = formats.response_template is not None and formats.tools is None
    hides = formats.tools is not None and formats.tools.hides
    if not (has_tools or hides or formats.reasoning is not None or formats.is_harmony or is_own):
        return AnswerReader(formats, request, None, False, False, tokenizer, choice, grammar, is_plain=True)
    inside = None
    if formats.reasoning is not None:
        continues = bool(request.continue_final_message)
        prompt_end = tokenizer.decode(prompt_ids if continues else prompt_ids[-PROMPT_END:], skip_special_tokens=False)
        reasoning, inside = reasoning_of_request(formats.reasoning, prompt_end, variables, continues)
        formats = dataclasses.replace(formats, reasoning=reasoning)
    hides_markers = any(tokenizer.token_to_id(marker) in tokenizer.special_ids for marker in formats.markers)
    keeps_special = is_own or hides_markers
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=False) if is_own else ""
    return AnswerReader(formats, request, inside, has_tools, keeps_special, tokenizer, choice, grammar, prompt=prompt)
