"""What a repository at a hub holds, as plain data."""

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class HubFile:
    """One file. `size`: bytes; 0 where the hub did not say. `blob`: the name of its content in the client's cache, if known."""

    name: str
    size: int = 0
    blob: str = ""


@dataclasses.dataclass(frozen=True)
class Listing:
    """A repository at one commit.

    Attributes:
        folder: where its files are, or will be, on this machine.
        files: all that it holds; for a copy that was found in the cache (`is_local`), what is there.
    """

    repository: str
    commit: str
    folder: str
    files: tuple[HubFile, ...]
    is_local: bool = False

    @property
    def names(self) -> list[str]:
        return [file.name for file in self.files]

    def find(self, names: list[str]) -> tuple[HubFile, ...]:
        """The files of these names; one that the listing lacks has no size."""
        known = {file.name: file for file in self.files}
        return tuple(known.get(name, HubFile(name)) for name in names)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, *name.split("/"))

    def missing(self, files: tuple[HubFile, ...]) -> tuple[HubFile, ...]:
        """Those that are not on this machine yet."""
        return tuple(file for file in files if not os.path.exists(self.path(file.name)))


@dataclasses.dataclass(frozen=True)
class HubSettings:
    """How repositories are looked up and fetched.

    Attributes:
        revision: a branch, tag or commit; None means the hub's default branch.
        cache: the folder of downloads; None means the client's own.
        token: the user's; None or True means the one that the client finds (HF_TOKEN, a login).
        load_format, ignore_patterns: as the engine's settings; they decide which weights are needed.
        max_weight_bytes: the devices' memory; None where it is not known.
    """

    revision: str | None = None
    cache: str | None = None
    token: str | bool | None = None
    load_format: str = "auto"
    ignore_patterns: tuple[str, ...] = ()
    max_weight_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class HubModel:
    """A model of a hub whose description is on this machine; the weights may have to be fetched.

    Attributes:
        listing: without other files than the weights.
        refusal: why the weights cannot be used, empty if they can; raised when they are needed.
    """

    listing: Listing
    weights: tuple[HubFile, ...] = ()
    refusal: str = ""
    refused_setting: str = ""

    def missing(self) -> tuple[HubFile, ...]:
        """Weights that are not on this machine yet."""
        return self.listing.missing(self.weights)
