"""Which number formats of linear weights there are, by the names that `--quantization` and checkpoints use."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.layers.linear import LinearMethod, UnquantizedLinear
from quire.logger import init_logger
from quire.platforms.interface import Capabilities
from quire.plugins.registry import Registry
from quire.quantization import (
    autoround,
    awq,
    bitsandbytes,
    compressed,
    fp4,
    fp8,
    gguf,
    gptq,
    hqq,
    modelopt,
    online,
    quark,
    torchao,
)
from quire.quantization.method import Create, QuantizedLinear
from quire.quantization.scheme import FP8_FORM, Form, SchemeOf

logger = init_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format.

    Attributes:
        parse: from a checkpoint's `quantization_config` to each matrix's scheme; None: there are no such checkpoints.
        online: makes a weight of a plain checkpoint's matrix, and what that takes; None: this needs a checkpoint.
        uses_fp8: whether matrices are multiplied in float8 where the device has it.
        stores_embeddings: whether checkpoints have embeddings in it too.
    """

    parse: Callable[[HFConfig], SchemeOf] | None = None
    online: tuple[Create, Form] | None = None
    uses_fp8: Literal["no", "may"] = "no"
    stores_embeddings: bool = False


FORMATS = {
    "auto-round": Format(autoround.parse, uses_fp8="may"),
    "awq": Format(awq.parse),
    "bitsandbytes": Format(bitsandbytes.parse),
    "compressed-tensors": Format(compressed.parse, uses_fp8="may"),
    "fbgemm_fp8": Format(fp8.parse_fbgemm, uses_fp8="may"),
    "fp8": Format(fp8.parse, (fp8.round_to_fp8, FP8_FORM), uses_fp8="may"),
    "gguf": Format(gguf.parse, stores_embeddings=True),
    "gptq": Format(gptq.parse),
    "hqq": Format(hqq.parse),
    "int4": Format(online=(online.round_to_int4, online.INT4_ONLINE)),
    "int8": Format(online=(online.round_to_int8, online.INT8_ONLINE)),
    "modelopt": Format(modelopt.parse, uses_fp8="may"),
    "mxfp4": Format(fp4.parse_mxfp4),
    "quark": Format(quark.parse, uses_fp8="may"),
    "torchao": Format(torchao.parse, uses_fp8="may"),
}

ALIASES = {
    "awq_marlin": "awq",
    "auto_awq": "awq",
    "gptq_marlin": "gptq",
    "auto_gptq": "gptq",
    "gpt_oss_mxfp4": "mxfp4",
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "inc": "auto-round",
    "int8_per_channel_weight_only": "int8",
    "experts_int8": "int8",
    **dict.fromkeys(("fp8_per_tensor", "fp8_per_block", "fp8_per_channel"), "fp8"),
    **dict.fromkeys(("modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"), "modelopt"),
}
"""Other names of formats: in checkpoints, and by which users of vLLM ask for them (there they name a kernel too, or coarser
scales)."""

ROUNDED = {"bitsandbytes": "int4"}
"""vLLM's names of formats that it makes of plain checkpoints while it reads them, and ours that has as many bits."""

METHODS: Registry[type[LinearMethod] | Format] = Registry(
    "quantization", "quantization", {UnquantizedLinear.name: UnquantizedLinear, **FORMATS}
)
"""The registry: a format, or a class that makes its own linear layers."""


def register_linear_method(
    name: str, method: type[LinearMethod] | Format | str, *, override: bool = False, owner: str | None = None
) -> None:
    """Add a format, a class, or the path `module:attribute` of one. `override`, `owner`: see `Registry.register`.

    Raises:
        ConfigError: the name is taken.
    """
    METHODS.register(name, method, override=override, owner=owner)


def linear_method(quantization: str | None, hf: HFConfig, capabilities: Capabilities | None = None) -> LinearMethod:
    """The method for a model: what the user asks for, else what the checkpoint says it is.

    Args:
        capabilities: of the device; None: it is not asked whether it can compute with the method.

    Raises:
        ConfigError: no such method, it contradicts the checkpoint, or the device cannot compute with it.
    """
    section = hf.get("quantization_config")
    stored = str(section.get("quant_method", "unknown")) if isinstance(section, HFConfig) else None
    quantization = ALIASES.get(quantization or "", quantization)
    stored = ALIASES.get(stored or "", stored)
    if stored is None and quantization in ROUNDED:
        logger.info("quantization=%r: a plain checkpoint is rounded to %s", quantization, ROUNDED[quantization])
        quantization = ROUNDED[quantization]
    name = quantization or stored or "unquantized"
    if stored is not None and name != stored:
        raise ConfigError(f"quantization={name!r}, but the checkpoint is stored as {stored!r}", setting="quantization")
    if name not in METHODS:
        source = "config.json's quantization_config" if stored else "quantization"
        raise ConfigError(
            f"{source} asks for {name!r}, which is not supported; supported: {', '.join(sorted(METHODS))}",
            setting="quantization",
        )
    method = _method(name, METHODS[name], section if stored is not None else None)
    if capabilities is not None:
        method.on_device(capabilities)
    return method


def _method(name: str, registered: type[LinearMethod] | Format, section: HFConfig | None) -> LinearMethod:
    if not isinstance(registered, Format):
        return registered.from_config(section)
    if section is not None and registered.parse is not None:
        return QuantizedLinear(
            name,
            registered.parse(section),
            uses_fp8=registered.uses_fp8,
            stores_embeddings=registered.stores_embeddings,
        )
    if section is None and registered.online is not None:
        needs = "needs" if registered.uses_fp8 == "may" else "no"
        return QuantizedLinear(name, online=registered.online, uses_fp8=needs)
    ready = ", ".join(sorted(known for known, form in METHODS.items() if isinstance(form, Format) and form.online))
    raise ConfigError(
        f"quantization={name!r} is for checkpoints that were stored so; a plain one can be loaded as {ready}"
        if section is None
        else f"config.json's quantization_config asks for {name!r}, which is only made of plain checkpoints",
        setting="quantization",
    )
