"""Fetches a file that a client names by an http(s) URL, for a server that does not trust the client.

Each host, the first and those of redirects, is looked up once; all of its addresses are checked; and the connection goes to a
checked address, not to the name. Bytes, redirects and the whole time are bounded. Knows nothing of images.
"""

import functools
import http.client
import io
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from quire.config import limits
from quire.multimodal.addresses import is_public
from quire.threads import call_within
from quire.version import __version__

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_PIECE = 1 << 16
_TRIED = 4
"""Addresses of a host that are tried."""


class MediaError(ValueError):
    """Why a medium cannot be had, in words for the client."""


Resolve = Callable[[str, int], Sequence[str]]
"""The addresses of a host, for a port."""


def resolve(host: str, port: int) -> list[str]:
    """What the system's resolver says. Raises OSError: the host has no address."""
    return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))


class Deadline:
    """The end of a fetch."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left. Raises MediaError: none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.error()
        return left

    def error(self) -> MediaError:
        """That time is up."""
        return MediaError(f"fetching it takes longer than {self._seconds:g} s")


class _Target(NamedTuple):
    scheme: str
    host: str
    port: int
    path: str


def host_name(host: str) -> str:
    """The one spelling of a host's name or address. Raises ValueError: it cannot be one."""
    plain = host.strip().strip("[]").rstrip(".").lower()
    return plain if plain.isascii() else plain.encode("idna").decode()


def _parse(url: str) -> _Target:
    if len(url) > limits.MAX_URL_CHARS:
        raise MediaError(f"its URL has more than {limits.MAX_URL_CHARS} characters")
    try:
        if any(character <= " " or character in "\\\x7f" for character in url):
            raise ValueError
        parts = urllib.parse.urlsplit(url)
        host, port = host_name(parts.hostname or ""), parts.port
        if parts.scheme not in _PORTS or not host or parts.username is not None:
            raise ValueError
    except ValueError:
        raise MediaError(f"{url[:80]!r} is not a URL of the form https://HOST/PATH") from None
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = f"?{urllib.parse.quote(parts.query, safe='%:@!$&()*+,;=~-._/?')}" if parts.query else ""
    return _Target(parts.scheme, host, port or _PORTS[parts.scheme], path + query)


class WebFetcher:
    """Fetches files from hosts of the public internet, or from those that the operator names.

    Args:
        domains: the only hosts that may be asked; these may have private addresses, too. None: any host with public ones.
        timeout_s: for everything, redirects included.
        max_bytes: of the file.
        max_redirects: how many are followed; the target of each is checked as the first URL was.
        resolve: looks hosts up.
    """

    def __init__(
        self,
        domains: Collection[str] | None,
        timeout_s: float,
        max_bytes: int = limits.MAX_MEDIA_BYTES,
        max_redirects: int = limits.MAX_MEDIA_REDIRECTS,
        resolve: Resolve = resolve,
    ) -> None:
        self._domains = None if domains is None else {host_name(domain) for domain in domains}
        self._timeout_s, self._max_bytes, self._max_redirects = timeout_s, max_bytes, max_redirects
        self._resolve = resolve
        self._tls: ssl.SSLContext | None = None

    def fetch(self, url: str) -> bytes:
        """The file behind a URL. Raises MediaError: it may not be fetched, or cannot be."""
        deadline = Deadline(self._timeout_s)
        target = _parse(url)
        for _ in range(self._max_redirects + 1):
            try:
                answer = self._ask(target, deadline)
            except TimeoutError:
                raise deadline.error() from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                if isinstance(error, MediaError):
                    raise
                raise MediaError(f"it cannot be fetched from {target.host!r}: {type(error).__name__}") from None
            if isinstance(answer, bytes):
                return answer
            url = urllib.parse.urljoin(url, answer)
            before, target = target, _parse(url)
            if before.scheme == "https" and target.scheme != "https":
                raise MediaError(f"{before.host!r} redirects from https to http")
        raise MediaError(f"it is behind more than {self._max_redirects} redirects")

    def _addresses(self, target: _Target, deadline: Deadline) -> Sequence[str]:
        """Where a host may be asked: all addresses that it has now, of which each one must be allowed."""
        if self._domains is not None and target.host not in self._domains:
            raise MediaError(f"the host {target.host!r} is not one of the server's --allowed-media-domains")
        try:
            find = functools.partial(self._resolve, target.host, target.port)
            addresses = call_within(deadline.left(), find, "media-host")
        except TimeoutError:
            raise deadline.error() from None
        except (OSError, UnicodeError):
            raise MediaError(f"the host {target.host!r} is not known") from None
        if self._domains is None and not all(map(is_public, addresses)):
            raise MediaError(f"the host {target.host!r} is not one of the public internet")
        return addresses

    def _ask(self, target: _Target, deadline: Deadline) -> bytes | str:
        """The file, or where it is."""
        connection = self._connect(target, deadline)
        try:
            connection.request("GET", target.path, headers={"User-Agent": f"quire/{__version__}", "Accept": "*/*"})
            response = connection.getresponse()
            location = response.getheader("Location")
            if response.status in _REDIRECTS and location:
                return location
            if response.status != 200:
                raise MediaError(f"{target.host!r} answers with status {response.status}")
            return self._read(response, target)
        finally:
            connection.hang_up()

    def _connect(self, target: _Target, deadline: Deadline) -> "_CheckedConnection":
        if target.scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        failure: OSError = OSError("the host has no address")
        for address in self._addresses(target, deadline)[:_TRIED]:
            connection = _CheckedConnection(target, address, deadline, self._tls if target.scheme == "https" else None)
            try:
                connection.connect()
                return connection
            except OSError as error:
                connection.hang_up()
                failure = error
        raise failure

    def _read(self, response: http.client.HTTPResponse, target: _Target) -> bytes:
        if response.getheader("Content-Encoding", "identity").lower() not in ("identity", ""):
            raise MediaError(f"{target.host!r} compresses it, which was not asked for")
        declared = response.length
        body = bytearray()
        while len(body) <= self._max_bytes and (declared is None or declared <= self._max_bytes):
            piece = response.read(_PIECE)
            if not piece:
                if declared is not None and len(body) < declared:
                    raise MediaError(f"{target.host!r} ends after {len(body)} of {declared} bytes")
                return bytes(body)
            body += piece
        raise MediaError(f"it has more than {self._max_bytes} bytes")


class _CheckedConnection(http.client.HTTPConnection):
    """A connection to an address that was checked, whatever the host's name means by now; it ends at the deadline."""

    def __init__(self, target: _Target, address: str, deadline: Deadline, tls: ssl.SSLContext | None) -> None:
        super().__init__(target.host, target.port)
        self.default_port = _PORTS[target.scheme]
        self._address, self._deadline, self._tls = address, deadline, tls
        self._socket: socket.socket | None = None

    def connect(self) -> None:
        """Connect, and begin TLS where it is wanted."""
        plain = self._socket = socket.create_connection((self._address, self.port), self._deadline.left())
        if self._tls is not None:
            plain.settimeout(self._deadline.left())
            self._socket = self._tls.wrap_socket(plain, server_hostname=self.host)
        self.sock = _BoundSocket(self._socket, self._deadline)

    def hang_up(self) -> None:
        """Close the socket, whoever reads from it."""
        if self._socket is not None:
            self._socket.close()


class _BoundSocket:
    """What `http.client` uses of a socket: no call goes on behind the deadline."""

    def __init__(self, inner: socket.socket, deadline: Deadline) -> None:
        self._inner, self._deadline = inner, deadline

    def sendall(self, data: bytes) -> None:
        """Send all of it."""
        self._inner.settimeout(self._deadline.left())
        self._inner.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        """The stream of what comes."""
        return io.BufferedReader(_BoundReader(self._inner, self._deadline))

    def close(self) -> None:
        """The connection's owner hangs up: `http.client` closes before the answer is read."""


class _BoundReader(io.RawIOBase):
    def __init__(self, inner: socket.socket, deadline: Deadline) -> None:
        self._inner, self._deadline = inner, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._inner.settimeout(self._deadline.left())
        return self._inner.recv_into(buffer)
