"""The pytest plugin that tells how each case ends, as JSON lines in the file named by an option."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.vllm_faces import modules, servers, tokenizer
from tools.vllm_faces.outcomes import Absent, NotBlackBox, Watch

EQUAL, DIFFERENT, ABSENT, NOT_BLACK_BOX = "equal", "different", "absent", "not black box"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where vLLM's sources lie, and where results go."""
    parser.addoption("--vllm-root")
    parser.addoption("--outcomes")
    parser.addoption("--servers", action="store_true")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before anything of vLLM's is imported."""
    names = modules.install(Path(early_config.known_args_namespace.vllm_root))
    tokenizer.install()
    if early_config.known_args_namespace.servers:
        servers.install(names)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An asynchronous case runs in the loop of its fixtures."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    servers.run_case(pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in names})
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A case and its fixtures."""
    asks = item.config.getoption("--servers") and {"server", "client", "async_client"} & set(
        getattr(item, "fixturenames", ())
    )
    Watch.in_case, Watch.num_read = True, int(bool(asks))
    yield
    Watch.in_case = False


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """One phase of a case has ended."""
    outcome: Any = yield
    report = outcome.get_result()
    if call.when == "teardown" or (call.when == "setup" and report.passed):
        return
    ended, why = _verdict(call)
    may_fail = next((str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("xfail")), None)
    _write(item.config, item.nodeid, ended, why, may_fail)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported is no case; the command names it."""
    if report.failed:
        Watch.errors.append({"file": report.nodeid, "why": str(report.longrepr)[-600:]})


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Files that could not be imported."""
    for error in Watch.errors:
        _write(session.config, error["file"], "file not imported", error["why"], None)


def _verdict(call: pytest.CallInfo[None]) -> tuple[str, str]:
    error = call.excinfo
    if error is None:
        return (EQUAL, "") if Watch.num_read else (NOT_BLACK_BOX, "reads no text with a parser")
    chain, seen = error.value, list[BaseException]()
    while chain is not None and chain not in seen:
        seen.append(chain)
        if isinstance(chain, NotBlackBox):
            return NOT_BLACK_BOX, str(chain)
        if isinstance(chain, Absent):
            return ABSENT, str(chain)
        chain = chain.__cause__ or chain.__context__
    if "the server did not start" in str(error.value):
        return DIFFERENT, _shown(error)
    if isinstance(error.value, pytest.skip.Exception):
        return NOT_BLACK_BOX, f"skips: {error.value}"
    if call.when == "setup" or isinstance(error.value, ModuleNotFoundError):
        return NOT_BLACK_BOX, f"{type(error.value).__name__}: {str(error.value)[:200]}"
    if not Watch.num_read:
        return NOT_BLACK_BOX, f"before any text is read: {type(error.value).__name__}: {str(error.value)[:200]}"
    return DIFFERENT, _shown(error)


def _shown(error: pytest.ExceptionInfo[BaseException]) -> str:
    """Where a case failed, and how."""
    places = [
        f"{Path(entry.path).name}:{entry.lineno + 1}: {str(entry.statement).strip()}"
        for entry in error.traceback
        if "site-packages" not in str(entry.path)
    ]
    return "\n".join([*places[-3:], error.exconly()[:1500]])


def _write(config: pytest.Config, case: str, ended: str, why: str, may_fail: str | None) -> None:
    with Path(str(config.getoption("--outcomes"))).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"case": case, "outcome": ended, "why": why, "vllm_may_fail": may_fail}) + "\n")
