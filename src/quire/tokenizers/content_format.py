"""A message's content as text or as a list of parts, and which of them a chat template wants, found by reading the template.

Knows Jinja's syntax tree. A template that walks through content takes parts, and wants them unless it also asks whether content
is a string.
"""

from typing import Any, Literal

from quire.guards import is_dict, is_sequence

ContentFormat = Literal["auto", "string", "openai"]
"""Text, parts, or what the template shows."""


def wants_parts(tree: Any) -> tuple[bool, bool]:
    """Whether text has to be handed to this template (its syntax tree) as a list of one part; whether it takes such lists."""
    import jinja2.nodes as nodes

    names = {"content"}

    def is_content(node: Any) -> bool:
        match node:
            case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                return True
            case nodes.Name(name=name):
                return name in names
            case nodes.Filter(node=inner):
                return inner is not None and is_content(inner)
            case _:
                return False

    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is not None:
            names.update(own.name for own, given in zip(macro.args, call.args, strict=False) if is_content(given))
    asks = any(test.name == "string" and is_content(test.node) for test in tree.find_all(nodes.Test))
    walks = any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
    return walks and not asks, walks


def as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message, its text as a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def as_it_is(message: dict[str, Any]) -> dict[str, Any]:
    """The message, for a template that takes text and parts."""
    return message


def as_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message, the texts of its parts as lines of one text."""
    content: Any = message.get("content")
    if not is_sequence(content) or not all(is_dict(part) and isinstance(part.get("text"), str) for part in content):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}
