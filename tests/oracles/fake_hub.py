"""A hub on this machine: an HTTP server that answers huggingface_hub as https://huggingface.co does, and a process that asks it.

Small files come from the hub itself, large ones (as with Git LFS) by a redirect to a storage on another host, which must not
be shown a token. Repositories are folders of a test; revisions name commits. The routes are those that the client calls:
`/api/models/…` for what there is, `/…/resolve/…` for files.
"""

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_right"
GUEST_TOKEN = "hf_without_access"
LARGE = (".safetensors", ".bin", ".gguf", ".model", "tokenizer.json")
_API = re.compile(r"/api/models/(.+?)(?:/revision/([^/]+))?")
_RESOLVE = re.compile(r"/(.+?)/resolve/([^/]+)/(.+)")


@dataclasses.dataclass
class Repository:
    """`access`: public, gated (files need a token that may read them) or private (so does everything)."""

    commits: dict[str, dict[str, bytes]]
    revisions: dict[str, str]
    access: str = "public"


@dataclasses.dataclass(frozen=True)
class Seen:
    """One request. `first`, `count`: of the bytes that were sent."""

    method: str
    path: str
    status: int
    has_token: bool
    first: int = 0
    count: int = 0


def blob_name(name: str, content: bytes) -> str:
    """As Git, or Git LFS, calls a content."""
    if is_large(name):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(name: str) -> bool:
    return name.endswith(LARGE)


class FakeHub:
    """The server.

    Attributes:
        url: for HF_ENDPOINT.
        seen: every request, in order.
        breaks: a file's name to the numbers of bytes after which its next answers break off.
        held: a file's name to an event: half of it is sent, and the rest when the event is set.
        broken: an HTTP status that the hub answers to everything; 0 for none.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.seen: list[Seen] = []
        self.breaks: dict[str, list[int]] = {}
        self.held: dict[str, threading.Event] = {}
        self.half_sent = threading.Event()
        self.broken = 0
        hub = self

        class Handler(_Handler):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self.hub = hub
                super().__init__(*args, **kwargs)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.storage_url = f"http://localhost:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        for event in self.held.values():
            event.set()
        self._server.shutdown()
        self._server.server_close()

    def add(
        self, name: str, files: dict[str, bytes | str] | Path, access: str = "public", revision: str = "main"
    ) -> str:
        """A commit with these files, or with a folder's, as the revision; returns its name."""
        if isinstance(files, Path):
            files = {
                path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()
            }
        content = {name: text.encode() if isinstance(text, str) else text for name, text in sorted(files.items())}
        commit = hashlib.sha1(repr((name, revision, content)).encode()).hexdigest()
        repository = self.repositories.setdefault(name, Repository({}, {}, access))
        repository.commits[commit] = content
        repository.revisions[revision] = commit
        return commit

    def fetched(self, suffix: str = "") -> list[str]:
        """Names of files whose content was asked for, in order."""
        names = [
            seen.path.rpartition("?name=")[2] for seen in self.seen if seen.method == "GET" and "?name=" in seen.path
        ]
        return [name for name in names if name.endswith(suffix)]

    def sent(self, name: str) -> list[tuple[int, int]]:
        """(first byte, number of bytes) of each answer with a file's content."""
        return [
            (seen.first, seen.count)
            for seen in self.seen
            if seen.method == "GET" and seen.path.endswith(f"?name={name}")
        ]

    def environment(self, home: Path, **others: str) -> dict[str, str]:
        """Of a process whose hub this is, with nothing in its cache."""
        kept = {
            name: text for name, text in os.environ.items() if not name.startswith(("HF_", "HUGGING_FACE", "QUIRE_"))
        }
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home / "hf"), "QUIRE_CACHE_ROOT": str(home / "quire")}
        return {**kept, **own, "HOME": str(home), "OMP_NUM_THREADS": "1", "NO_PROXY": "*", **others}


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing: `seen` has it."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = url.path
        if self.hub.broken:
            self._answer(self.hub.broken, b"", {})
        elif path.startswith("/storage/"):
            self._storage(path, url.query)
        elif found := _RESOLVE.fullmatch(path):
            self._resolve(found[1], unquote(found[2]), unquote(found[3]))
        elif path == "/api/models":
            words = parse_qs(url.query)
            names = [name for name in self.hub.repositories if words.get("search", [""])[0] in name]
            body = [{"id": name, "modelId": name, "downloads": 1200, "likes": 3} for name in names]
            self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        elif found := _API.fullmatch(path):
            self._describe(found[1], unquote(found[2] or "main"))
        else:
            self._refuse(404, "", "no such route")

    def _find(self, name: str, revision: str, *, files: bool) -> tuple[Repository, str] | None:
        """The repository and commit; an answer was sent where there is none, or no access."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given not in ("", TOKEN, GUEST_TOKEN):
            self._refuse(401, "", "Invalid credentials in Authorization header")
            return None
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.access == "private" and given != TOKEN):
            self._refuse(404 if given else 401, "RepoNotFound", "Repository not found")
            return None
        if files and repository.access == "gated" and given != TOKEN:
            self._refuse(403 if given else 401, "GatedRepo", f"Access to model {name} is restricted")
            return None
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository, commit

    def _describe(self, name: str, revision: str) -> None:
        found = self._find(name, revision, files=False)
        if found is None:
            return
        repository, commit = found
        siblings = [_sibling(file, content) for file, content in repository.commits[commit].items()]
        body = {
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": repository.access == "private",
            "siblings": siblings,
        }
        self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        found = self._find(name, revision, files=True)
        if found is None:
            return
        repository, commit = found
        content = repository.commits[commit].get(file)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if content is None:
            self._refuse(404, "EntryNotFound", f"{file} does not exist", headers)
        elif is_large(file):
            blob = blob_name(file, content)
            headers |= {"X-Linked-Etag": f'"{blob}"', "X-Linked-Size": str(len(content))}
            location = f"{self.hub.storage_url}/storage/{name}/{commit}/{blob}?name={file}"
            self._answer(302, b"", headers | {"Location": location})
        else:
            self._send_content(file, content, headers | {"ETag": f'"{blob_name(file, content)}"'})

    def _storage(self, path: str, query: str) -> None:
        if self.headers.get("Authorization"):
            self._refuse(400, "", "a signed address and a token at once")
            return
        name, commit, _ = path.removeprefix("/storage/").rsplit("/", 2)
        file = query.removeprefix("name=")
        self._send_content(file, self.hub.repositories[name].commits[commit][file], {"Accept-Ranges": "bytes"})

    def _send_content(self, file: str, content: bytes, headers: dict[str, str]) -> None:
        first, last, status = 0, len(content) - 1, 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last, status = int(asked[1]), min(int(asked[2] or last), last), 206
            headers = headers | {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        body = content[first : last + 1]
        count = len(body) if self.command == "GET" else 0
        if self.command == "GET" and self.hub.breaks.get(file):
            count = min(count, self.hub.breaks[file].pop(0))
        self._begin(status, len(body), headers)
        held = self.hub.held.get(file) if self.command == "GET" else None
        if held is not None:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.hub.half_sent.set()
            held.wait()
            first, body, count = first + len(body) // 2, body[len(body) // 2 :], count - len(body) // 2
        try:
            self.wfile.write(body[:count])
        except OSError:
            count = 0  # the reader is gone
        name = "" if "?name=" in self.path else f"?name={file}"
        self._note(status, first, count, name)
        if self.command == "GET" and count < len(body):
            self.close_connection = True

    def _refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        marks = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._answer(status, json.dumps({"error": message}).encode(), {**(headers or {}), **marks})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._begin(status, len(body), headers)
        if self.command == "GET":
            self.wfile.write(body)
        self._note(status, 0, len(body), "")

    def _begin(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, text)
        self.end_headers()

    def _note(self, status: int, first: int, count: int, name: str) -> None:
        has_token = bool(self.headers.get("Authorization"))
        self.hub.seen.append(Seen(self.command, self.path + name, status, has_token, first, count))


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    described: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
    if is_large(name):
        described["lfs"] = {"sha256": blob_name(name, content), "size": len(content), "pointerSize": 130}
    else:
        described["blobId"] = blob_name(name, content)
    return described


_ASK = """
import dataclasses, json, sys
from quire.config.hub import fetch_weights, find_model, find_tokenizer
from quire.config.hub.listing import HubSettings
from quire.errors import ConfigError
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    settings = HubSettings(**{**asked["settings"], "ignore_patterns": tuple(asked["settings"].get("ignore_patterns", ()))})
    try:
        if asked["tokenizer"]:
            answer = {"path": find_tokenizer(asked["name"], settings)}
        else:
            found = find_model(asked["name"], settings)
            if found.hub is not None and asked["weights"]:
                fetch_weights(found.hub, settings)
            answer = {"path": found.path}
    except ConfigError as error:
        answer = {"error": str(error), "setting": error.setting}
    print(json.dumps(answer), flush=True)
"""


class Asker:
    """A process of Quire's that finds models at a hub, one after another; it imports no torch."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def begin(self, name: str, *, weights: bool = True, tokenizer: bool = False, **settings: Any) -> None:
        assert self._process.stdin is not None
        asked = {"name": name, "weights": weights, "tokenizer": tokenizer, "settings": settings}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """`path`, or `error` and `setting`."""
        assert self._process.stdout is not None
        while True:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"the process ended with code {self._process.wait()}")
            if line.startswith("{"):
                return json.loads(line)

    def find(self, name: str, **wishes: Any) -> dict[str, Any]:
        self.begin(name, **wishes)
        return self.result()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
