"""File descriptors: any number can be waited for."""

import ast
import os
import resource
from pathlib import Path

import pytest

import quire
from quire.descriptors import raise_limit, wait_readable


@pytest.fixture
def high_pipe():
    """A pipe whose reading end is a descriptor that `select` cannot take."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = raise_limit(2000)
    if limit is not None and limit < 2000:
        pytest.skip("the system allows too few open files")
    reading, writing = os.pipe()
    os.dup2(reading, 1500)
    yield 1500, writing
    for descriptor in (1500, reading, writing):
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_descriptor_above_1024_can_be_waited_for(high_pipe) -> None:
    reading, writing = high_pipe
    assert not wait_readable(reading, 0.0)
    os.write(writing, b"x")
    assert wait_readable(reading, 60.0)


def test_nothing_waits_with_select_which_knows_the_first_1024_descriptors_only() -> None:
    calls = [
        f"{file.name}:{node.lineno}"
        for file in Path(quire.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("select.select", "selectors.SelectSelector")
    ]
    assert not calls


def test_the_limit_is_raised_and_never_lowered() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_limit(1) == (None if before[0] == resource.RLIM_INFINITY else before[0])
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
