"""Kernels are chosen once for the whole room: the references, so that these tests prove the sampler and not a kernel."""

import pytest

from quire.kernels import ops


@pytest.fixture(scope="session", autouse=True)
def reference_kernels() -> None:
    ops.select("cpu")
