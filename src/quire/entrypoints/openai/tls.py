"""Certificates that are renewed while the server runs: read again when their files change.

Knows files and the TLS context. Connections that are open keep what they have.
"""

import asyncio
import os
import ssl

import uvicorn

from quire.entrypoints.openai.listen import ListenOptions
from quire.logger import init_logger

logger = init_logger(__name__)

LOOK_EVERY_S = 5.0
"""Seconds between two looks at the files."""


async def refresh_certificates(config: uvicorn.Config, options: ListenOptions) -> None:
    """Look at the files until cancelled."""
    seen = _stamps(options)
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        now = _stamps(options)
        if now == seen or config.ssl is None or not options.ssl_certfile:
            continue
        try:
            config.ssl.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
            if options.ssl_ca_certs:
                config.ssl.load_verify_locations(options.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:  # half-written, or a pair that does not match yet
            logger.warning("The TLS files have changed and cannot be read yet: %s", error)
            continue
        seen = now
        logger.info("The TLS files have changed and were read again.")


def _stamps(options: ListenOptions) -> list[tuple[int, int] | None]:
    """When each file was written last, and its size; None for one that is not there."""
    stamps: list[tuple[int, int] | None] = []
    for path in (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs):
        try:
            status = os.stat(path or "")
            stamps.append((status.st_mtime_ns, status.st_size))
        except OSError:
            stamps.append(None)
    return stamps
