"""Which number formats of linear weights there are, by the names that `--quantization` and checkpoints use."""

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.layers.linear import LinearMethod, UnquantizedLinear
from quire.platforms.interface import Capabilities
from quire.quantization.fp8 import CompressedFp8, Fp8Linear

_methods: dict[str, type[LinearMethod]] = {}


def register_linear_method(name: str, method: type[LinearMethod], *, override: bool = False) -> None:
    """Add a format; a duplicate without `override` is an error."""
    if name in _methods and not override:
        raise ConfigError(f"quantization {name!r} is already registered by {_methods[name].__qualname__}")
    _methods[name] = method


for _method in (UnquantizedLinear, Fp8Linear, CompressedFp8):
    register_linear_method(_method.name, _method)


def linear_method(quantization: str | None, hf: HFConfig, capabilities: Capabilities | None = None) -> LinearMethod:
    """The method for a model: what the user asks for, else what the checkpoint says it is.

    Args:
        capabilities: of the device; None: it is not asked whether it can compute with the method.

    Raises:
        ConfigError: no such method, it contradicts the checkpoint, or the device cannot compute with it.
    """
    section = hf.get("quantization_config")
    stored = str(section.get("quant_method", "unknown")) if isinstance(section, HFConfig) else None
    name = quantization or stored or "unquantized"
    if stored is not None and name != stored:
        raise ConfigError(f"quantization={name!r}, but the checkpoint is stored as {stored!r}", setting="quantization")
    if name not in _methods:
        source = "config.json's quantization_config" if stored else "quantization"
        raise ConfigError(
            f"{source} asks for {name!r}, which is not supported; supported: {', '.join(sorted(_methods))}",
            setting="quantization",
        )
    method = _methods[name].from_config(section if stored is not None else None)
    why = None if capabilities is None else method.unavailable(capabilities)
    if why is not None:
        raise ConfigError(f"quantization={name!r} cannot run on this device: {why}", setting="quantization")
    return method
