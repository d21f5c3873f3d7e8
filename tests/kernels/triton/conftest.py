"""Kernels run in Triton's interpreter here."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def repaired_interpreter() -> None:
    pytest.importorskip("triton")
    from tests.oracles.interpreter import repair_interpreter

    repair_interpreter()
