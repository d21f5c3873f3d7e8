"""The Hugging Face hub, and mirrors of it (HF_ENDPOINT), through huggingface_hub: versions from 0.30 on.

Files go to the client's own cache, laid out as https://huggingface.co/docs/huggingface_hub/guides/manage-cache says, so that
other programs find them. The client is imported when it is used first.
"""

import contextlib
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.config.hub.failures import Failure, explain, is_transient
from quire.config.hub.listing import HubFile, HubSettings, Listing
from quire.kept_files import write_whole
from quire.logger import init_logger

logger = init_logger(__name__)

DEFAULT_REVISION = "main"
TIMEOUT_S = 30.0
"""For one answer of the hub."""
TRIES = 3
"""Failures of a file in a row, with nothing between that came."""
PAUSE_S = 1.0
RESUMED_BYTES = 1 << 20
"""Broken downloads of files from this size on are resumed."""


class HuggingFaceHub:
    """One user's view of the hub."""

    name = "the hub"

    def __init__(self, settings: HubSettings) -> None:
        self._client: Any = importlib.import_module("huggingface_hub")
        self._constants = _part("constants")
        self._token = settings.token
        self._revision = settings.revision or DEFAULT_REVISION
        self.cache = Path(settings.cache or self._constants.HF_HUB_CACHE).expanduser().resolve()

    @property
    def endpoint(self) -> str:
        return str(self._constants.ENDPOINT)

    @property
    def is_offline(self) -> bool:
        return bool(self._constants.HF_HUB_OFFLINE)

    @property
    def shows_progress(self) -> bool:
        return self._constants.HF_HUB_DISABLE_PROGRESS_BARS is not True

    def _folder(self, repository: str) -> Path:
        return self.cache / f"models--{repository.replace('/', '--')}"

    def list_files(self, repository: str) -> Listing:
        """What the hub has at the revision. Raises whatever the client does."""
        api = self._client.HfApi(token=self._token)
        facts: dict[str, Any] = {"revision": self._revision, "files_metadata": True, "timeout": TIMEOUT_S}
        info = _again(lambda: api.model_info(repository, **facts))
        files = tuple(_file(sibling) for sibling in info.siblings or ())
        return Listing(repository, str(info.sha), self._snapshot(repository, str(info.sha)), files)

    def _snapshot(self, repository: str, commit: str) -> str:
        return str(self._folder(repository) / "snapshots" / commit)

    def find_cached(self, repository: str) -> Listing | None:
        """What the cache has at the revision; None where it has nothing."""
        reference = self._folder(repository) / "refs" / self._revision
        commit = reference.read_text("utf-8").strip() if reference.is_file() else self._revision
        folder = self._snapshot(repository, commit)
        names = [path.relative_to(folder).as_posix() for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return Listing(repository, commit, folder, tuple(map(HubFile, names)), is_local=True) if names else None

    def keep_revision(self, listing: Listing) -> None:
        """Let later starts without a network find this commit under the revision's name."""
        reference = self._folder(listing.repository) / "refs" / self._revision
        if self._revision == listing.commit or listing.is_local:
            return
        with contextlib.suppress(OSError):  # a cache that is only read
            write_whole(reference, listing.commit.encode())

    def fetch(self, listing: Listing, file: HubFile) -> None:
        """Bring one file to the cache. Another process that fetches the same is waited for."""
        place: dict[str, Any] = {"revision": listing.commit, "cache_dir": str(self.cache), "token": self._token}
        if file.size >= RESUMED_BYTES:
            _again(lambda: self._fetch_content(listing, file))
        _again(lambda: self._client.hf_hub_download(listing.repository, file.name, **place))

    def _fetch_content(self, listing: Listing, file: HubFile) -> None:
        """The content of a large file, from where an earlier download of it was broken off, even of another process.

        The client goes on by itself only within one process, and only as long as the storage's signed address holds. What is
        stored in chunks (Xet) is left to it.
        """
        url: str = self._client.hf_hub_url(listing.repository, file.name, revision=listing.commit)
        found = self._client.get_hf_file_metadata(url, token=self._token, timeout=TIMEOUT_S)
        if found.etag is None or (getattr(found, "xet_file_data", None) is not None and self._uses_chunks()):
            return
        content = self._folder(listing.repository) / "blobs" / found.etag
        lock = self.cache / ".locks" / self._folder(listing.repository).name / f"{found.etag}.lock"
        for folder in (content.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with _part("utils").WeakFileLock(lock):
            partial = content.with_name(f"{content.name}.incomplete")
            num_failures = 0
            while not content.exists():
                before = partial.stat().st_size if partial.exists() else 0
                if found.size is not None and before > found.size:  # not a part of this file
                    partial.unlink()
                try:
                    self._go_on(partial, url, found.location, found.size)
                    partial.replace(content)
                except Exception as error:
                    has_grown = partial.exists() and partial.stat().st_size > before
                    num_failures = 0 if has_grown else num_failures + 1
                    if num_failures == TRIES or not is_transient(error):
                        raise
                    logger.warning("%s of %s broke off (%s): going on", file.name, listing.repository, error)
                    time.sleep(PAUSE_S)
                    found = self._client.get_hf_file_metadata(url, token=self._token, timeout=TIMEOUT_S)

    def _go_on(self, partial: Path, url: str, location: str, size: int | None) -> None:
        """Append to a file what it lacks."""
        headers: dict[str, str] = _part("utils").build_hf_headers(token=self._token)
        if urlsplit(location).netloc != urlsplit(url).netloc:  # a storage's address is signed; the token is the hub's
            headers = {name: text for name, text in headers.items() if name.lower() != "authorization"}
        with partial.open("ab") as stream:
            _part("file_download").http_get(
                location, stream, resume_size=stream.tell(), headers=headers, expected_size=size
            )

    def _uses_chunks(self) -> bool:
        return importlib.util.find_spec("hf_xet") is not None and not getattr(
            self._constants, "HF_HUB_DISABLE_XET", False
        )

    def fetched_bytes(self, listing: Listing, file: HubFile) -> int:
        """How much of a file is here."""
        if os.path.exists(listing.path(file.name)):
            return file.size
        if not file.blob:
            return 0
        blobs = self._folder(listing.repository) / "blobs"
        if (blobs / file.blob).exists():
            return file.size
        sizes = [0]
        for path in blobs.glob(f"{file.blob}*.incomplete"):
            with contextlib.suppress(OSError):  # it was finished meanwhile
                # What is written in no order has its length from the beginning; blocks on the disk count what is there.
                status = path.stat()
                sizes.append(min(status.st_size, status.st_blocks * 512))
        return min(max(sizes), file.size)

    def stored_types(self, listing: Listing, name: str) -> list[str]:
        """What safetensors calls the type of each tensor of a file; its header alone is read. Raises what the client does."""
        header = self._client.HfApi(token=self._token).parse_safetensors_file_metadata(
            listing.repository, name, revision=listing.commit
        )
        return [tensor.dtype for tensor in header.tensors.values()]

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        """No progress bars of the client's own."""
        bars = _part("utils")
        hides = self._constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not bars.are_progress_bars_disabled()
        if hides:
            bars.disable_progress_bars()
        try:
            yield
        finally:
            if hides:
                bars.enable_progress_bars()

    def explain(self, repository: str, error: Exception, progress: str = "") -> Failure:
        """Why a call failed, and what to do; `progress`: how much had come."""
        has_token = isinstance(self._token, str) or self._client.get_token() is not None
        known: dict[str, Any] = {"has_token": has_token, "cache": self.cache, "progress": progress}
        return explain(repository, self._revision, self.endpoint, error, **known)


def _again(call: Callable[[], Any]) -> Any:
    """What a call gives, once more where a connection that was kept open had been closed meanwhile."""
    try:
        return call()
    except Exception as error:  # of whatever library the client uses
        if not is_transient(error):
            raise
        return call()


def _part(name: str) -> Any:
    """One of the client's modules."""
    return importlib.import_module(f"huggingface_hub.{name}")


def _file(sibling: Any) -> HubFile:
    large = getattr(sibling, "lfs", None)
    blob = getattr(large, "sha256", None) or getattr(sibling, "blob_id", None) or ""
    return HubFile(str(sibling.rfilename), int(sibling.size or 0), str(blob))
