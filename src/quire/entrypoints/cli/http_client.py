"""A small client of the OpenAI protocol, for the terminal commands: standard library only, one request at a time."""

import contextlib
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from quire.errors import ConfigError, EngineError, RequestError

TIMEOUT_S = 600.0


class OpenAIClient:
    """Talks to the server at `url` (its path ends in `/v1`).

    Args:
        base: the path, where the URL has none.

    Raises:
        ConfigError: the URL cannot be one, or nobody answers there.
    """

    def __init__(
        self, url: str, api_key: str | None = None, *, base: str = "/v1", timeout_s: float = TIMEOUT_S
    ) -> None:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError.of("url", f"{url!r} is not an address; for example http://127.0.0.1:8000/v1.")
        try:
            _ = parts.port
        except ValueError:
            raise ConfigError.of("url", f"{url!r} has no valid port.") from None
        self.url = url
        self._base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or base}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """The name of the first model that the server lists."""
        listed = self.get("/models")
        try:
            return str(json.loads(listed)["data"][0]["id"])
        except (ValueError, KeyError, TypeError, IndexError):
            raise ConfigError.of("model_name", f"the server at {self.url} lists no model.") from None

    def get(self, path: str) -> bytes:
        """What the server gives at a path.
        Raises RequestError: the server refused it.
        Raises EngineError: the server failed."""
        with self._open("GET", path, None) as response:
            try:
                return response.read()
            except (OSError, http.client.HTTPException) as error:
                raise EngineError(f"The server's answer broke off: {error or type(error).__name__}") from None

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed request.
        Raises RequestError: the server refused it.
        Raises EngineError: the server failed."""
        with self._open("POST", path, {**body, "stream": True}) as response:
            try:
                yield from _events(response)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise EngineError(f"The server's answer broke off: {error or type(error).__name__}") from None

    def _open(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        """An answer that is good so far. Closing it closes the connection, which ends the request."""
        payload = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, payload, self._headers, method=method)
        try:
            return self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error, contextlib.suppress(OSError, http.client.HTTPException):  # the status says enough
                raise _refusal(error.code, error.read(65536).decode("utf-8", "replace")) from None
            raise _refusal(error.code, "") from None
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
            raise ConfigError.of("url", f"cannot reach {self.url}: {reason}. Is `quire serve` running there?") from None


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise EngineError(str(event["error"].get("message", event["error"])))
        yield event


def _refusal(status: int, text: str) -> RequestError | EngineError:
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = text[:500] or "no message"
    kind = RequestError if status < 500 else EngineError
    return kind(f"The server answered {status}: {message}")
