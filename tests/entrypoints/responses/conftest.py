"""The in-process server of the neighbouring folder."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.entrypoints.openai.conftest import serve


@pytest.fixture
def server() -> Callable[..., Any]:
    """`async with server(...) as s` gives an `InProcessServer`."""
    return serve


@pytest.fixture
def anyio_backend() -> str:
    """Coroutine tests run on asyncio, as the server does."""
    return "asyncio"
