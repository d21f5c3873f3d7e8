"""A CPU that may use float8, through the references alone."""

import dataclasses

import pytest

from quire.kernels import ops
from quire.platforms.cpu import CpuPlatform
from quire.platforms.interface import Explained


class Float8Cpu(CpuPlatform):
    """As the CPU, with float8 said to be there: plain PyTorch computes with it."""

    def capabilities(self):
        return dataclasses.replace(super().capabilities(), fp8=Explained(True, "a test's own platform"))

    def select_kernels(self, *, deterministic=False):
        ops.select("any", deterministic=deterministic)

    def attention_backends(self):
        return ["quire.attention.reference:ReferenceBackend"]


@pytest.fixture(autouse=True)
def restored_choice(kept_selection):
    """Which kernels are chosen is the process's state: other rooms' tests get back what they had."""


@pytest.fixture
def float8_cpu():
    platform = Float8Cpu()
    platform.select_kernels()
    return platform
