"""The platform that others are compared with: the CPU with nothing but the plain PyTorch reference of every operation."""

import dataclasses

from quire.errors import Explained
from quire.platforms import BUILT_IN
from quire.platforms.cpu import CpuPlatform
from quire.platforms.interface import Capabilities

NAME = "oracle"


class OraclePlatform(CpuPlatform):
    """References alone; nothing is recorded."""

    name = NAME

    def capabilities(self) -> Capabilities:
        return dataclasses.replace(
            super().capabilities(),
            graphs=Explained("none", "references are not recorded"),
            fp8=Explained(True, "a reference computes in the types that a platform has"),
        )

    def select_kernels(self, *, deterministic: bool = False) -> None:
        from quire.kernels import ops

        ops.select(self.name, deterministic=deterministic)

    def attention_backends(self) -> list[str]:
        return ["quire.attention.reference:ReferenceBackend"]


def install() -> None:
    """Make `device="oracle"` known in this process."""
    BUILT_IN.setdefault(NAME, f"{__name__}:{OraclePlatform.__name__}")
