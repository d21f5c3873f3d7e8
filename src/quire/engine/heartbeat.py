"""A core's heartbeat: a few words of memory that say what it does now, and how long this may take.

The core writes them without a system call; whoever watches it (`watchdog.py`) reads them, from another thread or another process.
"""

import enum
import mmap

from quire import envs

FIRST_STEPS_FACTOR = 10
"""The first steps load and compile kernels, and no prediction says how long the next one takes."""

PREDICTION_FACTOR = 10
"""A step that takes so many times as long as predicted does not end."""


class Activity(enum.IntEnum):
    """What a core does."""

    PREPARATION = 0
    """It starts to serve, or uses a moment without work. It is also what a new record says."""
    REST = 1
    """It waits for messages."""
    MESSAGES = 2
    """It takes in requests."""
    STEP = 3
    """It plans and runs a step."""
    GRAMMAR = 4
    """No request can run before a grammar is compiled."""
    CALL = 5
    """It runs a control verb."""


NUM_WORDS = 4
_BEAT, _ACTIVITY, _ALLOWED_MS, _NUM_TAKEN = range(NUM_WORDS)
NUM_BYTES = NUM_WORDS * 8


def step_timeout_s() -> float:
    """The least time that a step may take, in seconds; 0: nobody watches."""
    return envs.QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS


def map_words(memory_fd: int) -> memoryview:
    """The words of a memory file, which may be closed then."""
    return memoryview(mmap.mmap(memory_fd, NUM_BYTES)).cast("q")


class Heartbeat:
    """The core's side. Only the core's thread calls it, but for `words`.

    Args:
        words: shared with who watches, when that is another process.
    """

    def __init__(self, words: memoryview | None = None) -> None:
        self.words = words if words is not None else memoryview(bytearray(NUM_BYTES)).cast("q")
        self._step_ms = int(step_timeout_s() * 1000)
        self._first_ms = self._step_ms * FIRST_STEPS_FACTOR
        self._beat = self._num_taken = 0
        self._activity = Activity.PREPARATION
        self._allowed_ms: int = 0
        self._steps_ms = 0
        self._before_ms = 0.0
        self._begin(Activity.PREPARATION, self._first_ms)

    def _begin(self, activity: Activity, allowed_ms: int) -> None:
        words = self.words
        if activity is not self._activity or allowed_ms != self._allowed_ms:
            self._activity, self._allowed_ms = activity, allowed_ms
            words[_ACTIVITY], words[_ALLOWED_MS] = activity, allowed_ms
        self._beat += 1
        words[_BEAT] = self._beat

    def step(self, predicted_ms: float | None) -> None:
        """A step begins, which may have to wait for the one before. `predicted_ms`: None where it is not known."""
        allowed_ms = self._step_ms
        if predicted_ms is None:
            allowed_ms = self._first_ms
        else:
            needed_ms = (predicted_ms + self._before_ms) * PREDICTION_FACTOR
            self._before_ms = predicted_ms
            if needed_ms > allowed_ms:
                allowed_ms = int(needed_ms)
        self._steps_ms = allowed_ms
        self._begin(Activity.STEP, allowed_ms)

    def collect(self) -> None:
        """The core waits for the result of a step that has begun."""
        self._begin(Activity.STEP, self._steps_ms)

    def rest(self) -> None:
        """The core waits for messages."""
        self._begin(Activity.REST, self._step_ms)

    def took(self, count: int) -> None:
        """The core has taken messages in, and begins to handle them."""
        self._num_taken += count
        self.words[_NUM_TAKEN] = self._num_taken
        self._begin(Activity.MESSAGES, self._step_ms)

    def prepare(self) -> None:
        """The core uses a moment without work."""
        self._begin(Activity.PREPARATION, self._first_ms)

    def wait_for_grammar(self) -> None:
        """The core has nothing to do before a grammar is compiled. It asks often; this is no progress."""
        if self._activity is not Activity.GRAMMAR:
            self._begin(Activity.GRAMMAR, self._first_ms)

    def call(self, more_s: float = 0.0) -> None:
        """A control verb begins: it may take as long as a start does, which also reads weights, and `more_s`."""
        self._begin(Activity.CALL, int((envs.QUIRE_ENGINE_READY_TIMEOUT_S + more_s) * 1000))


class Pulse:
    """What was read from the words at one moment."""

    def __init__(self, words: memoryview) -> None:
        self.words = tuple(words)

    @property
    def activity(self) -> Activity:
        return Activity(self.words[_ACTIVITY])

    @property
    def allowed_s(self) -> float:
        """How long the activity may take; where the core rests, how long a message may lie."""
        return self.words[_ALLOWED_MS] / 1000

    def is_at_rest(self, num_sent: int) -> bool:
        """Whether the core waits for messages and has taken in all that were sent."""
        return self.words[_ACTIVITY] == Activity.REST and self.words[_NUM_TAKEN] >= num_sent
