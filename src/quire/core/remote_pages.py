"""Pages that another engine computes for a request: disaggregated prefill, as far as plans are concerned.

A request with `do_remote_decode` is computed here for another engine: its pages are kept for that one, and its answer tells where
(`kv_transfer_params`, with vLLM's names). A request that comes with what such an answer told has its pages there. They are
named after their tokens with the other engine's key, so that those of another prompt are never found. Knows names, addresses.
"""

import ipaddress
from collections.abc import Sequence, Set

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig
from quire.config.kv_transfer import SETTING
from quire.core.kv_connector import NamedPages, Progress, Transfers, params_of
from quire.core.output import SchedulerOutput
from quire.core.prefix_hash import PrefixHasher
from quire.core.request_state import Request
from quire.errors import refusing
from quire.logger import init_logger
from quire.request import EngineRequest

logger = init_logger(__name__)

_KEY_BYTES = 32
_MOST_HASHERS = 64
_LOCAL = ("127.0.0.0/8", "::1/128")


class RemotePages(NamedPages):
    """Keys of `kv_connector_extra_config`: `peers`, addresses or networks of engines that pages may be fetched from; by default
    those of this host.

    Raises:
        ConfigError: a peer is no address.
    """

    def __init__(self, config: EngineConfig, kv_cache: KVCacheConfig) -> None:
        super().__init__(config, kv_cache)
        peers = self._transfer.kv_connector_extra_config.get("peers", _LOCAL)  # the workers' halves know all keys
        with refusing(TypeError, ValueError, setting=SETTING, what=f"{SETTING}.kv_connector_extra_config.peers"):
            self._peers = [ipaddress.ip_network(peer, strict=False) for peer in peers]
        self._hashers: dict[bytes, PrefixHasher] = {}

    def check(self, source: EngineRequest) -> None:
        params_of(source)

    def name_key(self) -> bytes:
        self._key = super().name_key()
        return self._key

    # For another engine.

    def update_state_after_alloc(self, request: Request, block_ids: list[list[int]], num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        if not self._saves(request):
            return
        whole = request.num_computed_tokens // self._size  # found in the device's cache: nobody will tell of them again
        self._save(request, block_ids[0], 0, whole)
        request.transfer_params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._key.hex(),
            "remote_request_id": request.request_id,
            "remote_host": self._transfer.kv_ip,
            "remote_port": self._transfer.kv_port + self.config.parallel.device_number,
            "remote_num_tokens": request.num_prompt_tokens // self._size * self._size,
            "tp_size": self.config.parallel.tensor_parallel_size,
        }

    def build_connector_meta(self, step: SchedulerOutput, progress: Sequence[Progress]) -> Transfers | None:
        for each in progress:
            if self._saves(each.request):
                last = min(len(each.pages), each.request.num_prompt_tokens // self._size)
                self._save(each.request, each.pages, each.first, last)
        return super().build_connector_meta(step, ())

    def _saves(self, request: Request) -> bool:
        return self._transfer.saves and bool(params_of(request.source).get("do_remote_decode"))

    def _save(self, request: Request, pages: list[int], first: int, last: int) -> None:
        if first < last:
            self._next.save_names += self._name(request, last)[first:last]
            self._next.save_pages += pages[first:last]

    # From another engine.

    def names_there(self, request: Request) -> Set[bytes]:
        if self._address_of(request) is None:
            return frozenset()
        given = params_of(request.source).get("remote_num_tokens")
        count = min(given if isinstance(given, int) else 0, len(request.token_ids) - 1) // self._size
        return set(self._name(request, count)[:count]) if count > 0 else frozenset()

    def fetch_names(self, request: Request) -> list[bytes]:
        return [(self._address_of(request) or "").encode(), *super().fetch_names(request)]

    def _address_of(self, request: Request) -> str | None:
        """Where the pages of a request are, if another engine has them that may be asked."""
        params = params_of(request.source)
        if not params.get("do_remote_prefill") or self._key_of(request) is None:
            return None
        host, port = params.get("remote_host"), params.get("remote_port")
        if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 1 << 16 or not self._is_peer(host):
            logger.warning_once("a request's pages at %r are not fetched: %s.peers has no such engine", host, SETTING)
            return None
        return f"{host} {port}"

    def _is_peer(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._peers)

    @staticmethod
    def _key_of(request: Request) -> bytes | None:
        """With which a request's pages are named where they are."""
        text = params_of(request.source).get("remote_engine_id")
        try:
            key = bytes.fromhex(text) if isinstance(text, str) else b""
        except ValueError:
            return None
        return key if len(key) == _KEY_BYTES else None

    def hasher_of(self, request: Request) -> PrefixHasher:
        key = self._key_of(request)
        if key is None:
            return self._hasher
        if key not in self._hashers:
            if len(self._hashers) >= _MOST_HASHERS:
                del self._hashers[next(iter(self._hashers))]
            self._hashers[key] = PrefixHasher(key, self._size, self._algorithm)
        return self._hashers[key]

    def reset_cache(self) -> None:
        super().reset_cache()
        self._hasher = PrefixHasher(self.name_key(), self._size, self._algorithm)
