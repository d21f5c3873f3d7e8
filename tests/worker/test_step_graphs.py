"""Which steps are captured: sizes, order, and what happens where a capture fails."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.oracles.async_platform import AsyncCpuRuntime

from quire.platforms.interface import RecordedStep
from quire.worker.step_graphs import MAX_GRAPH_TOKENS, StepGraphs, StepShape


def make_graphs(runtime: AsyncCpuRuntime | None = None, *, rows: int = 100, tokens: int = 8192, enabled: bool = True):
    ran: list[StepShape] = []
    graphs = StepGraphs(runtime or AsyncCpuRuntime(), rows, tokens, ran.append, lambda: None, enabled)
    return graphs, ran


@pytest.mark.parametrize("requests", [1, 2, 3, 9, 33, 99, 100])
def test_decode_shapes_cover_the_requests_and_never_exceed_the_rows(requests: int) -> None:
    graphs, _ = make_graphs()
    shape = graphs.decode_shape(requests, True)
    assert requests <= shape.num_requests <= 100
    assert shape.num_requests <= max(2 * requests, 4)
    assert (shape.num_tokens, shape.num_logits, shape.max_query_len) == (shape.num_requests, shape.num_requests, 1)


@pytest.mark.parametrize("tokens", [2, 16, 17, 500, 2048, 2049, 8191, 8192])
def test_mixed_shapes_cover_tokens_and_requests(tokens: int) -> None:
    graphs, _ = make_graphs()
    shape = graphs.mixed_shape(tokens, min(tokens, 7), 3, tokens, True)
    assert tokens <= shape.num_tokens <= 8192
    assert min(tokens, 7) <= shape.num_requests <= 100
    assert shape.is_graph == (tokens <= MAX_GRAPH_TOKENS)
    assert shape.num_logits >= 3 and (shape.num_logits == shape.num_requests or not shape.is_graph)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("tokens", [8, 16, 64, 8192])
def test_what_is_rehearsed_fits_any_engine(rows: int, tokens: int, enabled: bool) -> None:
    graphs, _ = make_graphs(rows=rows, tokens=max(rows, tokens), enabled=enabled)
    for shape in graphs.shapes():
        assert (
            1 <= shape.num_requests <= rows and shape.num_logits <= rows and 1 <= shape.num_tokens <= max(rows, tokens)
        )


def test_eager_steps_that_sample_nothing_compute_no_logits() -> None:
    graphs, _ = make_graphs()
    shape = graphs.mixed_shape(5000, 2, 0, 3000, True)
    assert (shape.num_logits, shape.samples, shape.max_query_len) == (0, False, 3000)


def test_a_shape_runs_eagerly_once_then_is_captured_and_replayed() -> None:
    runtime = AsyncCpuRuntime()
    graphs, ran = make_graphs(runtime)
    shape = graphs.decode_shape(5, True)
    for captured, replayed, is_usual in ((0, 0, False), (1, 1, False), (1, 2, True)):
        assert graphs.run(shape) is is_usual  # what is prepared takes time that later steps do not take
        assert (runtime.counts["captured"], runtime.counts["replayed"]) == (captured, replayed)
    assert ran == [shape] * 3  # the fake graph runs the function, too


def test_a_capture_that_fails_leaves_eager_steps() -> None:
    class Failing(AsyncCpuRuntime):
        def capture(self, function: Callable[[], Any]) -> RecordedStep | None:
            raise RuntimeError("operation not permitted when stream is capturing")

    graphs, ran = make_graphs(Failing())
    shape = graphs.decode_shape(5, True)
    for _ in range(4):
        graphs.run(shape)
    assert ran == [shape] * 4
    assert graphs.num_captured == 0 and not graphs.decode_shape(5, True).is_graph


def test_disabled_graphs_capture_nothing() -> None:
    runtime = AsyncCpuRuntime()
    graphs, _ = make_graphs(runtime, enabled=False)
    for _ in range(3):
        graphs.run(graphs.decode_shape(5, True))
    assert not graphs.capture_next() and runtime.counts["captured"] == 0


def test_idle_captures_small_decode_batches_first_and_each_shape_once() -> None:
    runtime = AsyncCpuRuntime()
    graphs, _ = make_graphs(runtime)
    graphs.run(graphs.decode_shape(1, True))
    graphs.run(graphs.decode_shape(1, True))
    assert graphs.num_captured == 1
    rounds = 0
    while graphs.capture_next():
        rounds += 1
    assert graphs.num_captured == runtime.counts["captured"] == rounds + 1


def test_a_servers_first_sizes_run_once_and_none_is_larger_than_a_step_may_be() -> None:
    runtime = AsyncCpuRuntime()
    graphs, ran = make_graphs(runtime)
    graphs.run_first()
    assert ran == list(dict.fromkeys(ran)) and runtime.counts["captured"] == 0
    assert graphs.decode_shape(5, True) in ran
    assert graphs.mixed_shape(20, 5, 1, 16, True) in ran
    graphs.run(graphs.decode_shape(5, True))
    assert runtime.counts["captured"] == 1

    small, ran = make_graphs(rows=3, tokens=64)
    small.run_first()
    assert ran and max(shape.num_requests for shape in ran) <= 3 and max(shape.num_tokens for shape in ran) <= 64
