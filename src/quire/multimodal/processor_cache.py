"""What frontends have processed, kept by content for the next time: least recently used first out, bounded in bytes. An item that
several requests have at once is processed once.

One frontend keeps it in its own memory; several of one server have files in common.
"""

import concurrent.futures
import contextlib
import dataclasses
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from quire.config import EngineConfig, MultiModalConfig
from quire.config.multimodal import GIB
from quire.kept_files import KeptFiles, Piece, own_folder, roomiest
from quire.logger import init_logger
from quire.media import MediaTensor

logger = init_logger(__name__)

_FOLDER = "quire-media-"
_SIZE = 8


class Processed(msgspec.Struct, array_like=True, frozen=True):
    """One item, processed: the tokens around it and its own, its grid, and what the encoder reads; see `Expansion`. `modality` is
    whose encoder reads it. Behind it may be `others`, which are given with it: the frames of a video."""

    before: list[int]
    token_ids: list[int]
    after: list[int]
    num_embeds: int
    grid: list[int]
    tensors: dict[str, MediaTensor]
    modality: str
    interval: float = 1.0
    others: "tuple[Processed, ...]" = ()

    def beside_images(self) -> "Processed":
        """A sound in a prompt that has images, too, of an encoder that makes other embeddings of such sounds."""
        return msgspec.structs.replace(self, tensors=self.tensors | {"beside": MediaTensor.from_array(np.ones(1))})

    @property
    def num_bytes(self) -> int:
        """Memory of its tensors."""
        own = sum(len(tensor.data) for tensor in self.tensors.values())
        return own + sum(other.num_bytes for other in self.others)

    def with_data(self, data_of: Callable[[MediaTensor], bytes]) -> "Processed":
        """The same with other bytes in its tensors, which are asked for in a fixed order."""
        tensors = {
            name: MediaTensor(tensor.dtype, tensor.shape, data_of(tensor)) for name, tensor in self.tensors.items()
        }
        others = tuple(other.with_data(data_of) for other in self.others)
        return msgspec.structs.replace(self, tensors=tensors, others=others)


class ProcessorCache:
    """Processed items by key, in this process's memory. May be used by several threads.

    Args:
        max_bytes: of all arrays together; 0 keeps nothing.

    Attributes:
        num_queries, num_hits: items that were asked for, and those that were not processed for that.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Processed] = OrderedDict()
        self._making: dict[str, concurrent.futures.Future[Processed]] = {}
        self._lock = threading.Lock()
        self.num_bytes = self.num_queries = self.num_hits = 0

    def get_or_make(self, key: str, make: Callable[[], Processed]) -> Processed:
        """What is kept, or is being made in another thread, or what this function makes, which is kept from now on."""
        mine: concurrent.futures.Future[Processed] = concurrent.futures.Future()
        with self._lock:
            self.num_queries += 1
            other = self._making.setdefault(key, mine)
        if other is not mine:
            return self._wait(other, make)
        try:
            found = self.get(key)
            made = make() if found is None else found
            mine.set_result(made)
            if found is None:
                self.put(key, made)
            else:
                self._hit()
            return made
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._making[key]

    def _wait(self, other: "concurrent.futures.Future[Processed]", make: Callable[[], Processed]) -> Processed:
        with contextlib.suppress(Exception):  # whose words are of another request
            found = other.result()
            self._hit()
            return found
        return make()

    def _hit(self) -> None:
        with self._lock:
            self.num_hits += 1

    def get(self, key: str) -> Processed | None:
        """What was put there, if it is there still."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: str, value: Processed) -> None:
        """Keep it, and drop what was not used for the longest time if there is no room."""
        size = value.num_bytes
        with self._lock:
            if size > self._max_bytes or key in self._kept:
                return
            self._kept[key] = value
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self.num_bytes -= dropped.num_bytes

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self.num_bytes = 0


class SharedCache(ProcessorCache):
    """Items in files that several frontends share. A file has the item without its arrays' bytes, then these as they are; nothing
    is pickled. What cannot be read or written is processed.

    Args:
        largest: bytes of the largest item that is kept.
    """

    def __init__(self, files: KeptFiles, largest: int) -> None:
        super().__init__(0)
        self._files, self._largest = files, largest
        self._decode = msgspec.msgpack.Decoder(Processed).decode

    def get(self, key: str) -> Processed | None:
        with _doing_without("read"), contextlib.suppress(FileNotFoundError):
            return self._read(self._files.read(key.encode()))
        return None

    def put(self, key: str, value: Processed) -> None:
        if value.num_bytes > self._largest:
            return
        data: list[Piece] = []

        def take(tensor: MediaTensor) -> bytes:
            data.append(tensor.data)
            return b""

        about = msgspec.msgpack.encode(value.with_data(take))
        with _doing_without("written"):
            self._files.write(key.encode(), [len(about).to_bytes(_SIZE, "little"), about, *data])

    def clear(self) -> None:
        with _doing_without("removed"):
            self._files.clear()

    def _read(self, content: memoryview) -> Processed:
        at = _SIZE + int.from_bytes(content[:_SIZE], "little")
        about = self._decode(content[_SIZE:at])

        def give(tensor: MediaTensor) -> bytes:
            nonlocal at
            first, at = at, at + math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize
            return cast("bytes", content[first:at])  # as good where it is read or sent, and not copied

        return about.with_data(give)


@contextlib.contextmanager
def _doing_without(what: str) -> Generator[None]:
    """Files that fail are a warning."""
    try:
        yield
    except (OSError, ValueError) as error:  # msgspec's are ValueErrors
        logger.warning_once("Processed media that frontends share cannot be %s: %s", what, error)


def cache_of(settings: MultiModalConfig) -> ProcessorCache:
    """The cache of a frontend with these settings."""
    most = int(settings.mm_processor_cache_gb * GIB)
    if settings.shared_cache is None:
        return ProcessorCache(most)
    files = KeptFiles(Path(settings.shared_cache), most, lasting=False)
    return SharedCache(files, settings.mm_shm_cache_max_object_size_mb << 20)


@contextlib.contextmanager
def sharing(config: EngineConfig, num_frontends: int) -> Generator[EngineConfig]:
    """Settings with which so many frontends have one cache, in a folder that is there meanwhile. Where none can be made each has
    its part in its own memory."""
    media = config.multimodal
    if media is None or not media.mm_processor_cache_gb:
        yield config
        return
    most = int(media.mm_processor_cache_gb * GIB)
    with contextlib.ExitStack() as stack:
        parent, room = roomiest(most)
        if room < most:
            logger.warning(
                "--mm-processor-cache-gb %g: processed media that frontends share have %.2f GiB in %s, where no more than "
                "half of what is free is taken.",
                media.mm_processor_cache_gb,
                room / GIB,
                parent,
            )
        try:
            folder = str(stack.enter_context(own_folder(parent, _FOLDER)))
        except OSError as error:
            logger.warning("Frontends do not share processed media: %s", error)
            folder, room = None, most // num_frontends
        media = dataclasses.replace(media, mm_processor_cache_gb=room / GIB, shared_cache=folder)
        yield dataclasses.replace(config, multimodal=media)
