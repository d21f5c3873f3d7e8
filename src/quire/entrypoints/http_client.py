"""One request to a server of the OpenAI protocol, at once and by the standard library: for commands and around benchmarks.

A load of many requests is sent by `benchmarks/http_load.py`. Knows HTTP and server-sent events.
"""

import contextlib
import http.client
import json
import ssl
import urllib.parse
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.errors import ConfigError, EngineError, QuireError, RequestError

CONTROL_TIMEOUT_S = 60.0
"""How long a request that is not measured may take (models, profile, reset)."""
ANSWER_TIMEOUT_S = 600.0


class Target(msgspec.Struct, frozen=True):
    """A server. Attributes: uds: the socket that it listens on, where it has no port; for `backend_link.exchange`."""

    host: str
    port: int
    base_path: str = ""
    is_tls: bool = False
    insecure: bool = False
    headers: dict[str, str] = {}
    uds: str = ""

    @classmethod
    def parse(
        cls, url: str, headers: dict[str, str] | None = None, insecure: bool = False, *, setting: str = "base_url"
    ) -> "Target":
        """From `http://host:port[/path]`, without a `/v1` at the end. `setting`: the flag that gave the URL.
        Raises ConfigError: it is no such URL."""
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError.of(setting, f"{url!r} is not an address; for example http://127.0.0.1:8000.")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), path, is_tls, insecure, headers or {})

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.is_tls else ''}://{host}:{self.port}{self.base_path}"

    def tls_context(self) -> ssl.SSLContext | None:
        """What a connection needs; None without TLS."""
        if not self.is_tls:
            return None
        context = ssl.create_default_context()
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def request_head(self, path: str) -> bytes:
        """The head of a POST, up to the number that says how long the body is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"POST {self.base_path}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join((*lines, "Content-Type: application/json", "Content-Length: ")).encode()


@contextlib.contextmanager
def _exchange(
    target: Target, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
) -> Iterator[http.client.HTTPResponse]:
    """Send a request; leaving closes the connection, which ends the request."""
    if target.is_tls:
        link: http.client.HTTPConnection = http.client.HTTPSConnection(
            target.host, target.port, timeout=timeout_s, context=target.tls_context()
        )
    else:
        link = http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
    with contextlib.closing(link):
        payload = None if body is None else json.dumps(body).encode()
        link.request(method, target.base_path + path, payload, {**target.headers, "Content-Type": "application/json"})
        yield link.getresponse()


def ask(
    target: Target, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
) -> tuple[int, bytes]:
    """The status and body that a route answers.
    Raises OSError: no server answers there.
    Raises EngineError: what answers does not speak HTTP."""
    try:
        with _exchange(target, method, path, body, timeout_s) as response:
            return response.status, response.read()
    except http.client.HTTPException as error:
        raise EngineError(f"{target.url}{path} does not answer in HTTP: {type(error).__name__}: {error}.") from None


def control(
    target: Target, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
) -> Any:
    """The JSON that a route answers; None for an empty answer.
    Raises OSError: no server answers there.
    Raises EngineError: the server answered with an error, or with something else than JSON."""
    status, raw = ask(target, method, path, body, timeout_s)
    if status >= 400:
        raise EngineError(f"{target.url}{path} answered {status}: {raw[:300].decode('utf-8', 'replace')}")
    try:
        return json.loads(raw) if raw.strip() else None
    except ValueError:
        raise EngineError(f"{target.url}{path} answered no JSON: {raw[:100]!r}") from None


class OpenAIClient:
    """Talks to the server at `url` for a user at a terminal: every failure is an error that says what to do.

    Args:
        base: the path, where the URL has none.

    Raises:
        ConfigError: the URL cannot be one, or no server answers there.
    """

    def __init__(
        self, url: str, api_key: str | None = None, *, base: str = "/v1", timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        whole = url if "://" in url else f"http://{url}"
        path = urllib.parse.urlsplit(whole).path.rstrip("/")
        target = Target.parse(whole, headers, setting="url")
        self._target = msgspec.structs.replace(target, base_path=path or base)
        self.url = url
        self._timeout_s = timeout_s

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
            return response.read()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed request.
        Raises RequestError: the server refused it.
        Raises EngineError: the server failed."""
        with self._open("POST", path, {**body, "stream": True}) as response:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    event = json.loads(data)
                    if "error" in event:
                        raise EngineError(str(event["error"].get("message", event["error"])))
                    yield event

    @contextlib.contextmanager
    def _open(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        """An answer whose status is good; what breaks afterwards is the server's failure."""
        has_answer = False
        try:
            with _exchange(self._target, method, path, body, self._timeout_s) as response:
                has_answer = True
                if response.status >= 300:
                    raise _refusal(response)
                yield response
        except QuireError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            if has_answer:
                raise EngineError(f"The server's answer broke off: {error or type(error).__name__}") from None
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ConfigError.of("url", f"cannot reach {self.url}: {reason}. Is `quire serve` running there?") from None


def _refusal(response: http.client.HTTPResponse) -> RequestError | EngineError:
    text = ""
    with contextlib.suppress(OSError, http.client.HTTPException):  # the status says enough
        text = response.read(65536).decode("utf-8", "replace")
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = text[:500] or "no message"
    kind = RequestError if response.status < 500 else EngineError
    return kind(f"The server answered {response.status}: {message}")
