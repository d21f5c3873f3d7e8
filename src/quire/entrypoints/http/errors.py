"""Errors as JSON: `{"error": {"message", "type", "param", "code"}}`, with OpenAI's words or vLLM's.

Knows statuses and headers. Knows nothing of routes or of the engine.
"""

import math
from collections.abc import Collection
from http import HTTPStatus
from typing import Any, TypeAlias, cast

import msgspec

from quire.errors import (
    CapacityError,
    DeadlineError,
    EngineDeadError,
    NotFoundError,
    NotSupportedError,
    QuireError,
    RequestError,
    ShutdownError,
    TooLongError,
)

DEFAULT_RETRY_AFTER_S = 1
"""Sent with a 429 or 503 whose cause does not say how long to wait."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


ERROR_FORMATS = ("openai", "vllm")
"""What `--error-format` may say: whose words `type` and `code` have."""

TOO_LONG = "context_length_exceeded"
OVER_CAPACITY = "over_capacity"
_VLLM_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_BEFORE_VLLMS_ROUTES = (
    *("invalid_json", "invalid_utf8", "invalid_type", "missing_field", "json_too_deep", "unknown_field"),
    *("unsupported_media_type", "route_not_found"),
)
"""Codes of refusals that in vLLM come from its web framework, which gives them the name of the HTTP status."""


class ErrorDetail(msgspec.Struct):
    """What went wrong: a sentence, a class, the field at fault, and a word for programs (in vLLM's format the HTTP status)."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class HTTPError(Exception):
    """An answer that is not a success, raised from anywhere in a route."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.detail = ErrorDetail(message, _TYPES.get(status, "invalid_request_error"), param, code)
        self.headers = headers or {}

    def body(self, error_format: str = "openai") -> bytes:
        """The JSON that the client gets, in one of `ERROR_FORMATS`."""
        detail = self.detail if error_format == "openai" else self._vllm_detail()
        return msgspec.json.encode(ErrorResponse(detail))

    def _vllm_detail(self) -> ErrorDetail:
        detail, name = self.detail, _VLLM_TYPES.get(self.status)
        if name is None or detail.code in _BEFORE_VLLMS_ROUTES:
            name = HTTPStatus(self.status).phrase
        return ErrorDetail(detail.message, name, detail.param, self.status)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> HTTPError:
    return HTTPError(400, message, param=param, code=code)


def bad_field(field: str, why: str, code: str | None = None) -> HTTPError:
    """A 400 that says what is wrong with a field, by its path: `field: why`."""
    return bad_request(f"{field}: {why}", field, code)


def not_ready(message: str, retry_after: float = DEFAULT_RETRY_AFTER_S) -> HTTPError:
    """A 503 that says when to come back."""
    return HTTPError(503, message, code="unavailable", headers=_retry_after(retry_after))


def _retry_after(seconds: float | None) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds if seconds is not None else DEFAULT_RETRY_AFTER_S)))}


def from_exception(error: BaseException, request_id: str) -> HTTPError:
    """What the client is told about `error`; the cause of one of ours (500) stays in the log."""
    match error:
        case HTTPError():
            return error
        case NotFoundError():
            return HTTPError(404, str(error), param=error.param, code="not_found")
        case RequestError():
            codes: dict[type[RequestError], str] = {TooLongError: TOO_LONG, NotSupportedError: "not_supported"}
            return HTTPError(400, str(error), param=error.param, code=codes.get(type(error)))
        case CapacityError():
            status = 503 if error.status == 503 else 429
            return HTTPError(status, str(error), code=OVER_CAPACITY, headers=_retry_after(error.retry_after))
        case DeadlineError():  # OpenAI's and Anthropic's clients would try again, for nobody
            return HTTPError(504, str(error), code="deadline_exceeded", headers={"x-should-retry": "false"})
        case ShutdownError():
            return not_ready(str(error))
        case EngineDeadError():
            return HTTPError(503, "The engine is not running.", code="engine_dead", headers=_retry_after(None))
        case QuireError() if error.status < 500:
            return HTTPError(error.status, str(error))
        case _:
            return HTTPError(500, f"Internal server error (request id {request_id}).", code="internal_error")


def error_of_finished(message: str | None, request_id: str) -> HTTPError:
    """The error of a request that the engine itself ended with finish reason `error`."""
    text = f"The request failed in the engine (request id {request_id})"
    return HTTPError(500, f"{text}: {message}" if message else f"{text}.", code="request_failed")


def openapi_error_responses(schema: dict[str, Any]) -> dict[str, Any]:
    """The error statuses that every work route may answer, for the OpenAPI page; `schema`: of their bodies."""
    meaning = {
        400: "The request is wrong; `param` names the field.",
        401: "The key is missing or unknown.",
        404: "No such model or route.",
        413: "The body is larger than the server's limit.",
        429: "No room now; see Retry-After.",
        503: "Starting, draining, or the engine is dead; see Retry-After.",
        504: "The request did not end within its timeout.",
    }
    content = {"application/json": {"schema": schema}}
    return {str(status): {"description": text, "content": content} for status, text in meaning.items()}


Fields: TypeAlias = dict[str, Any]


def one_of(value: Any, allowed: Collection[str], path: str) -> str:
    """A word of the field at `path`, if it is one of those that are allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise bad_field(path, f"{str(value)[:60]!r} is unknown; allowed: {', '.join(allowed)}.")
    return value


def string_field(fields: Fields, name: str, path: str) -> str:
    """The string under a name of the object at `path`."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise bad_field(f"{path}.{name}", "expected a string.")
    return value


def object_at(value: Any, path: str) -> Fields:
    """A value that must be an object."""
    if not isinstance(value, dict):
        raise bad_field(path, "expected an object.")
    return cast("Fields", value)
