"""Errors as Anthropic's protocol shows them: `{"type": "error", "error": {"type", "message"}}`.

Knows classes of errors and the paths that speak this protocol.
"""

import msgspec

from quire.entrypoints.openai.errors import HTTPError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


THREAD_NOT_FOUND = "thread_not_found"
"""What makes Anthropic's clients send a whole conversation again, when they have sent its end."""


def speaks_anthropic(path: str) -> bool:
    """Whether a route's clients expect this protocol's errors."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


class AnthropicErrorDetail(msgspec.Struct):
    """What went wrong: a class, a sentence, and what programs go by."""

    type: str
    message: str
    details: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class AnthropicError(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: AnthropicErrorDetail
    type: str = "error"


def error_body(error: HTTPError, path: str) -> bytes:
    """The JSON that a client of `path` gets."""
    return _body(error) if speaks_anthropic(path) else error.body()


def _body(error: HTTPError) -> bytes:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {"error_code": THREAD_NOT_FOUND} if error.detail.code == THREAD_NOT_FOUND else msgspec.UNSET
    return msgspec.json.encode(AnthropicError(AnthropicErrorDetail(kind, error.detail.message, details)))


def error_event(error: HTTPError) -> bytes:
    """An error in a stream whose status has already been sent."""
    return b"event: error\ndata: " + _body(error) + b"\n\n"
