"""Tiny checkpoints made once a session, and the kernels to run them with."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracles.tiny_models import make_tiny_model

from quire.kernels import ops
from quire.platforms.cpu import CpuPlatform


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def restored_choice(kept_selection: None) -> None:
    """Which kernels are chosen is the process's state: other rooms' tests get back what they had."""


@pytest.fixture(params=["reference", "native"])
def kernels(request: pytest.FixtureRequest, restored_choice: None) -> str:
    """Select plain PyTorch, or the compiled kernels; both must give the same."""
    if request.param == "reference":
        ops.select("any")
    else:
        CpuPlatform().select_kernels()
        if ops.choices()["paged_attention"].chosen.platform != "cpu":
            pytest.skip("the native kernels are not built here")
    return request.param


@pytest.fixture
def reference_kernels(restored_choice: None) -> None:
    ops.select("any")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_tiny_model, each checkpoint once."""

    made: dict[str, Path] = {}

    def tiny(architecture: str, **overrides: Any) -> Path:
        key = f"{architecture} {json.dumps(overrides)}"
        if key not in made:
            made[key] = make_tiny_model(architecture, tmp_path_factory.mktemp("tiny"), tokenizer=False, **overrides)
        return made[key]

    return tiny
