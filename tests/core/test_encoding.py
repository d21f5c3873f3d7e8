"""Media in the scheduler: items are encoded whole before the step that needs them, within a budget, and once for all."""

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.config import CacheConfig, MultiModalConfig, SchedulerConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec, KVKind
from quire.core import encoding
from quire.core.encoding import Encoding
from quire.core.output import ModelRunnerOutput
from quire.core.preparations import Preparations
from quire.core.scheduler import Scheduler
from quire.errors import RequestError
from quire.media import BESIDE, MediaItem
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def every_item_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MOST_WITHIN", 0)


def make_scheduler(
    budget: int,
    room: int,
    tokens: int = 16,
    blocks: int = 200,
    depth: int = 1,
    threshold: int = 0,
    goes_ahead: bool = False,
) -> Scheduler:
    kv_config = KVCacheConfig(blocks, (KVCacheGroup(KVCacheSpec(KVKind.FULL, 4, 8), (0,)),))
    config = SchedulerConfig(
        max_num_batched_tokens=tokens,
        max_num_seqs=4,
        max_model_len=256,
        async_scheduling=depth > 1,
        long_prefill_token_threshold=threshold,
    )
    scheduler = Scheduler(config, CacheConfig(), kv_config)
    media = MultiModalConfig(encoder_budget=budget, encoder_cache_size=room)
    scheduler.encoding = Encoding(media, most_whole=tokens - config.max_num_seqs, goes_ahead=goes_ahead)
    return scheduler


def make_request(name: str, *items: tuple[str, int, int], length: int, sees: str = "") -> EngineRequest:
    media = [MediaItem(key, "image", offset, count, 9, count, sees=sees) for key, offset, count in items]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    return EngineRequest(name, [1] * length, params, media=media)


class Worker:
    """Keeps what it was told to keep, and fails a step whose tokens lack embeddings."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}
        self.num_encoded: dict[str, int] = {}
        self.rows: dict[int, list[MediaItem]] = {}
        self.computed: dict[int, int] = {}
        self.most = self.most_pages = 0

    def run(self, step) -> ModelRunnerOutput:
        for row in step.finished_rows:
            self.rows.pop(row, None)
        for key in step.dropped_media:
            del self.kept[key]
        for item in step.encodes:
            assert item.key not in self.kept
            self.kept[item.key] = item.num_embeds
            self.num_encoded[item.key] = self.num_encoded.get(item.key, 0) + 1
        self.most = max(self.most, sum(self.kept.values()))
        self.most_pages = max(self.most_pages, sum(-(-count // 4) for count in self.kept.values()))
        for request in step.new_requests:
            self.rows[request.row], self.computed[request.row] = request.media, request.num_computed_tokens
            assert all(not item.tensors for item in request.media)
        for row, count in zip(step.rows.tolist(), step.num_scheduled_tokens.tolist(), strict=True):
            start = self.computed[row]
            for item in self.rows[row]:
                if item.is_beside or (item.offset < start + count and item.end > start):
                    assert item.key in self.kept, "a token lacks its embedding"
                    assert not item.sees or item.end <= start + count, "an item is cut whose tokens see one another"
            self.computed[row] += count
        rows = step.rows[step.needs_sample]
        return ModelRunnerOutput(step.step_id, rows, np.full(len(rows), 5, np.int32))


class BesideWorker(Worker):
    """Computes items beside its steps, too: what an executor is to a scheduler, which is slow by chance."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.random, self.begun, self.ahead = Random(seed), list[str](), list[str]()

    def is_prepared(self, request: EngineRequest) -> bool:
        return True

    def encode_media(self, request: EngineRequest, items: list[MediaItem]) -> None:
        assert request.request_id not in self.begun
        self.begun.append(request.request_id)
        for item in items:
            assert item.key not in self.kept
            self.kept[item.key] = item.num_embeds
            self.num_encoded[item.key] = self.num_encoded.get(item.key, 0) + 1
            self.ahead.append(item.key)

    def prepared(self, wait_s: float) -> list[str]:
        """The oldest ones, as a queue has it."""
        done, self.begun = self.begun[: (count := self.random.randrange(3))], self.begun[count:]
        return done

    def problems(self) -> dict[str, str]:
        return {}


def run(
    scheduler: Scheduler, requests: list[EngineRequest], depth: int = 1, worker: Worker | None = None
) -> tuple[Worker, list[int]]:
    for request in requests:
        scheduler.add_request(request)
    worker, encoded, flying = worker or Worker(), list[int](), []
    for _ in range(2000):
        while len(flying) < depth and scheduler.has_unfinished():
            step = scheduler.schedule()
            if not step.total_num_tokens:
                if not flying and len(scheduler.waiting.preparations):
                    continue  # an encoder computes, and nobody else can
                break
            flying.append((step, worker.run(step)))
            encoded.append(sum(item.num_embeds for item in step.encodes))
        if not flying:
            break
        scheduler.update(*flying.pop(0))
    assert not scheduler.has_unfinished(), "some request never ended"
    return worker, encoded


def test_an_item_that_many_requests_share_is_encoded_once():
    requests = [make_request(str(number), ("a", 2 + number, 6), length=20 + number) for number in range(4)]
    worker, encoded = run(make_scheduler(8, 8), requests)
    assert worker.num_encoded == {"a": 1} and sum(encoded) == 6


def test_a_step_encodes_no_more_than_its_budget_and_the_room_is_kept():
    items = [(name, 1 + 7 * number, 6) for number, name in enumerate("abcdef")]
    worker, encoded = run(make_scheduler(8, 14, tokens=64), [make_request("r", *items, length=50)])
    assert max(encoded) <= 8 and worker.most <= 14 and sum(encoded) == 36


def test_an_item_that_can_never_be_encoded_is_refused_on_arrival():
    scheduler = make_scheduler(8, 8)
    with pytest.raises(RequestError, match="9 embeddings, and at most 8"):
        scheduler.add_request(make_request("r", ("a", 1, 9), length=20))
    plain = Scheduler(
        SchedulerConfig(max_model_len=100),
        CacheConfig(),
        KVCacheConfig(40, (KVCacheGroup(KVCacheSpec(KVKind.FULL, 4, 8), (0,)),)),
    )
    with pytest.raises(RequestError, match="reads no media"):
        plain.add_request(make_request("r", ("a", 1, 9), length=20))


def test_an_item_whose_tokens_see_one_another_may_pass_a_threshold_and_never_the_step():
    scheduler = make_scheduler(64, 64, tokens=24, threshold=4)
    _, encoded = run(scheduler, [make_request("r", ("a", 3, 20), length=40, sees="runs")])
    assert sum(encoded) == 20
    with pytest.raises(RequestError, match="21 tokens, which are computed in one step: at most 20"):
        scheduler.add_request(make_request("s", ("b", 3, 21), length=40, sees="runs"))


def test_equal_tokens_with_other_images_share_no_pages_behind_the_image():
    scheduler = make_scheduler(64, 64, tokens=64)
    for name, key in (("one", "a"), ("two", "b"), ("three", "a")):
        run(scheduler, [make_request(name, (key, 5, 8), length=30)])
    # "two" finds the page before the image; "three" finds all of the first one's full pages.
    assert scheduler.kv.num_hits == 4 + 28


# Two items of which one was dropped for the other; and a row that took a step's tokens and could not use them.
@example([[("a", 0), ("b", 0), ("c", 0), ("a", 0)]], 1, 1, 5, 1, 14, "", None)
@example([[], [("a", 0), ("c", 0)], [("b", 1), ("d", 2), ("a", 0), ("e", 0)]], 3, 0, 5, 1, 200, "", None)
@settings(max_examples=400)
@given(
    st.lists(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 5)), max_size=4), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(0, 12),
    st.sampled_from([5, 16, 64]),
    st.sampled_from([1, 2]),
    st.sampled_from([14, 200]),
    st.sampled_from(["", "runs"]),
    st.none() | st.integers(0, 99),
)
def test_every_request_ends_and_no_token_lacks_its_embedding(drawn, most, more, tokens, depth, blocks, sees, beside):
    most = min(most, tokens - 4) if sees else most
    sizes = {name: min(most, number + 1) for number, name in enumerate("abcde")}
    requests = []
    for number, prompt in enumerate(drawn):
        items, at = list[tuple[str, int, int]](), 0
        for key, gap in prompt:
            items.append((key, at + gap, sizes[key]))
            at += gap + sizes[key]
        requests.append(make_request(str(number), *items, length=at + 2, sees=sees))
    scheduler = make_scheduler(most, most + more, tokens, blocks, depth, goes_ahead=beside is not None)
    worker: Any = Worker() if beside is None else BesideWorker(beside)
    scheduler.waiting.preparations = Preparations(None if beside is None else worker)
    worker, encoded = run(scheduler, requests, depth, worker)
    assert worker.most <= most + more and max(encoded, default=0) <= most


def test_what_stands_beside_a_prompt_is_kept_as_long_as_its_request_runs() -> None:
    scheduler = make_scheduler(budget=8, room=100)
    scheduler.encoding = Encoding(MultiModalConfig(encoder_budget=8), pages=(4, 4))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    halves = [("long", 7), ("short", 1), ("other", 5), ("long", 7)]
    worker, encoded = run(
        scheduler,
        [
            EngineRequest(str(number), [1] * 20, params, media=[MediaItem(key, "text", 0, 1, BESIDE, rows)])
            for number, (key, rows) in enumerate(halves)
        ],
    )
    assert max(encoded) <= 8 and worker.num_encoded["long"] <= 2
    assert worker.most_pages <= 4 and worker.num_encoded["short"] == worker.num_encoded["other"] == 1


def test_what_can_never_be_read_beside_a_prompt_is_refused() -> None:
    encoding = Encoding(MultiModalConfig(encoder_budget=100), pages=(2, 4))
    item = MediaItem("sound", "audio", 0, 1, BESIDE, 9)
    with pytest.raises(RequestError, match="at most 8"):
        encoding.check(EngineRequest("0", [1], SamplingParams(), media=[item]))


def decoding(scheduler: Scheduler, worker: Any) -> None:
    """Have a request of text run that only decodes."""
    scheduler.waiting.preparations = Preparations(worker)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    scheduler.add_request(EngineRequest("text", [1] * 5, params))
    advance(scheduler, worker)


def advance(scheduler: Scheduler, worker: Worker) -> list[int]:
    """Compute one step; the tokens of its rows."""
    step = scheduler.schedule()
    scheduler.update(step, worker.run(step))
    return step.num_scheduled_tokens.tolist()


def test_who_decodes_does_not_wait_for_an_encoder() -> None:
    scheduler, worker = make_scheduler(16, 16, tokens=64, goes_ahead=True), BesideWorker()
    decoding(scheduler, worker)
    scheduler.add_request(make_request("image", ("a", 3, 8), length=20))
    assert advance(scheduler, worker) == [1] and worker.begun == ["image"] and worker.ahead == ["a"]
    scheduler.add_request(make_request("same", ("a", 4, 8), length=21))
    scheduler.add_request(make_request("other", ("b", 0, 8), length=9))
    scheduler.add_request(make_request("full", ("c", 0, 1), length=9))  # has no room before another one has computed
    worker.prepared = lambda wait_s: []
    assert advance(scheduler, worker) == [1] and worker.begun == ["image", "same", "other"]
    worker.prepared = lambda wait_s: [worker.begun.pop(0)]
    assert advance(scheduler, worker) == [1, 20] and worker.ahead == ["a", "b"]
    scheduler.abort(["other", "text"])
    scheduler.add_request(make_request("last", ("d", 2, 8), length=30))
    run(scheduler, [], worker=worker)
    assert worker.num_encoded == dict.fromkeys("abcd", 1) and worker.ahead[:2] == ["a", "b"]


def test_where_nobody_decodes_a_step_encodes_what_it_needs() -> None:
    scheduler, worker = make_scheduler(16, 16, tokens=64, goes_ahead=True), BesideWorker()
    preparer: Any = worker
    scheduler.waiting.preparations = Preparations(preparer)
    scheduler.add_request(make_request("image", ("a", 3, 8), length=20))
    assert advance(scheduler, worker) == [20] and not worker.begun


def test_a_request_that_ends_while_its_image_is_encoded_gives_the_room_back() -> None:
    scheduler, worker = make_scheduler(16, 16, tokens=64, goes_ahead=True), BesideWorker()
    decoding(scheduler, worker)
    worker.prepared = lambda wait_s: []
    scheduler.add_request(make_request("image", ("a", 3, 16), length=20))
    advance(scheduler, worker)
    scheduler.abort(["image"])
    scheduler.add_request(make_request("next", ("b", 3, 16), length=20))
    advance(scheduler, worker)
    assert worker.ahead == ["a", "b"] and worker.begun == ["image", "next"]
    advance(scheduler, worker)
    assert list(worker.kept) == ["b"]


def test_new_weights_have_what_waits_encoded_again() -> None:
    scheduler, worker = make_scheduler(16, 16, tokens=64, goes_ahead=True), BesideWorker()
    decoding(scheduler, worker)
    worker.prepared = lambda wait_s: []
    scheduler.add_request(make_request("image", ("a", 3, 16), length=20))
    advance(scheduler, worker)
    scheduler.encoding.reset()
    advance(scheduler, worker)
    assert not worker.kept
    worker.prepared = lambda wait_s: [worker.begun.pop()] if worker.begun else []
    run(scheduler, [], worker=worker)
    assert worker.num_encoded == {"a": 2}


@pytest.mark.parametrize(("most", "ahead"), [(12, []), (11, ["b"]), (7, ["a", "b"])])
def test_little_is_encoded_within_a_step_that_others_wait_for(monkeypatch, most, ahead) -> None:
    monkeypatch.setattr(encoding, "MOST_WITHIN", most)
    scheduler, worker = make_scheduler(16, 16, tokens=64, goes_ahead=True), BesideWorker()
    decoding(scheduler, worker)
    for name, count in (("a", 8), ("b", 4)):
        scheduler.add_request(make_request(name, (name, 1, count), length=12))
    step = scheduler.schedule()
    scheduler.update(step, worker.run(step))
    assert worker.ahead == ahead and [item.key for item in step.encodes] == [name for name in "ab" if name not in ahead]
