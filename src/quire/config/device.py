"""The device, and how weights are read."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class DeviceConfig:
    """`device`: `auto` or a platform's name. `cpu_threads`: worker threads on a CPU; 0 means all cores this process may use."""

    device: str = "auto"
    cpu_threads: int = 0


@dataclasses.dataclass(frozen=True)
class LoadConfig:
    """`load_format`: `auto`, `safetensors`, `pt` (pickled tensors), `dummy` (random weights from the seed)."""

    load_format: str = "auto"
    download_dir: str | None = None
    ignore_patterns: tuple[str, ...] = ()
    model_loader_extra_config: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """`backend`: a backend's name, or None to let the platform choose. Other engines' names of the same are taken too."""

    backend: str | None = None

    def __post_init__(self) -> None:
        if self.backend is not None:
            object.__setattr__(self, "backend", _BACKEND_NAMES.get(self.backend.lower(), self.backend))


_BACKEND_NAMES = {
    **{name: name for name in ("triton", "flash", "flashinfer", "cpu", "reference")},
    "auto": None,
    "triton_attn": "triton",
    "flash_attn": "flash",
    "cpu_attn": "cpu",
}
