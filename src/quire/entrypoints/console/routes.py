"""The server's pages, the console at `/` and the routes at `/docs`: a page each, and under a folder named after their content
the scripts and styles that it loads.

Knows files and HTTP headers. What a page shows it asks of the server's other routes, with the key that its reader types in;
the files themselves hold nothing secret and need no key. Nothing comes from another host.
"""

import functools
import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.entrypoints.http.route_tools import Handler

_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_PAGE = "index.html"
_PAGE_CACHING = "no-cache"
_FILE_CACHING = "public, max-age=31536000, immutable"

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing from other hosts, no inline script or style, no frame around it, and no text that becomes HTML."""

_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@functools.cache
def build_console_routes() -> tuple[Route, ...]:
    """The console, at `/`."""
    return _build_routes("console", ("/",))


@functools.cache
def build_docs_routes() -> tuple[Route, ...]:
    """The page of the server's routes, under both names that users know."""
    return _build_routes("docs", ("/docs", "/redoc"))


def _build_routes(name: str, pages: tuple[str, ...]) -> tuple[Route, ...]:
    """A route for each file of a folder of assets, at an exact path; the files are read once. `pages`: paths of its page."""
    folder = files("quire") / "assets" / name
    contents = {entry.name: entry.read_bytes() for entry in folder.iterdir() if _extension(entry.name) in _MEDIA_TYPES}
    digest = hashlib.sha256()
    for file, content in sorted(contents.items()):
        digest.update(b"%d %s %d " % (len(file), file.encode(), len(content)) + content)
    version = digest.hexdigest()[:16]
    base = f"{name}/assets/{version}"
    page = contents.pop(_PAGE).replace(b"{assets}", base.encode())
    routes = [Route(path, _file(page, _PAGE, version, _PAGE_CACHING), methods=["GET"]) for path in pages]
    routes += [
        Route(f"/{base}/{file}", _file(content, file, version, _FILE_CACHING), methods=["GET"])
        for file, content in sorted(contents.items())
    ]
    return tuple(routes)


def _extension(name: str) -> str:
    return name.rpartition(".")[2]


def _file(content: bytes, name: str, version: str, caching: str) -> Handler:
    tag = f'"{version}"'
    headers = {**_HEADERS, "cache-control": caching, "etag": tag}
    media_type = _MEDIA_TYPES[_extension(name)]

    async def handler(request: Request) -> Response:
        known = [known.strip().removeprefix("W/") for known in request.headers.get("if-none-match", "").split(",")]
        if tag in known:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return handler
