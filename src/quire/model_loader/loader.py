"""From a configuration to a loaded model with its attention backend: spec, checks, then one pass over the weights.

Everything that can be refused is refused before a weight is read. Knows configuration and files; leaves shapes and
slices to `models/`, arithmetic to kernels.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch

from quire.attention.interface import AttentionBackend
from quire.attention.selector import Selection, select_backend
from quire.config import EngineConfig
from quire.config.hub import WEIGHT_PATTERNS, resolve_model_path
from quire.errors import ConfigError
from quire.layers.parallel import ParallelPlan
from quire.logger import init_logger
from quire.model_loader.device_reader import upload_tensors
from quire.model_loader.dummy import dummy_weights
from quire.model_loader.safetensors_reader import FLOATS, SafetensorsReader, TensorInfo
from quire.models.decoder import Decoder, attention_requests
from quire.models.registry import ModelRegistry
from quire.models.spec import DecoderSpec
from quire.models.weights import canonical_name, check_names, check_shapes
from quire.platforms.interface import Platform, UploadStream
from quire.quantization.registry import linear_method
from quire.timeline import STARTUP

logger = init_logger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "dummy")
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model that can run, the backend that its pages belong to, and why that one."""

    model: Decoder
    backend: AttentionBackend
    selection: Selection

    def explain(self) -> dict[str, Any]:
        """For `quire explain`."""
        return {"reasons": dict(self.selection.reasons), "model": self.model.describe()}


def build_spec(config: EngineConfig) -> DecoderSpec:
    """The spec of the configured checkpoint.

    Raises:
        ConfigError: no spec for its architecture, or config.json lacks a field that the spec needs.
    """
    entry = ModelRegistry.resolve(config.model.architecture)
    try:
        spec = entry.make_spec(config.model.hf_config)
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"config.json does not fit {entry.architecture}: {error}", setting="model") from error
    return spec.without_windows() if config.model.disable_sliding_window else spec


def load_model(
    config: EngineConfig,
    platform: Platform,
    device: torch.device,
    max_tokens: int,
    max_logits: int,
    free_bytes: int | None = None,
) -> LoadedModel:
    """Build the model on a device and read its weights.

    Args:
        platform: its kernels are selected already; says which backends to ask and which type buffers have.
        max_tokens, max_logits: the largest step.
        free_bytes: device memory that weights and buffers may take; what cannot fit is refused before it is read.

    Raises:
        ConfigError: what cannot work, with the setting at fault.
    """
    with STARTUP.phase("model"):
        spec = build_spec(config)
        model, selection = build_model(config, spec, platform, device, max_tokens, max_logits)
        if free_bytes is not None:
            check_fit(model, free_bytes)
    with STARTUP.phase("weights") as phase:
        num_bytes = load_weights(model, config, platform.upload_stream(device))
    if num_bytes > GIB // 8 and phase.seconds:
        phase.note = f"{num_bytes / 1e9 / phase.seconds:.1f} GB/s"
    return LoadedModel(model, model.attention_backend, selection)


def build_model(
    config: EngineConfig,
    spec: DecoderSpec,
    platform: Platform,
    device: torch.device,
    max_tokens: int,
    max_logits: int,
) -> tuple[Decoder, Selection]:
    """A decoder without weights."""
    dtype = _torch_dtype(config.model.dtype, "dtype")
    cache_dtype = config.cache.cache_dtype
    kv_dtype = dtype if cache_dtype == "auto" else _torch_dtype(cache_dtype, "cache_dtype")
    plan = ParallelPlan(config.parallel.tensor_parallel_size, config.parallel.rank)
    requests = attention_requests(spec, kv_dtype, config.cache.block_size, plan, config.model.deterministic)
    selection = select_backend(requests, platform.attention_backends(), config.attention.backend)
    activation = platform.capabilities().activation_dtype.value
    model = Decoder(
        spec,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=config.cache.block_size,
        max_tokens=max_tokens,
        max_logits=max_logits,
        max_positions=config.model.max_model_len + config.scheduler.num_lookahead_slots,
        device=device,
        activation_dtype=dtype if activation == "model" else _torch_dtype(activation, "activation_dtype"),
        attention_backend=selection.backend(),
        linear_method=linear_method(config.model.quantization, config.model.hf_config),
        plan=plan,
        deterministic=config.model.deterministic,
    )
    return model, selection


def load_weights(model: Decoder, config: EngineConfig, uploads: UploadStream | None = None) -> int:
    """Read the weights as `load_format` says.

    Args:
        uploads: copies to a device that run beside the reading; None where weights are used where they lie.

    Returns:
        Bytes of the weights as they were stored.
    """
    load_format = config.load.load_format
    if load_format == "dummy":
        sources = model.sources.values()
        model.load_weights(dummy_weights(sources, model.spec, config.model.seed, model.dtype, model.device))
        return int(model.describe()["weight_bytes"])
    if load_format not in ("auto", "safetensors"):
        raise ConfigError(
            f"load_format={load_format!r} is not supported; allowed: {', '.join(LOAD_FORMATS)}", setting="load_format"
        )
    reader = SafetensorsReader(_weights_folder(config), config.load.ignore_patterns)
    check_checkpoint(model, reader.infos)
    if uploads is None:
        model.load_weights(reader.stream())
    else:
        model.load_weights(upload_tensors(reader, _wanted_rows(model, reader), uploads, model.device))
    logger.info("Read %.2f GiB of weights from %s", reader.num_bytes / GIB, reader.path)
    return reader.num_bytes


def _wanted_rows(model: Decoder, reader: SafetensorsReader) -> dict[str, list[slice]]:
    """Of each tensor of the checkpoint, the stretches of its first dimension that this rank keeps."""
    wanted: dict[str, list[slice]] = {}
    for name in reader.infos:
        source = model.sources.get(canonical_name(name, model.sources, model.spec))
        if source is not None:
            wanted[name] = [source.index(block)[0] for block in source.blocks]
    return wanted


def check_checkpoint(model: Decoder, infos: Mapping[str, TensorInfo]) -> None:
    """Compare headers with the spec before anything is read.

    Raises:
        ConfigError: lists missing and unexpected names, wrong shapes, or number types that are not plain floats.
    """
    check_names(model.sources, model.spec, infos.keys())
    check_shapes(model.sources, model.spec, {name: info.shape for name, info in infos.items()})
    wrong = [
        f"{name} is {info.dtype}"
        for name, info in infos.items()
        if info.dtype not in FLOATS and canonical_name(name, model.sources, model.spec) in model.sources
    ]
    if wrong:
        raise ConfigError(
            f"{len(wrong)} weights are not of a plain floating-point type ({', '.join(FLOATS)}): {', '.join(wrong[:5])}. "
            f"The checkpoint seems quantized, but config.json has no quantization_config",
            setting="model",
        )


def check_fit(model: Decoder, free_bytes: int) -> None:
    """Raises ConfigError with the numbers where weights and buffers need more than there is."""
    report = model.describe()
    weights, buffers = report["weight_bytes"], report["workspace_bytes"]
    if weights + buffers <= free_bytes:
        return
    setting = "model" if weights > free_bytes else "max_num_batched_tokens"
    raise ConfigError(
        f"the model needs {weights / GIB:.2f} GiB for its weights ({report['parameters'] / 1e6:.0f} M parameters as "
        f"{report['dtype']}) and {buffers / GIB:.2f} GiB for buffers, but {free_bytes / GIB:.2f} GiB are free: use a "
        f"smaller model or dtype, or lower max_num_batched_tokens or max_num_seqs",
        setting=setting,
    )


def _weights_folder(config: EngineConfig) -> str:
    """The folder with the weights: the model's, or for a hub id the same snapshot with its weights fetched."""
    model = config.model
    if os.path.isdir(os.path.expanduser(model.model)) or not _is_snapshot(model.path):
        return model.path
    return resolve_model_path(
        model.model,
        revision=model.revision,
        download_dir=config.load.download_dir,
        patterns=WEIGHT_PATTERNS,
        ignore_patterns=config.load.ignore_patterns,
    )


def _is_snapshot(path: str) -> bool:
    """Whether a folder is one of the hub client's snapshots (its configuration was fetched without the weights)."""
    return os.path.basename(os.path.dirname(path)) == "snapshots"


def _torch_dtype(name: str, setting: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{setting}={name!r} is not a torch dtype", setting=setting)
    return dtype
