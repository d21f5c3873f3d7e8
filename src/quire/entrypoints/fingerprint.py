"""What `system_fingerprint` tells: which configuration made an answer, so that a client sees when it has changed."""

import hashlib
import json

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.version import __version__

MODES = ("full", "hash", "custom", "none")


def check_fingerprint(mode: str, value: str | None) -> None:
    """Raises a ConfigError for a value without its mode, or the other way round."""
    if (mode == "custom") != bool(value):
        raise ConfigError(
            f"fingerprint_value={value!r} and fingerprint_mode={mode!r} do not go together: `custom` needs a value, and no "
            "other mode takes one",
            setting="fingerprint_value",
        )


def build_fingerprint(mode: str, value: str | None, config: EngineConfig) -> str:
    """The version, the devices and a hash of what answers depend on (`full`), the hash alone, the operator's own, or nothing."""
    if mode in ("none", "custom"):
        return value or ""
    digest = _digest(config)
    if mode == "hash":
        return digest
    parallel = config.parallel
    return f"quire-{__version__}-tp{parallel.tensor_parallel_size}-{digest}"


def _digest(config: EngineConfig) -> str:
    """Of the model, its numbers and its kernels; not of how much is served at once."""
    model, cache = config.model, config.cache
    told = [
        __version__,
        (model.model, model.revision, model.dtype, model.quantization, model.max_model_len, model.enforce_eager),
        cache.cache_dtype,
        config.parallel.tensor_parallel_size,
        config.attention.backend,
        config.device.device,
    ]
    return hashlib.blake2b(json.dumps(told, default=str).encode(), digest_size=4).hexdigest()
