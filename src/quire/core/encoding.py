"""Media in the scheduler: which items a step's tokens need, when encoders compute them, and how long workers keep them.

An item is computed whole, before the step that has its first token; a step computes at most a budget of embeddings. Where
encoders work beside steps, a request whose step others would wait for is held back until its items are computed. A request
holds an item from then on until its tokens are collected. What nobody holds stays for its next use until room is needed, least
recently used first out, so that one image costs once. Knows keys and counts; knows nothing of images or tensors.
"""

from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from quire.config import MultiModalConfig
from quire.core.output import IntArray, SchedulerOutput
from quire.core.request_state import Request, RequestStatus
from quire.core.running import RunningBatch
from quire.errors import RequestError
from quire.media import EMBEDS, MADE_BEFORE, MediaItem
from quire.request import EngineRequest

MOST_WITHIN = 2048
"""Embeddings that are computed within a step for which others wait: beside it they come later, and slow it all the same."""


class Encoding:
    """A scheduler's media.

    Args:
        config: a step's budget, and the room that workers have; None: the model reads no media.
        widths: columns that embeddings in a prompt must have, by their modality.
        pages: how many workers have for what stands beside prompts, and how long each is; else embeddings are kept one by one.
        most_whole: tokens of an item that is computed whole.

    Attributes:
        goes_ahead: encoders work beside steps.
    """

    def __init__(
        self,
        config: MultiModalConfig | None = None,
        widths: Mapping[str, int] | None = None,
        pages: tuple[int, int] | None = None,
        most_whole: int = 1 << 30,
        goes_ahead: bool = False,
    ) -> None:
        self._widths, self._most_whole = widths or {}, most_whole
        self.goes_ahead = goes_ahead and pages is None
        self._budget, self._room = (config.encoder_budget, config.encoder_cache_size) if config is not None else (0, 0)
        self._page = 1
        if pages is not None:
            count, self._page = pages
            self._room = count * self._page
        self._left, self._used = self._budget, 0
        self._kept: OrderedDict[str, int] = OrderedDict()  # embeddings by key, the one that was used last at the end
        self._holders: dict[str, set[str]] = {}
        self._early: dict[
            str, tuple[Request, set[str]]
        ] = {}  # those that hold items before they start, and what they wait for
        self._encodes: list[MediaItem] = []
        self._dropped: list[str] = []
        self.num_queries = self.num_hits = 0

    def check(self, source: EngineRequest) -> None:
        """Raises RequestError: a request has media that can never be computed."""
        if source.media and not self._budget:
            raise RequestError("the model reads no media here", param="multi_modal_data")
        for item in source.media:
            if EMBEDS not in item.tensors or item.tensors[EMBEDS].shape[1] == self._widths.get(item.modality):
                continue
            name, wanted = (
                (item.modality, "an item's embedding has")
                if item.modality in MADE_BEFORE.values()
                else ("prompt_embeds", "the model's hidden size is")
            )
            columns = f"{item.tensors[EMBEDS].shape[1]} columns; {wanted} {self._widths.get(item.modality, 0)}"
            raise RequestError(f"{name} has {columns}", param=name)
        longest = max((item.length for item in source.media if item.sees), default=0)
        if longest > self._most_whole:
            raise RequestError(
                f"an image, or the whole prompt, has {longest} tokens, which are computed in one step: at most "
                f"{self._most_whole} are (max_num_batched_tokens less max_num_seqs)",
                param="multi_modal_data",
            )
        most = min(self._budget, self._room)
        largest = max((item.num_embeds for item in source.media), default=0)
        if largest > most:
            message = f"an item of the prompt has {largest} embeddings, and at most {most} can be computed at once"
            raise RequestError(message, param="multi_modal_data")

    def share(self, batch: RunningBatch, rows: IntArray, counts: IntArray, budget: int, most: int = 0) -> IntArray:
        """Of what rows with prompts could compute, what they compute in a step that has room for so many tokens: in order, and
        as far as they can have their embeddings, which are then to be computed. What is computed whole may take `most`."""
        requests = [batch.request(row) for row in rows.tolist()] if self._budget else []
        if not any(request.source.media for request in requests):
            before = np.cumsum(counts) - counts
            return np.clip(budget - before, 0, counts).astype(np.int32)
        shares: list[int] = []
        for request, start, count in zip(requests, batch.computed[rows].tolist(), counts.tolist(), strict=True):
            share = self.fit(request, start, max(0, min(count, budget)), most)
            self.take(request, start, share)
            shares.append(share)
            budget -= share
            most -= share
        return np.array(shares, dtype=np.int32)

    def fit(self, request: Request, start: int, count: int, most: int = 0) -> int:
        """How many of a waiting request's next tokens, of which it wants so many, can be computed in this step: as far as they
        can have their embeddings, and with the end of what is computed whole, up to `most`."""
        if not request.source.media:
            return count
        return self._fit(request, start, _without_cut(request, start, count, most), comes_first=True)

    def _fit(self, request: Request, start: int, count: int, *, comes_first: bool) -> int:
        """As far as there are room and budget; who holds items in the queue makes room for a request that `comes_first`."""
        left, new = self._left, dict[str, int]()
        for item in _needed(request, start, count):
            if item.key in new or self._holders.get(item.key):
                continue
            is_kept, size = item.key in self._kept, self._size(item) + sum(new.values())
            has_room = size <= self._free() or (comes_first and self._forget_early(request) and size <= self._free())
            if (not is_kept and item.num_embeds > left) or not has_room:
                return max(0, item.offset - start)
            new[item.key] = self._size(item)
            left -= 0 if is_kept else item.num_embeds
        return count

    def _free(self) -> int:
        """Room that nobody holds."""
        return self._room - sum(self._kept[key] for key, holders in self._holders.items() if holders)

    def _forget_early(self, request: Request) -> bool:
        """Those that have their items, and which this request comes before, hold nothing any more; whether any did."""
        others = [
            other
            for other, coming in self._early.values()
            if other is not request and (not coming or other.status is RequestStatus.WAITING)
        ]
        for other in others:
            self.leave(other)
        return bool(others)

    def go_ahead(self, request: Request, start: int, count: int, *, others_wait: bool) -> list[MediaItem] | None:
        """Items that are to be computed beside the steps before a request starts with these tokens, for which others would wait;
        it holds them from now on. None: it may start."""
        if not self.goes_ahead or not request.source.media:
            return None
        first = [item for item in _needed(request, start, count) if EMBEDS not in item.tensors]
        missing = [item for item in first if item.key not in self._kept]
        is_much = self._budget - self._left + sum(item.num_embeds for item in missing) > MOST_WITHIN
        coming = set[str]().union(*(keys for _, keys in self._early.values()))
        is_coming = request.request_id not in self._early and any(item.key in coming for item in first)
        if not (is_coming or (missing and ((others_wait and is_much) or coming))):
            self._early.get(request.request_id, (request, set[str]()))[1].clear()
            return None
        kept, told = set(self._kept), set(self._dropped)
        self.take(request, start, self._fit(request, start, len(request.token_ids) - start, comes_first=False))
        new = self._kept.keys() - kept
        self._dropped = [key for key in self._dropped if key not in new or key not in told]  # workers have these still
        items = [item for item in self._encodes if item.key in new - told]
        self._encodes = [item for item in self._encodes if item.key not in new]
        self._early[request.request_id] = request, {item.key for item in items}
        return items

    def take(self, request: Request, start: int, count: int) -> None:
        """These tokens of a request will be computed in the step: so are the embeddings that they need."""
        if count == 0 or not request.source.media:
            return
        missing: list[MediaItem] = []
        self._early.pop(request.request_id, None)
        for item in _needed(request, start, count):  # all are held before room is made for any of them
            holders = self._holders.setdefault(item.key, set())
            if request.request_id in holders:
                continue
            self.num_queries += 1
            holders.add(request.request_id)
            if item.key in self._kept:
                self.num_hits += 1
                self._kept.move_to_end(item.key)
            else:
                missing.append(item)
        for item in missing:
            self._make_room(self._size(item))
            self._kept[item.key] = self._size(item)
            self._used += self._size(item)
            self._left -= item.num_embeds
            self._encodes.append(item)

    def _size(self, item: MediaItem) -> int:
        """The room that it takes."""
        return -(-item.num_embeds // self._page) * self._page

    def _make_room(self, count: int) -> None:
        """Drop what nobody holds until so many embeddings fit."""
        for key in [key for key in self._kept if not self._holders.get(key)]:
            if self._used + count <= self._room:
                return
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._used -= self._kept.pop(key)
        self._holders.pop(key, None)
        if any(item.key == key for item in self._encodes):  # nobody has been told of it
            self._encodes = [item for item in self._encodes if item.key != key]
        else:
            self._dropped.append(key)

    def launch(self, step: SchedulerOutput) -> None:
        """Tell the workers, and begin another step."""
        step.encodes, self._encodes = self._encodes, []
        step.dropped_media, self._dropped = self._dropped, []
        self._left = self._budget

    def computed(self, request: Request, num_tokens: int) -> None:
        """So many tokens of a request are collected: what it held for them it holds no more."""
        for item in request.source.media:
            if item.end <= num_tokens and not item.is_beside:
                self._let_go(request, item.key)

    def leave(self, request: Request) -> None:
        """A request has no row any more."""
        self._early.pop(request.request_id, None)
        for item in request.source.media:
            self._let_go(request, item.key)

    def _let_go(self, request: Request, key: str) -> None:
        self._holders.get(key, set()).discard(request.request_id)

    def reset(self) -> None:
        """All embeddings are of no use: weights have changed. No request that runs holds any."""
        for request, _ in list(self._early.values()):
            self.leave(request)
        self._make_room(self._room + 1)


def _without_cut(request: Request, start: int, count: int, most: int) -> int:
    """So many tokens, or fewer or more, so that no item which is computed whole is cut."""
    end = start + count
    for item in request.source.media if count else ():
        if item.sees and item.offset < end < item.end:
            whole = item.end - start
            return whole if item.offset <= start and whole <= most else max(0, item.offset - start)
    return count


def _needed(request: Request, start: int, count: int) -> list[MediaItem]:
    """The items whose embeddings a request's next tokens need."""
    return [
        item
        for item in request.source.media
        if item.num_embeds and ((item.offset < start + count and item.end > start) or item.is_beside)
    ]
