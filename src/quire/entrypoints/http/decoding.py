"""From a request's bytes to a typed body, with an error that names the field.

Knows size, depth, encoding and types. Knows nothing of what the fields mean.
"""

import asyncio
import functools
import itertools
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Set
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from starlette.requests import ClientDisconnect, Request

from quire.config.limits import MAX_JSON_DEPTH
from quire.entrypoints.http.errors import HTTPError, bad_field, bad_request
from quire.errors import nearest
from quire.guards import is_dict, is_sequence
from quire.json_text import TooDeepError, check_depth
from quire.logger import init_logger

MAX_BODY_BYTES = 32 * 1024 * 1024
BODY_TIMEOUT_S = 120.0
"""How long a body may take to arrive; a client that trickles one must not hold a connection, or a drain, for ever."""
MAX_TOLD_FIELDS = 10
"""Unknown fields of one request that its answer names."""
MAX_LOGGED_FIELDS = 256
"""Unknown fields that are logged, once each; further ones are ignored in silence, so that a client cannot fill the log."""

logger = init_logger(__name__)
BodyT = TypeVar("BodyT", bound=msgspec.Struct)

_INDEX = re.compile(r"\[\d+\]")
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_MOST_LOOKED_AT = 64
"""Names of one request that are compared with the known ones (about 0.1 ms each, once)."""


async def read_body(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """The whole body; refused as soon as it is known to be larger than `limit` bytes."""
    return b"".join([part async for part in stream_body(request, limit, BODY_TIMEOUT_S)])


async def stream_body(request: Request, limit: int, timeout_s: float) -> AsyncIterator[bytes]:
    """The body as it comes; refused as soon as it is known to be larger than `limit` bytes, or takes too long."""
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    size = 0
    parts = request.stream()
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                part = await anext(parts, None)
        except TimeoutError:
            message = f"The request body did not arrive within {timeout_s:.0f} s."
            raise HTTPError(408, message, code="body_timeout", headers={"connection": "close"}) from None
        except ClientDisconnect:
            raise HTTPError(400, "The client went away before its request was complete.") from None
        if part is None:
            return
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        yield part


def _too_large(limit: int) -> HTTPError:
    message = f"The request body is larger than {limit} bytes."
    return HTTPError(413, message, code="body_too_large", headers={"connection": "close"})


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


Unknown = tuple[str, str | None]  # a field that nothing reads: its path, and the name that was probably meant


class BodyDecoder:
    """Turns bodies into structs; remembers which unknown fields it has already logged.

    Args:
        strict: refuse unknown fields instead of logging each of them once.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def decode(self, body: bytes, kind: type[BodyT], warnings: list[str] | None = None) -> BodyT:
        """The body as `kind`. Fields that it does not have are ignored, and told in `warnings`.
        Raises HTTPError, a 400 whose `param` is the path of the field at fault, if the body is wrong."""
        _check_encoding(body)
        _check_depth(body)
        fields: dict[str, msgspec.Raw] = _decode(body, dict[str, msgspec.Raw])
        known = _known_fields(kind)
        others = sorted(fields.keys() - known)[:MAX_TOLD_FIELDS]
        unknown: list[Unknown] = [(name[:60], _nearest(name[:60], known)) for name in others]
        try:
            decoded: BodyT = _decode(body, kind)
        except HTTPError as error:
            raise _with_misspelling(error, fields, unknown) from None
        for name in fields.keys() & NESTED.keys() & known:
            value = getattr(decoded, name)
            if isinstance(value, msgspec.Struct):  # which has lost what it does not know
                value = _decode(bytes(fields[name]), Any)
            unknown += find_unknown(value, NESTED[name], name)
        if unknown:
            told = self._check_unknown(unknown[:MAX_TOLD_FIELDS])
            if warnings is not None:
                warnings += told
        return decoded

    def decode_form(self, fields: Mapping[str, Any], kind: type[BodyT], warnings: list[str] | None = None) -> BodyT:
        """As `decode`, of a form's fields, whose values are texts or lists of them."""
        known = _known_fields(kind)
        if others := sorted(fields.keys() - known)[:MAX_TOLD_FIELDS]:
            told = self._check_unknown([(name[:60], _nearest(name[:60], known)) for name in others])
            if warnings is not None:
                warnings += told
        return convert({name: fields[name] for name in fields.keys() & known}, kind, strict=False)

    def field_names(self, body: bytes) -> Set[str]:
        """The names of a body's fields; raises as `decode` does."""
        _check_encoding(body)
        _check_depth(body)
        return _decode(body, dict[str, msgspec.Raw]).keys()

    def _check_unknown(self, unknown: list[Unknown]) -> list[str]:
        """The warnings about unknown fields; each is logged once. Raises HTTPError, a 400, if they are refused."""
        shown = {path: f"{path!r}" + (f" (did you mean {meant!r}?)" if meant else "") for path, meant in unknown}
        if self._strict:
            raise bad_request(f"Unknown field(s): {', '.join(shown.values())}.", unknown[0][0], "unknown_field")
        for path, text in shown.items():
            anywhere = _INDEX.sub("[]", path)
            if anywhere not in self._logged and len(self._logged) < MAX_LOGGED_FIELDS:
                self._logged.add(anywhere)
                logger.warning("Ignoring the unknown request field %s.", text)
        return [f"the unknown field {text} was ignored" for text in shown.values()]


def _with_misspelling(error: HTTPError, fields: dict[str, msgspec.Raw], unknown: list[Unknown]) -> HTTPError:
    """A missing field's error that names the unknown field which may be it."""
    param = error.detail.param
    if error.code != "missing_field" or param is None:
        return error
    top, _, name = param.rpartition(".")
    if top in NESTED:
        unknown = find_unknown(_decode(bytes(fields[top]), Any), NESTED[top], top)
    near = next((path for path, meant in unknown if meant == name), None)
    if near is None:
        return error
    return bad_field(param, f"this field is required; the request has {near!r}.", "missing_field")


@functools.cache
def _decoder(kind: Any) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(kind)


def _decode(body: bytes, kind: Any) -> Any:
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _validation_error(error, kind) from None
    except msgspec.DecodeError as error:
        raise bad_request(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None


def convert(fields: Any, kind: type[BodyT], *, strict: bool = True) -> BodyT:
    """What JSON was decoded to as `kind`. Raises HTTPError, a 400 whose `param` is the path of the field at fault."""
    try:
        return msgspec.convert(fields, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _validation_error(error, kind) from None


@functools.cache
def _known_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_encode_fields__)


def _check_encoding(body: bytes) -> None:
    if not body.strip():
        raise bad_request("The request body is empty; expected a JSON object.", code="invalid_json")
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"The request body is not valid UTF-8 (byte {error.start}).", code="invalid_utf8") from None


def _check_depth(body: bytes) -> None:
    try:
        check_depth(body)
    except TooDeepError:
        raise _too_deep() from None


def _too_deep() -> HTTPError:
    return bad_request(f"The request body is nested more than {MAX_JSON_DEPTH} levels deep.", code="json_too_deep")


def _validation_error(error: msgspec.ValidationError, kind: Any) -> HTTPError:
    match = _PATH.match(str(error))
    what, path = (match["what"], match["path"]) if match else (str(error), None)
    missing = re.match(r"Object missing required field `(.*)`", what)
    if missing:
        prefix = f"{path[2:]}." if path and len(path) > 1 else ""
        field = prefix + missing[1]
        return bad_field(field, "this field is required.", "missing_field")
    field = path.removeprefix("$").removeprefix(".") if path else ""
    what = what[:1].lower() + what[1:]
    if not field:
        return bad_request(f"The request body: {what}.", code="invalid_type")
    allowed = _allowed_words(kind, field) if what.startswith("invalid enum value") else ""
    return bad_field(field, f"{what}{allowed}.", "invalid_type")


def _allowed_words(kind: Any, field: str) -> str:
    """The words that a field of the body may be."""
    hint = get_type_hints(kind).get(field) if isinstance(kind, type) else None
    options = [hint, *get_args(hint)]
    words = [str(word) for option in options if get_origin(option) is Literal for word in get_args(option)]
    return f"; allowed: {', '.join(words)}" if words else ""


# Names of fields within fields. What a chat template reads may have fields of its own, so there only a misspelling of a known
# name counts as unknown.


def _names(names: str = "", may_have_others: bool = True, **within: Names) -> Names:
    return Names(frozenset((*names.split(), *within)), within, may_have_others)


_closed = functools.partial(_names, may_have_others=False)
_PART = _names(
    "type text thinking refusal signature source image_url input_audio video_url file audio_url annotations logprobs "
    "cache_control citations id name input tool_use_id content is_error title context data"
)
_MESSAGE = _names(
    "role name tool_call_id reasoning reasoning_content thinking refusal audio function_call annotations tools documents "
    "id type status call_id arguments output summary encrypted_content action phase",
    content=_PART,
    tool_calls=_names("id type index", function=_names("name arguments")),
)
NESTED: dict[str, Names] = {
    "messages": _MESSAGE,
    "input": _MESSAGE,
    "system": _PART,
    "tools": _names(
        "type name description parameters strict input_schema cache_control",
        function=_names("name description parameters strict"),
    ),
    "tool_choice": _closed(
        "type name mode tools allowed_tools disable_parallel_tool_use custom server_label", function=_closed("name")
    ),
    "stream_options": _closed("include_usage continuous_usage_stats include_obfuscation"),
    "response_format": _closed(
        "type structures triggers format", json_schema=_closed("name description schema strict")
    ),
    "text": _closed("verbosity", format=_closed("type name description schema strict")),
    "reasoning": _closed("effort summary generate_summary"),
    "thinking": _closed("type budget_tokens display"),
    "output_config": _closed("effort", format=_closed("type name schema")),
}
"""By the field of the request. Others are checked where they are read (`structured_outputs`, `repetition_detection`), or
may have any names."""


@functools.lru_cache(1024)
def _nearest(name: str, known: frozenset[str]) -> str | None:
    return nearest(name, known, cutoff=0.75)


def find_unknown(value: Any, names: Names, path: str) -> list[Unknown]:
    """The fields within `value` that nothing reads; of very many, some."""
    found: list[Unknown] = []
    for at, name, holder, expected in itertools.islice(_others(value, names, path), _MOST_LOOKED_AT):
        meant = _nearest(name[:60], expected.known)
        meant = None if meant in holder else meant
        if meant is not None or not expected.may_have_others:
            found.append((f"{at}.{name[:60]}", meant))
    return found


def _others(value: Any, names: Names, path: str) -> Iterator[tuple[str, str, dict[str, Any], Names]]:
    """Each unknown name: its path, the name, the object that has it, and the names that are known there."""
    if is_dict(value):
        for name in sorted(value.keys() - names.known):
            yield path, name, value, names
        for name in value.keys() & names.within.keys():
            yield from _others(value[name], names.within[name], f"{path}.{name}")
    elif is_sequence(value) and value and (is_dict(value[0]) or is_sequence(value[0])):
        for index, item in enumerate(value):
            yield from _others(item, names, f"{path}[{index}]")
