"""Whether a chat template wants a message's content as a list of parts, found by reading the template.

Knows Jinja's syntax tree. A template that walks through content wants parts, unless it also asks whether content is a string.
"""

from typing import Any


def wants_parts(tree: Any) -> bool:
    """Whether text has to be handed to this template (its syntax tree) as a list of one part."""
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
    return not asks and any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message, its text as a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
