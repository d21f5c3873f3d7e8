"""What all tests share."""

import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext

import hypothesis
import pytest

for name in (
    "OMP_NUM_THREADS",
    "QUIRE_CPU_THREADS",
):  # tests run beside each other: threads of one would wait for each other
    os.environ.setdefault(name, "1")
if not os.path.exists("/dev/nvidiactl"):  # before anything imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Drawn examples have no time limits; they are the same in each run by default, new ones only with the exhaustive tests. A
    shell starts background jobs with SIGINT ignored, which children inherit: tests of Ctrl-C need the default."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    slow = hypothesis.HealthCheck.too_slow  # a machine under load is no failure
    same = config.getoption("markexpr") == "not exhaustive"
    hypothesis.settings.register_profile("quire", deadline=None, suppress_health_check=[slow], derandomize=same)
    hypothesis.settings.load_profile("quire")
    gc.disable()  # what collecting tests makes stays: looking through it for garbage would take as long as making it


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each worker begins to collect at another folder, and reads what another one has compiled. Compiling all test modules takes
    longer than importing them; workers that go the same way compile each of them at once."""
    report = yield
    if isinstance(collector, pytest.Dir) and "PYTEST_XDIST_WORKER" in os.environ:
        number, count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        first = len(report.result) * number // count
        report.result = report.result[first:] + report.result[:first]
    return report


CASES_BY_DEFAULT = {
    "tests/kernels/": 3,
    "tests/conformance/test_drawn_cases.py": 12,
    "tests/parsers/": 24,
    "tests/models/": 16,
}
"""Of a test with more cases than this so many run by default, evenly spread; the others are `exhaustive`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that do not run by default; and workers have the folders in their order again."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path.parts)
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("exhaustive") is None:
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for test, found in cases.items():
        most = next((most for place, most in CASES_BY_DEFAULT.items() if test.startswith(place)), len(found))
        kept = {round(number * (len(found) - 1) / max(most - 1, 1)) for number in range(most)}
        for index, item in enumerate(found):
            if len(found) > most and index not in kept:
                item.add_marker(pytest.mark.exhaustive)


@contextmanager
def unchanged_log(prefix: str) -> Iterator[None]:
    log = logging.getLogger("quire")
    settings, level = {name: value for name, value in os.environ.items() if name.startswith(prefix)}, log.level
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(prefix) and name not in settings]:
            del os.environ[name]
        os.environ.update(settings)
        log.setLevel(level)


@pytest.fixture(autouse=True)
def kept_log() -> Iterator[None]:
    """A command that runs in this process may change its settings and its log's level: child processes of later tests would
    have them too."""
    with unchanged_log("QUIRE_"):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """The same of the log for what many tests share, which is made before `kept_log` looks."""
    with nullcontext() if fixturedef.scope == "function" else unchanged_log("QUIRE_LOGGING_"):
        return (yield)


def pytest_collection_finish() -> None:
    """What collecting tests left stays. A collection of garbage (a sleeping engine makes one) would look at it for a second; and
    the libraries that tests load are looked through less often than by default, which took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture
def kept_selection() -> Iterator[None]:
    """Which kernels are chosen is the process's state: after the test it is what it was before."""
    from quire.kernels import registry

    before = registry.choices()
    yield
    registry.use(before)
