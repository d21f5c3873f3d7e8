"""vLLM's names whose behaviour Quire has in another form, and the small helpers that its scripts import.

Knows Quire's public names. The table in `names.py` says where they appear.
"""

import argparse
import contextlib
import gc
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from quire import envs
from quire.as_vllm.version import __version__, __version_tuple__
from quire.engine.arg_parser import ArgumentParser
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.llm import LLM as _LLM
from quire.errors import ConfigError
from quire.metrics.snapshot import Metric
from quire.sampling_params import StructuredOutputsParams as GuidedDecodingParams
from quire.tokenizers.interface import Tokenizer
from quire.tokenizers.interface import Tokenizer as AnyTokenizer
from quire.tokenizers.interface import Tokenizer as TokenizerLike

__all__ = [
    "LLM",
    "AnyTokenizer",
    "FlexibleArgumentParser",
    "GuidedDecodingParams",
    "ShardedStateLoader",
    "TokenizerLike",
    "Vector",
    "__version__",
    "__version_tuple__",
    "async_tensor_h2d",
    "cached_get_tokenizer",
    "cached_tokenizer_from_config",
    "cleanup_dist_env_and_memory",
    "current_platform",
    "get_ip",
    "get_open_port",
    "get_tokenizer",
    "gpu_sync_allowed",
    "hf_api",
    "print_embeddings",
    "random_uuid",
    "set_ulimit",
    "update_environment_variables",
]


class LLM(_LLM):
    """As Quire's; metrics have vLLM's names, `encode` gives tensors, and VLLM_BATCH_INVARIANT is the setting `deterministic`."""

    def __init__(self, model: str | None = None, **kwargs: Any) -> None:
        if envs.foreign("VLLM_BATCH_INVARIANT") == "1":
            kwargs.setdefault("deterministic", True)
        super().__init__(model, **kwargs)

    def _start(self, engine: LLMEngine) -> None:
        super()._start(engine)
        vars(self.llm_engine).setdefault("engine_core", self)  # where scripts of vLLM call `save_sharded_state`

    def collective_rpc(self, method: Any, *args: Any, **options: Any) -> list[Any]:
        """As Quire's; weights that were left out at the start are read with vLLM's two calls, too."""
        config = self.llm_engine.vllm_config
        if method == "update_config":
            (changes,) = options.get("args", ())
            if set(changes) != {"load_config"} or set(changes["load_config"]) - {"load_format"}:
                raise ConfigError.of(
                    "update_config", f"{changes!r} cannot be changed: only load_config.load_format can"
                )
            return [None] * config.parallel.world_size
        if method == "reload_weights":
            self.reload_weights(config.model.path)
            return [None] * config.parallel.world_size
        return super().collective_rpc(method, *args, **options)

    def encode(self, prompts: Any, *args: Any, **options: Any) -> list[Any]:
        """As Quire's; arrays are tensors."""
        import numpy as np
        import torch

        outputs = super().encode(prompts, *args, **options)
        for output in outputs:
            data = getattr(output.outputs, "data", None)
            if isinstance(data, np.ndarray):
                output.outputs.data = torch.as_tensor(data)  # type: ignore[union-attr]
        return outputs

    def get_metrics(self, names: str = "vllm") -> list[Metric]:
        """The figures of now; `names` is their prefix."""
        return super().get_metrics(names)


class FlexibleArgumentParser(ArgumentParser):
    """The parser of Quire's own commands. A wrong flag ends the program with code 2, as argparse does."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's."""
        try:
            return super().parse_args(args, namespace)
        except ConfigError as error:
            self.leave(error)

    def error(self, message: str) -> NoReturn:
        """Print the message and leave."""
        try:
            super().error(message)
        except ConfigError as error:
            self.leave(error)

    def leave(self, error: ConfigError) -> NoReturn:
        """Print the error as argparse prints its own, and end the program."""
        print(f"{self.prog}: error: {error}", file=sys.stderr)
        sys.exit(2)

    def check_port(self, value: str) -> int:
        """A port's number. Raises argparse.ArgumentTypeError."""
        if value.isdecimal() and 1024 <= int(value) <= 65535:
            return int(value)
        raise argparse.ArgumentTypeError(f"{value!r} is not a port between 1024 and 65535")


class ShardedStateLoader:
    """The names of the files that `save_sharded_state` writes."""

    DEFAULT_PATTERN = TP_ONLY_PATTERN = PP_AND_TP_PATTERN = "model-rank-{rank}-part-{part}.safetensors"


class Vector(Metric):
    """A figure of several numbers. Quire has none: a number for each label is a figure of its own."""

    values: list[int]


class _Platform:
    """What scripts ask `current_platform`."""

    def __getattr__(self, name: str) -> Any:
        from quire.platforms import current_platform

        platform = current_platform()
        if name.startswith("is_"):
            return lambda: platform.name == name.removeprefix("is_").removesuffix("_alike")
        return platform.name if name in ("device_type", "device_name") else getattr(platform, name)

    def get_device_name(self, device_id: int = 0) -> str:
        """What the device is called."""
        from quire.platforms import current_platform

        return current_platform().device_name()


current_platform = _Platform()


def get_tokenizer(tokenizer_name: str, *args: Any, tokenizer_mode: str = "auto", **options: Any) -> Tokenizer:
    """The tokenizer of a folder or of a model at the hub."""
    from quire.config.hub import find_tokenizer
    from quire.config.hub.listing import HubSettings
    from quire.tokenizers.loader import get_tokenizer as load

    return load(find_tokenizer(tokenizer_name, HubSettings(revision=options.get("revision"))), tokenizer_mode)


cached_get_tokenizer = get_tokenizer


def cached_tokenizer_from_config(model_config: Any, **options: Any) -> Tokenizer | None:
    """The tokenizer of an engine's model."""
    from quire.engine.tokenizer_source import TokenizerSource

    return TokenizerSource(model_config).get()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free what deleted engines held: an engine gives its memory back when nothing refers to it."""
    gc.collect()


def gpu_sync_allowed(first_only: bool = False) -> contextlib.AbstractContextManager[None]:
    """Nothing watches whether a processor waits for the device."""
    return contextlib.nullcontext()


def async_tensor_h2d(data: Any, device: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """A list, an array or a tensor of the host's, on a device."""
    import torch

    tensor = torch.as_tensor(data, dtype=dtype)
    return tensor.to(device, non_blocking=True) if out is None else out.copy_(tensor, non_blocking=True)


def hf_api() -> Any:
    """The hub's client."""
    from huggingface_hub import HfApi

    return HfApi()


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first 16 numbers of a vector, and how many there are."""
    shown = f"{str(list(embeds[:16]))[:-1]}, ...]" if len(embeds) > 16 else str(list(embeds))
    print(f"{prefix}: {shown} (size={len(embeds)})")


def random_uuid() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex


def get_ip() -> str:
    """The address under which other machines reach this one; 127.0.0.1 where it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the address is one that nobody has (RFC 5737)
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def get_open_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def set_ulimit(target_soft_limit: int = 65535) -> None:
    """Allow this process so many open files, if the system lets it."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def update_environment_variables(envs_dict: Mapping[str, str]) -> None:
    """Set variables for this process and its children."""
    for name, value in envs_dict.items():
        envs.set_variable(name, value)
