"""`vllm.envs`: each `VLLM_X` is the value of `QUIRE_X`."""

from typing import Any

from quire import envs


def __getattr__(name: str) -> Any:
    if not name.startswith("VLLM_"):
        raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")
    return getattr(envs, envs.own_name(name))


def __dir__() -> list[str]:
    return [name.replace("QUIRE_", "VLLM_") for name in dir(envs) if name.startswith("QUIRE_")]
