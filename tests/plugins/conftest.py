"""The made-up device for tests of this folder."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.oracles import fake_npu

from quire.plugins import discovery


@pytest.fixture(scope="session")
def npu_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package is installed in."""
    if shutil.which("g++") is None:
        pytest.skip("the device's driver needs g++")
    return fake_npu.install(fake_npu.shared_folder(tmp_path_factory.getbasetemp()))


@pytest.fixture
def npu(npu_site: Path, monkeypatch: pytest.MonkeyPatch, kept_selection: None) -> Iterator[None]:
    """The plugin can be found, by this process and its children, for one test."""
    discovery.forget()  # what another test of this process has found
    monkeypatch.syspath_prepend(str(npu_site))
    monkeypatch.setenv("PYTHONPATH", str(npu_site), prepend=os.pathsep)
    monkeypatch.delenv("QUIRE_PLUGINS", raising=False)
    monkeypatch.delenv("QUIRE_PLATFORM", raising=False)
    yield
    discovery.forget()
