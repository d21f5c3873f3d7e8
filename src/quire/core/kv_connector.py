"""KV connectors, as far as plans are concerned: which pages of a request somebody else has, and which are to be given away.

The method names are vLLM's. Pages that are taken over are fetched beside the steps first, as grammars and adapters are; a step
only copies them. What cannot be fetched is computed. Knows requests, pages and names; knows nothing of tensors.
"""

import abc
import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig
from quire.config.kv_transfer import SETTING
from quire.core.kv_groups import FullRules, group_rules
from quire.core.output import ModelRunnerOutput, SchedulerOutput, read_extra
from quire.core.prefix_hash import PrefixHasher
from quire.core.request_state import Request
from quire.errors import ConfigError, RequestError, refusing
from quire.guards import is_dict
from quire.kept_files import names_in
from quire.request import EngineRequest

_FORMAT = 1
"""Of pages that outlive an engine; changed with it."""
PARAMS = "kv_transfer_params"
"""The key of a request's `extra_args`, and the name of what its answer has."""
EXTRA = "kv_connector"
"""What a connector's halves tell one another travels in the extras of plans and results, under this name."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Pages of a request that are whole once a step has been computed: `pages[first:]`, whose tokens are known."""

    request: Request
    pages: list[int]
    first: int


class Load(msgspec.Struct, array_like=True):
    """Pages that were fetched for a request go into these: of what was fetched, those behind the first `skip`."""

    request_id: str
    skip: int
    pages: list[int]


class Transfers(msgspec.Struct, array_like=True):
    """What workers do with pages around a step: loads before it, saves behind it. `released`: requests whose fetched pages nobody
    waits for."""

    loads: list[Load] = []
    save_names: list[bytes] = []
    save_pages: list[int] = []
    released: list[str] = []


class News(msgspec.Struct, array_like=True):
    """What workers tell with a step: pages that can be fetched from now on, and those that no longer can."""

    added: list[bytes] = []
    removed: list[bytes] = []


class KVConnectorScheduler(abc.ABC):
    """The half beside the scheduler; called in the core's thread, and must not block. One is made with each core."""

    def __init__(self, config: EngineConfig, kv_cache: KVCacheConfig) -> None:
        self.config, self.kv_cache = config, kv_cache

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens behind `num_computed_tokens` need not be computed (whole pages, and at least one token is left), and
        whether they are still to be fetched: the request then waits, and others overtake it. Asked whenever the request
        could start."""
        return 0, False

    def fetch_names(self, request: Request) -> list[bytes]:
        """What the workers' halves are to fetch for a request that waits for it."""
        return []

    def fetched(self, request: Request, problem: str | None) -> None:
        """They have, or could not: then the request is asked for no more."""

    def waited_enough(self, request: Request) -> None:
        """A request waits no more for what is still being fetched for it: computing it would have taken as long."""
        self.fetched(request, "it comes slower than it is computed")

    @abc.abstractmethod
    def update_state_after_alloc(self, request: Request, block_ids: list[list[int]], num_external_tokens: int) -> None:
        """A request starts, with these pages; so many of its tokens come from the connector (0: none)."""

    @abc.abstractmethod
    def build_connector_meta(self, step: SchedulerOutput, progress: Sequence[Progress]) -> Any:
        """What the workers' halves are told with a step, as plain data or a msgspec struct; None: nothing."""

    @abc.abstractmethod
    def request_finished(self, request: Request, block_ids: list[list[int]]) -> None:
        """A request has ended, or gives its pages back. They may be used again at once: a worker's half copies what it saves."""

    def update_connector_output(self, output: ModelRunnerOutput) -> None:
        """A step was collected; what workers' halves told is in its extras."""

    def check(self, source: EngineRequest) -> None:
        """Raises RequestError: it has `kv_transfer_params`, and this connector does nothing with them."""
        check_no_params(source)

    def reset_cache(self) -> None:
        """What was saved is not to be used again: the weights have changed, or somebody asks for it."""


def params_of(source: EngineRequest) -> dict[str, Any]:
    """A request's `kv_transfer_params`; empty where it has none."""
    sampling = source.sampling_params
    given: Any = (sampling.extra_args or {}).get(PARAMS) if sampling is not None else None
    if given is not None and not is_dict(given):
        raise RequestError(f"{PARAMS} must be an object", param=PARAMS)
    return given or {}


def check_no_params(source: EngineRequest) -> None:
    """Raises RequestError: a request has `kv_transfer_params`."""
    if params_of(source):
        known = "'tcp', 'nccl', 'nixl', 'mooncake' or 'hidden_states'"
        text = f"this engine does nothing with {PARAMS}: it needs {SETTING} with the connector {known}"
        raise RequestError(text, param=PARAMS)


class NamedPages(KVConnectorScheduler):
    """Pages by names that stand for the model, its settings and all tokens up to the page's last. Of layers that keep them all.

    Raises:
        ConfigError: the model has layers that give pages back, or that keep a state.
    """

    def __init__(self, config: EngineConfig, kv_cache: KVCacheConfig) -> None:
        super().__init__(config, kv_cache)
        assert config.kv_transfer is not None
        if not all(isinstance(group_rules(group), FullRules) for group in kv_cache.groups) or len(kv_cache.groups) > 1:
            raise ConfigError(
                f"{SETTING}: this model has layers with windows or states, whose pages cannot be had from elsewhere yet: leave "
                "it out",
                setting=SETTING,
            )
        self._transfer, self._size = config.kv_transfer, kv_cache.block_size
        self._algorithm = config.cache.prefix_caching_hash_algo
        self._hasher = PrefixHasher(self.name_key(), self._size, self._algorithm)
        self._there = set(self.scan())
        self._names: dict[str, list[bytes]] = {}
        self._wanted: dict[str, tuple[int, int]] = {}
        self._ready: dict[str, tuple[int, int]] = {}
        self._failed: set[str] = set()
        self._next = Transfers()

    def name_key(self) -> bytes:
        """The secret of the names. Pages that outlive the engine need one that does too."""
        return os.urandom(32)

    def scan(self) -> Iterator[bytes]:
        """The names that are there already."""
        return iter(())

    def names_there(self, request: Request) -> Set[bytes]:
        """Names among which a request's may be found."""
        return self._there

    def hasher_of(self, request: Request) -> PrefixHasher:
        """What names a request's pages."""
        return self._hasher

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        first, name = num_computed_tokens // self._size, request.request_id
        if not self._transfer.loads or name in self._failed or not request.reads_cache:
            return 0, False
        if name in self._ready:
            start, end = self._ready[name]
            if start <= first:
                return max(0, end - first) * self._size, False
            self._release(request)  # the device's cache has lost what came before
        limit, there = (len(request.token_ids) - 1) // self._size, self.names_there(request)
        end, names = first, self._name(request, limit) if there else []
        while end < limit and names and names[end] in there:
            end += 1
        self._wanted[name] = (first, end)
        return (end - first) * self._size, end > first

    def fetch_names(self, request: Request) -> list[bytes]:
        first, end = self._wanted[request.request_id]
        return self._names[request.request_id][first:end]

    def fetched(self, request: Request, problem: str | None) -> None:
        wanted = self._wanted.pop(request.request_id, (0, 0))
        if problem is None:
            self._ready[request.request_id] = wanted
        else:
            self._there.difference_update(self._names.get(request.request_id, [])[slice(*wanted)])
            self.waited_enough(request)

    def waited_enough(self, request: Request) -> None:
        self._wanted.pop(request.request_id, None)
        self._failed.add(request.request_id)
        self._next.released.append(request.request_id)  # ranks may have theirs, or will

    def update_state_after_alloc(self, request: Request, block_ids: list[list[int]], num_external_tokens: int) -> None:
        if num_external_tokens:
            start, end = self._ready.pop(request.request_id)
            first = end - num_external_tokens // self._size
            self._next.loads.append(Load(request.request_id, first - start, block_ids[0][first:end]))
        else:
            self._release(request)

    def build_connector_meta(self, step: SchedulerOutput, progress: Sequence[Progress]) -> Transfers | None:
        told, self._next = self._next, Transfers()
        for each in progress if self._transfer.saves else ():
            names = self._name(each.request, len(each.pages))
            told.save_names += names[each.first : len(each.pages)]
            told.save_pages += each.pages[each.first :]
        return told if told.loads or told.save_names or told.released else None

    def request_finished(self, request: Request, block_ids: list[list[int]]) -> None:
        self._release(request)
        self._names.pop(request.request_id, None)
        self._failed.discard(request.request_id)

    def update_connector_output(self, output: ModelRunnerOutput) -> None:
        news = read_extra(output.extras, EXTRA, News)
        if news is not None:
            self._there.update(news.added)
            self._there.difference_update(news.removed)

    def reset_cache(self) -> None:
        self._hasher = PrefixHasher(os.urandom(32), self._size, self._algorithm)
        self._there.clear()
        self._names.clear()
        self._wanted.clear()  # what is being fetched is taken for nothing when it comes
        self._next.released += self._ready
        self._ready.clear()

    def _release(self, request: Request) -> None:
        wanted = self._wanted.pop(request.request_id, None)
        ready = self._ready.pop(request.request_id, None)
        if wanted or ready:
            self._next.released.append(request.request_id)

    def _name(self, request: Request, count: int) -> list[bytes]:
        """The names of a request's first pages, at least so many of them."""
        names = self._names.setdefault(request.request_id, [])
        if len(names) < count:
            hasher = self.hasher_of(request)
            hasher.extend(names, hasher.root_of(request.source), request.token_ids, count, request.marks(self._size))
        return names


class PagesOnDisk(NamedPages):
    """Names of pages in files, which another engine with the same model and settings finds again."""

    def name_key(self) -> bytes:
        folder = folder_of(self.config, 0)
        return hashlib.blake2b(folder.parent.name.encode(), key=secret_of(folder.parent.parent)).digest()[:32]

    def scan(self) -> Iterator[bytes]:
        return names_in(folder_of(self.config, 0))


def identity(config: EngineConfig, *, across_hosts: bool = False) -> str:
    """A name for everything that pages depend on beside their tokens: the weights' files, number types, layout and ranks.
    `across_hosts`: without what differs between two copies of the same files."""
    model, parallel, transfer = config.model, config.parallel, config.kv_transfer
    folder = Path(model.path)
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    times = {file: 0 if across_hosts else file.stat().st_mtime_ns for file in files if file.is_file()}
    weights = [(file.name, file.stat().st_size, time) for file, time in times.items()]
    settings = (model.dtype, model.quantization, model.hf_config.to_dict(), model.seed, config.load.load_format)
    layout = (config.cache.cache_dtype, config.cache.block_size, config.attention.backend, config.device.device)
    ranks = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.layer_split)
    engine_id = "" if transfer is None or across_hosts else transfer.engine_id
    text = json.dumps([_FORMAT, weights, settings, layout, ranks, engine_id], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def folder_of(config: EngineConfig, world_rank: int) -> Path:
    """Where a worker's pages are; made if it is not there.

    Raises:
        ConfigError: there is no path, or it cannot be written.
    """
    assert config.kv_transfer is not None
    path = config.kv_transfer.extra("path", "max_bytes").get("path")
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{SETTING}.kv_connector_extra_config.path={path!r} must be a folder", setting=SETTING)
    folder = Path(path).expanduser() / identity(config) / f"rank{world_rank}"
    with refusing(OSError, setting=SETTING, what=f"{SETTING}: {folder} cannot be made"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def secret_of(folder: Path) -> bytes:
    """The secret of names in a folder, drawn when it is first asked for: nobody else's prompt can be made to have one's names."""
    file, mine = folder / "secret", folder / f"secret-{os.getpid()}"
    if not file.exists():
        with os.fdopen(os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as made:
            made.write(os.urandom(32))
        with contextlib.suppress(FileExistsError):  # another engine was faster
            os.link(mine, file)
        mine.unlink()
    return file.read_bytes()
