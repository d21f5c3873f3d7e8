"""Tool calls whose parameters are elements named after them, which hold others: `<items><item>3</item></items>`.

Knows a way of writing; knows no model.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from quire.guards import is_dict
from quire.parsers.bodies import complete
from quire.parsers.offered import Function, Tools, as_json
from quire.parsers.pieces import Pieces
from quire.parsers.reader import Malformed, Reader, Waiting
from quire.parsers.tags import TagHeader

MAX_DEPTH = 128
MIXED_TEXT = "$text"
"""The key of text that comes beside elements within an element."""
NAME = TagHeader('"{name}"')
"""How the function's name is written in its tag."""
_Node = str | list[tuple[str, "_Node"]]


@dataclasses.dataclass(frozen=True)
class Elements:
    """Parameters as elements; a call is handed on when it is whole, since a name that comes twice makes a list.

    Attributes:
        mark: the text before each tag.
        end: the name of the tag around the call.
        item: the name of a list's elements.
    """

    mark: str
    end: str = "invoke"
    item: str = "item"

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        header, _ = yield from reader.header((">",))
        name, _ = NAME.read(header)
        if not name or not tools.may_call(name):
            raise Malformed
        out.call(name)
        nodes: list[tuple[str, _Node]] = []
        try:
            while (yield from reader.accept((f"{self.mark}<",))) is not None:
                tag = yield from self._tag(reader)
                if tag == f"/{self.end}":
                    break
                nodes.append((tag, (yield from self._node(reader, tag, 1))))
        except Malformed:  # a call that is not whole has the parameters that are
            out.arguments(_written(nodes, tools.function(name)))
            raise
        out.arguments(_written(nodes, tools.function(name)))
        complete(reader, out)

    def _tag(self, reader: Reader) -> Waiting[str]:
        name, _ = yield from reader.header((">",))
        if not name.strip():
            raise Malformed
        return name

    def _node(self, reader: Reader, name: str, depth: int) -> Waiting[_Node]:
        """What an element holds, up to its end tag."""
        if depth > MAX_DEPTH or name.startswith("/"):
            raise Malformed
        texts: list[str] = []
        children: list[tuple[str, _Node]] = []
        while True:
            if (yield from reader.until((f"{self.mark}<",), texts.append)) is None:
                raise Malformed
            tag = yield from self._tag(reader)
            if tag == f"/{name}":
                break
            children.append((tag, (yield from self._node(reader, tag, depth + 1))))
        text = "".join(texts)
        if not children:
            return text
        if text.strip():
            field = MIXED_TEXT
            while any(child == field for child, _ in children):
                field = "$" + field
            children.append((field, text))
        return children


def _written(nodes: list[tuple[str, _Node]], function: Function | None) -> str:
    return json.dumps(_named(nodes, function, {} if function is None else function.root), ensure_ascii=False)


def _named(nodes: list[tuple[str, _Node]], function: Function | None, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Elements as an object; those of one name are a list."""
    found: dict[str, list[Any]] = {}
    for name, node in nodes:
        properties: Any = schema.get("properties")
        part: Any = properties.get(name) if is_dict(properties) else None
        part = schema.get("additionalProperties") if part is None else part
        found.setdefault(name, []).append(_value(node, function, part))
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def _value(node: _Node, function: Function | None, schema: Any) -> Any:
    """An element's value, as its schema has it."""
    container = None if function is None else function.container(schema)
    if isinstance(node, str):
        if function is None or not isinstance(schema, dict):
            return node
        types = function.types(schema)
        if container is not None and "string" not in types and not node.strip():
            return [] if container[0] == "array" else {}
        return node if not types or types == {"string"} else json.loads(as_json(node, types))
    if container is not None and container[0] == "array":
        return [_value(child, function, container[1].get("items")) for _, child in node]
    return _named(node, function, {} if container is None else container[1])
