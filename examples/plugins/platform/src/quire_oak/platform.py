"""The platform: the CPU under another name. A real device overrides each door that differs (docs/hardware-plugin.md)."""

import dataclasses

from quire import envs
from quire.platforms.cpu import CpuPlatform
from quire.platforms.interface import Capabilities, Explained


class OakPlatform(CpuPlatform):
    """A made-up device: it computes on the CPU, with the CPU's kernels, and prefers smaller steps."""

    name = "oak"

    def capabilities(self) -> Capabilities:
        steps = Explained((1024, 512), "a Oak likes small steps")
        return dataclasses.replace(super().capabilities(), max_num_batched_tokens=steps)

    def device_count(self) -> int:
        return envs.OAK_DEVICES

    def select_kernels(self, *, deterministic: bool = False) -> None:
        from quire.kernels import cpu, ops

        cpu.register()
        ops.select("cpu", deterministic=deterministic)  # a device with kernels of its own selects those of its name
