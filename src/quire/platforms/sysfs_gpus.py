"""AMD and Intel GPUs, as the kernel's files tell of them: no torch, no vendor's library, no context on a device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from quire.envs import foreign

KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
DRM_CARDS = Path("/sys/class/drm")
INTEL = "0x8086"


@dataclasses.dataclass(frozen=True)
class SysfsGpu:
    """A GPU.

    Attributes:
        name: of AMD's, the name of its instruction set (`gfx942`).
        memory: bytes; 0 where the files do not tell.
    """

    name: str
    memory: int = 0


def amd_gpus(nodes: Path = KFD_NODES) -> list[SysfsGpu]:
    """The AMD GPUs that HIP will count, in its order."""
    gpus: list[SysfsGpu] = []
    for node in sorted(nodes.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        version = _properties(node / "properties").get("gfx_target_version", 0)
        if version:  # a processor has none
            major, minor, stepping = version // 10000, version // 100 % 100, version % 100
            banks = (_properties(bank / "properties") for bank in node.glob("mem_banks/[0-9]*"))
            memory = sum(bank.get("size_in_bytes", 0) for bank in banks)
            gpus.append(SysfsGpu(f"gfx{major}{minor:x}{stepping:x}", memory))
    for setting in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        gpus = _visible(gpus, foreign(setting))
    return gpus


def intel_gpus(cards: Path = DRM_CARDS) -> list[SysfsGpu]:
    """Intel's GPUs of this machine; their memory is not told."""
    found = [card for card in sorted(cards.glob("card[0-9]*")) if _text(card / "device" / "vendor") == INTEL]
    return [SysfsGpu(f"Intel GPU {_text(card / 'device' / 'device')}") for card in found if "-" not in card.name]


def _visible(gpus: list[SysfsGpu], setting: str | None) -> list[SysfsGpu]:
    """Those that a list of numbers names; others in it (UUIDs) are taken to be the first ones."""
    if setting is None:
        return gpus
    parts = [part.strip() for part in setting.split(",") if part.strip()]
    numbers = [int(part) if part.lstrip("-").isdigit() else number for number, part in enumerate(parts)]
    return [gpus[number] for number in numbers if 0 <= number < len(gpus)]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _properties(path: Path) -> dict[str, int]:
    lines = [line.split() for line in _text(path).splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}
