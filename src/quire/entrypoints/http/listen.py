"""Where the server listens. Standard library only, so that the port is open before anything slow is imported."""

import dataclasses
import os
import socket
import stat

from quire.errors import ConfigError

BACKLOG = 2048
"""Connections that may wait to be accepted; they also wait here while the server imports."""


@dataclasses.dataclass(frozen=True)
class ListenOptions:
    """Where and how to listen; `quiet_paths` have no line in the access log."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str = "TLSv1"
    access_log: bool = True
    quiet_paths: tuple[str, ...] = ()
    log_level: str = "info"
    shutdown_timeout_s: float = 300.0
    keep_alive_on_engine_death: bool = False
    max_header_bytes: int = 64 << 10
    max_header_count: int = 256
    ssl_refresh: bool = False

    @property
    def url(self) -> str:
        if self.uds:
            return f"unix:{self.uds}"
        scheme = "https" if self.ssl_certfile else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"


def open_socket(
    options: ListenOptions, shared: bool = False, listen: bool = True
) -> tuple[socket.socket, ListenOptions]:
    """Bind and listen at once; gives the options back with the port that was chosen for `port=0`.
    Raises ConfigError if the address cannot be had.

    Args:
        shared: other processes of this user may listen on the port too; the kernel spreads connections over those that do.
        listen: False only keeps the port.
    """
    try:
        if options.uds:
            return _unix_socket(options.uds), options
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((options.host, options.port))
        if listen:
            listener.listen(BACKLOG)
        return listener, dataclasses.replace(options, port=listener.getsockname()[1])
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if options.uds:
            raise ConfigError.of("uds", f"cannot listen on {options.uds!r}: {reason}.") from None
        where = f"{options.host}:{options.port}"
        message = f"cannot listen on {where}: {reason}. Choose another with --host and --port."
        raise ConfigError.of("port", message) from None


def _unix_socket(path: str) -> socket.socket:
    """A Unix socket for its owner alone; one that a dead server left behind is replaced."""
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
    listener.listen(BACKLOG)
    return listener
