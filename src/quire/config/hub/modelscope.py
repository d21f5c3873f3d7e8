"""ModelScope (https://modelscope.cn), through its own client, an optional package: QUIRE_USE_MODELSCOPE=1.

The client keeps one copy of a repository, whatever its revision.
"""

import contextlib
import importlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from quire.config.hub.failures import Failure
from quire.config.hub.listing import HubFile, HubSettings, Listing
from quire.errors import ConfigError
from quire.extras import pip_install

DEFAULT_REVISION = "master"


class ModelScopeHub:
    """One user's view of ModelScope. Raises ConfigError if the client is not installed."""

    name = "ModelScope"
    is_offline = False
    shows_progress = False
    """The client has bars of its own."""

    def __init__(self, settings: HubSettings) -> None:
        try:
            self._client: Any = importlib.import_module("modelscope")
        except ImportError:
            raise ConfigError(
                f"QUIRE_USE_MODELSCOPE is on, and ModelScope's client is not installed: {pip_install('modelscope')}, or unset it",
                setting="model",
            ) from None
        self._revision = settings.revision or DEFAULT_REVISION
        self._cache_dir = settings.cache
        self.cache = Path(self._cache_dir or os.path.expanduser("~"))
        self._token = settings.token if isinstance(settings.token, str) else None

    def list_files(self, repository: str) -> Listing:
        """What the hub has at the revision. Raises whatever the client does."""
        api: Any = importlib.import_module("modelscope.hub.api").HubApi(token=self._token)
        found = api.get_model_files(repository, revision=self._revision, recursive=True)
        files = [
            HubFile(str(entry["Path"]), int(entry.get("Size") or 0)) for entry in found if entry.get("Type") != "tree"
        ]
        small = sorted(files, key=lambda file: (file.name != "config.json", file.size))[:1]
        folder = self._snapshot(repository, [file.name for file in small] or ["config.json"])
        return Listing(repository, self._revision, folder, tuple(files))

    def find_cached(self, repository: str) -> Listing | None:
        """What the cache has; None where it has nothing."""
        try:
            folder = self._snapshot(repository, [], local_files_only=True)
        except Exception:  # the client has no class of errors for this
            return None
        names = [path.relative_to(folder).as_posix() for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return Listing(repository, self._revision, folder, tuple(map(HubFile, names)), is_local=True) if names else None

    def _snapshot(self, repository: str, names: list[str], *, local_files_only: bool = False) -> str:
        """The folder, after files were fetched. The client alone knows where that is."""
        return str(
            self._client.snapshot_download(
                repository,
                revision=self._revision,
                cache_dir=self._cache_dir,
                local_files_only=local_files_only,
                allow_patterns=names or None,
                **({"token": self._token} if self._token else {}),
            )
        )

    def keep_revision(self, listing: Listing) -> None:
        """The client keeps no names of revisions."""

    def fetch(self, listing: Listing, file: HubFile) -> None:
        """Bring one file to the cache."""
        self._snapshot(listing.repository, [file.name])

    def fetched_bytes(self, listing: Listing, file: HubFile) -> int:
        """How much of a file is here; unfinished ones are the client's own."""
        return file.size if os.path.exists(listing.path(file.name)) else 0

    def stored_types(self, listing: Listing, name: str) -> list[str]:
        """Headers are not read from afar here."""
        return []

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        """The client's bars stay."""
        yield

    def explain(self, repository: str, error: Exception, progress: str = "") -> Failure:
        """Why a call failed, and what to do; `progress`: how much had come."""
        first = (str(error).splitlines() or [""])[0]
        return Failure(
            f"that failed{progress and f' at {progress}'} with {type(error).__name__}: {first}",
            "check the spelling and the network, or give a local folder",
        )
