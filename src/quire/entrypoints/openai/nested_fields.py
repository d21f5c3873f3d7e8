"""Names of fields within a request's fields (messages, tools, formats), and which of a request's are not among them.

What a chat template reads may have fields of its own, so there only a misspelling of a known name counts as unknown.
"""

import difflib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from quire.guards import is_dict, is_sequence

_MOST_LOOKED_AT = 64
"""Names of one request that are compared with the known ones (about 0.1 ms each, once)."""


class Names(NamedTuple):
    """The names that an object may have.

    Attributes:
        known: the names.
        within: those whose values have names that are known, too. A list's items are looked at like one object.
        may_have_others: other names mean something, too, unless they are nearly a known one that the object lacks.
    """

    known: frozenset[str]
    within: "dict[str, Names]"
    may_have_others: bool


class Unknown(NamedTuple):
    """A field that nothing reads: its path, and the name that was probably meant."""

    path: str
    meant: str | None


def _closed(names: str = "", **within: Names) -> Names:
    return Names(frozenset((*names.split(), *within)), within, may_have_others=False)


def _open(names: str = "", **within: Names) -> Names:
    return Names(frozenset((*names.split(), *within)), within, may_have_others=True)


_CALL = _open("id type index", function=_open("name arguments"))
_PART = _open(
    "type text thinking refusal signature source image_url input_audio video_url file audio_url annotations logprobs "
    "cache_control citations id name input tool_use_id content is_error title context data"
)
_MESSAGE = _open(
    "role name tool_call_id reasoning reasoning_content thinking refusal audio function_call annotations tools documents "
    "id type status call_id arguments output summary encrypted_content action phase",
    content=_PART,
    tool_calls=_CALL,
)
_FUNCTION = _open("name description parameters strict")
_TOOL = _open("type name description parameters strict input_schema cache_control", function=_FUNCTION)
_SCHEMA_FORMAT = _closed("name description schema strict")

NESTED: dict[str, Names] = {
    "messages": _MESSAGE,
    "input": _MESSAGE,
    "system": _PART,
    "tools": _TOOL,
    "tool_choice": _closed(
        "type name mode tools allowed_tools disable_parallel_tool_use custom server_label", function=_closed("name")
    ),
    "stream_options": _closed("include_usage continuous_usage_stats include_obfuscation"),
    "response_format": _closed("type structures triggers format", json_schema=_SCHEMA_FORMAT),
    "text": _closed("verbosity", format=_closed("type name description schema strict")),
    "reasoning": _closed("effort summary generate_summary"),
    "thinking": _closed("type budget_tokens display"),
    "output_config": _closed("effort", format=_closed("type name schema")),
}
"""By the field of the request. Others are checked where they are read (`structured_outputs`, `repetition_detection`), or
may have any names."""


def nearest(name: str, known: frozenset[str]) -> str | None:
    """Which of the known names may have been meant."""
    return _nearest(name[:60], known)


@functools.lru_cache(1024)
def _nearest(name: str, known: frozenset[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.75)), None)


def instead_of(name: str, holder: dict[str, Any]) -> str:
    """The end of a sentence that says that `name` is missing: what the object has in its place."""
    near = difflib.get_close_matches(name, [key[:60] for key in itertools.islice(holder, _MOST_LOOKED_AT)], n=1)
    return f" (this object has {near[0]!r})" if near and near[0] != name else ""


def find_unknown(value: Any, names: Names, path: str) -> list[Unknown]:
    """The fields within `value` that nothing reads; of very many, some."""
    found: list[Unknown] = []
    for at, name, holder, expected in itertools.islice(_others(value, names, path), _MOST_LOOKED_AT):
        meant = nearest(name, expected.known)
        meant = None if meant in holder else meant
        if meant is not None or not expected.may_have_others:
            found.append(Unknown(f"{at}.{name[:60]}", meant))
    return found


def _others(value: Any, names: Names, path: str) -> Iterator[tuple[str, str, dict[str, Any], Names]]:
    """Each name that is not known: where it stands, itself, the object that has it, and the names that are."""
    if is_dict(value):
        for name in sorted(value.keys() - names.known):
            yield path, name, value, names
        for name in value.keys() & names.within.keys():
            yield from _others(value[name], names.within[name], f"{path}.{name}")
    elif is_sequence(value) and value and (is_dict(value[0]) or is_sequence(value[0])):
        for index, item in enumerate(value):
            yield from _others(item, names, f"{path}[{index}]")
