"""Which steps are captured as graphs: sizes are rounded up to a few, each is captured when it is used again, or while idle.

A size that comes for the first time runs eagerly at its rounded size, which also makes every kernel ready for the capture.
Knows sizes; knows nothing of models.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from quire.logger import init_logger
from quire.platforms.interface import DeviceRuntime, RecordedStep

logger = init_logger(__name__)

MAX_GRAPH_TOKENS = 2048
"""Steps with more tokens run eagerly: the device is busy for longer than the host needs to submit them."""
DECODE_SIZES = (
    *(1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512),
    *(640, 768, 896, 1024),
)
MIXED_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MIXED_REQUESTS = (4, 16, 64, 256, 1024)
FIRST_DECODES, FIRST_TOKENS, FIRST_REQUESTS = (2, 4, 8, 16), (32, 64, 128, 256), (4, 16)
"""Sizes that the first requests of a server have."""
EAGER_STEP = 16
"""Token counts of eager steps are rounded up to multiples of this, so that kernels need few variants."""


@dataclasses.dataclass(frozen=True)
class StepShape:
    """Bounds that a step runs with.

    Attributes:
        num_tokens: 0 for the draw of an earlier step's rows.
        num_logits: 0 where nothing is sampled.
        max_query_len: 1 for steps in which every request computes one token.
        samples: the step ends with plain sampling (temperature and greedy rows only).
        is_graph: whether it may be captured.
        is_narrow: nobody wants the hidden states of tokens that need no logits.
        decodes: a request may compute a single token; always so in what may be captured.
        has_short: a request computes few tokens behind a long context (`attention.interface.SHORT_TOKENS`).
        has_adapters: some rows have adapters.
        has_media: embeddings of media take the place of some tokens' own.
    """

    num_tokens: int
    num_requests: int
    num_logits: int
    max_query_len: int
    samples: bool
    is_graph: bool
    is_narrow: bool = False
    decodes: bool = True
    has_short: bool = False
    has_adapters: bool = False
    has_media: bool = False


class Captures:
    """Work that is captured as a graph when it is done for the second time; the first time has made every kernel ready. Each
    function is given its key.

    Attributes:
        is_enabled: until something cannot be captured.
        graphs, ready: by key, what was captured; what was done once.
    """

    def __init__(self, runtime: DeviceRuntime, *, is_enabled: bool) -> None:
        self._runtime, self.is_enabled = runtime, is_enabled
        self.graphs: dict[Hashable, RecordedStep] = {}
        self.ready: set[Hashable] = set()

    def run(self, key: Hashable, function: Callable[[Any], None], *, is_graph: bool = True) -> bool:
        """Replay what was captured, capture what is done again, or do it. Whether it will take as long again."""
        graph, is_graph = self.graphs.get(key), is_graph and self.is_enabled
        is_usual = graph is not None or not is_graph
        if graph is None and is_graph and key in self.ready:
            graph = self.capture(key, function)
        if graph is not None:
            graph.replay(0, 0)
            return is_usual
        function(key)
        if is_graph:
            self.ready.add(key)
        return is_usual

    def capture(self, key: Hashable, function: Callable[[Any], None]) -> RecordedStep | None:
        """Capture it now; None where that is not possible, and is not tried again."""
        try:
            graph = self._runtime.capture(functools.partial(function, key))
        except RuntimeError as error:
            logger.warning("%s cannot be captured, steps run eagerly from now on: %s", key, error)
            graph = None
        if graph is None:
            self.is_enabled = False
            self.ready.discard(key)
        else:
            self.graphs[key] = graph
        return graph

    def forget(self, is_meant: Callable[[Any], bool] = lambda key: True) -> None:
        """What these consist of is going, or is other work from now on."""
        for key in filter(is_meant, [*self.graphs, *self.ready]):
            self.graphs.pop(key, None)
            self.ready.discard(key)


class StepGraphs:
    """Runs steps of given shapes: replayed where captured, else eagerly.

    Args:
        run: computes a step of a shape; what it submits is captured.
        prepare_empty: makes the device's inputs a step without tokens.
        is_enabled: false runs everything eagerly.
        has_logits: false where steps end with hidden states (pooling).
        max_draws: tokens of a step that need logits; more than there are rows where drafts are verified.
        graph_tokens: steps with prompts and more tokens are not captured.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        max_rows: int,
        max_tokens: int,
        run: Callable[[StepShape], None],
        prepare_empty: Callable[[], None],
        is_enabled: bool,
        has_logits: bool = True,
        max_draws: int = 0,
        graph_tokens: int = MAX_GRAPH_TOKENS,
    ) -> None:
        max_draws = max(max_draws, max_rows)
        self._run, self._prepare_empty = run, prepare_empty
        self._max_tokens = max_tokens
        self._captures, self._has_logits = Captures(runtime, is_enabled=is_enabled), has_logits
        self._decode_sizes = [*(size for size in DECODE_SIZES if size < max_rows), max_rows]
        self._draw_sizes = [*(size for size in DECODE_SIZES if size < max_draws), max_draws]
        self._requests = [*(size for size in MIXED_REQUESTS if size < max_draws), max_draws]
        self._tokens = [size for size in MIXED_TOKENS if size <= min(graph_tokens, max_tokens)]
        self._to_capture: Iterator[StepShape] = iter(self._common_shapes() if is_enabled else ())

    @property
    def num_captured(self) -> int:
        """Graphs there are."""
        return len(self._captures.graphs)

    def decode_shape(self, requests: int, samples: bool) -> StepShape:
        """Of a step in which every request computes one token."""
        size = self._decode_sizes[bisect.bisect_left(self._decode_sizes, requests)]
        logits = size if self._has_logits else 0
        return StepShape(size, size, logits, 1, samples and logits > 0, self._captures.is_enabled)

    def masked_draw(self, num_logits: int) -> StepShape:
        """Of the draw alone, by masks, after a step with this many logits."""
        return StepShape(0, 0, num_logits, 0, True, self._captures.is_enabled)

    def mixed_shape(
        self,
        tokens: int,
        requests: int,
        num_logits: int,
        max_query_len: int,
        samples: bool,
        is_narrow: bool = True,
        decodes: bool = True,
        has_short: bool = False,
    ) -> StepShape:
        """Of any other step; `requests` is not less than `num_logits`."""
        is_narrow &= self._has_logits
        if self._captures.is_enabled and self._tokens and tokens <= self._tokens[-1]:
            size = self._tokens[bisect.bisect_left(self._tokens, tokens)]
            bound = min(self._requests[bisect.bisect_left(self._requests, requests)], size)
            logits = bound if self._has_logits else 0
            return StepShape(size, bound, logits, size, samples and logits > 0, True, is_narrow, True, has_short)
        size = min(-(-tokens // EAGER_STEP) * EAGER_STEP, self._max_tokens)
        rows = self._draw_sizes
        bound = rows[bisect.bisect_left(rows, requests)]
        logits = rows[bisect.bisect_left(rows, num_logits)] if num_logits and self._has_logits else 0
        samples &= num_logits > 0
        return StepShape(size, bound, logits, max_query_len, samples, False, is_narrow, decodes, has_short)

    def run(self, shape: StepShape) -> bool:
        """Submit a step whose inputs are on the device. Whether later ones of its shape will take as long."""
        return self._captures.run(shape, self._run, is_graph=shape.is_graph)

    def shapes(self) -> list[StepShape]:
        """One of every kind that steps have: the common ones, some of which every token's hidden state is wanted, some that are
        too long for a graph (with a request that decodes and without, and without logits), and those with short queries behind
        long contexts, whose kernel is the same for any number of tokens."""
        found, few = list(self._common_shapes()), min(4, self._requests[-1])
        found += [self.mixed_shape(tokens, few, 1, tokens, True, is_narrow=False) for tokens in self._tokens[::4]]
        tokens = min(
            MAX_GRAPH_TOKENS + EAGER_STEP, self._max_tokens
        )  # products are computed: a long step takes its time
        found += [
            self.mixed_shape(tokens, self._requests[-1], 1, tokens, True),
            self.mixed_shape(tokens, 1, 1, tokens, True, decodes=False),
            self.mixed_shape(tokens, 1, 0, tokens, True, decodes=False),
            self.mixed_shape(tokens, 1, 1, tokens, True, is_narrow=False, decodes=False),
            self.mixed_shape(tokens, few, few, tokens, True, is_narrow=False),
        ]
        largest = self._tokens[-1] if self._tokens else 0
        found += [dataclasses.replace(shape, has_short=True) for shape in found if shape.max_query_len == largest > 0]
        found.append(self.mixed_shape(tokens, self._requests[-1], few, tokens, True, has_short=True))
        found.append(self.mixed_shape(self._max_tokens, self._requests[-1], 1, self._max_tokens, True))
        return list(dict.fromkeys(found))

    def num_logits(self, wanted: int) -> int:
        """How many rows of logits are computed where so many are wanted by themselves."""
        sizes = self._decode_sizes
        return sizes[bisect.bisect_left(sizes, wanted)]

    def capture_next(self) -> bool:
        """Capture one more of the common shapes, the device being idle; false where none is left."""
        for shape in self._to_capture:
            if shape not in self._captures.graphs:
                try:
                    if shape not in self._captures.ready:
                        self._prepare_empty()
                        self._run(shape)
                        self._captures.ready.add(shape)
                except torch.OutOfMemoryError as error:
                    logger.warning("no memory is left to prepare steps of %s and larger ones: %s", shape, error)
                    self._to_capture = iter(())
                    return False
                self._captures.capture(shape, self._run)
                return self._captures.is_enabled
        return False

    def run_first(self) -> None:
        """Run steps of the sizes that a server's first requests have, without tokens. A library loads the kernels of a size when
        it is first used, from a disk that may be cold: 0.25 s were seen, in which every stream stood still."""
        sizes = [self.decode_shape(size, True) for size in FIRST_DECODES if size <= self._decode_sizes[-1]]
        sizes += [
            self.mixed_shape(tokens, min(requests, self._requests[-1]), 1, tokens, True)
            for tokens in FIRST_TOKENS
            for requests in FIRST_REQUESTS
            if tokens <= self._max_tokens
        ]
        for shape in dict.fromkeys(sizes):
            self._prepare_empty()
            self.run(shape)

    def renew_adapters(self, *, can_replay: bool) -> None:
        """Steps with adapters consist of other work from now on: forget their graphs, and capture the commonest when idle, if
        that can be done."""
        self._captures.forget(lambda shape: shape.has_adapters)
        waiting = [shape for shape in self._to_capture if not shape.has_adapters]
        if self._captures.is_enabled and can_replay:
            waiting += [dataclasses.replace(shape, has_adapters=True) for shape in self._common_shapes()]
        self._to_capture = iter(waiting)

    def clear(self) -> None:
        """Forget every graph (the pages that they point to are going)."""
        self._captures.forget()

    def _common_shapes(self) -> Iterator[StepShape]:
        """Commonest first: small decode batches, short prompts alone, then larger ones."""
        for size in self._decode_sizes:
            yield self.decode_shape(size, True)
        for tokens in self._tokens:
            for requests in (4, 64):
                if requests <= tokens:
                    yield self.mixed_shape(tokens, min(requests, self._requests[-1]), 1, tokens, True)
