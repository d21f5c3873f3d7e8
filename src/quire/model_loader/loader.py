"""From a configuration to a loaded model with its attention backend: spec, checks, then one pass over the weights.

Everything that can be refused is refused before a weight is read. Knows configuration and files; leaves shapes and
slices to `models/`, arithmetic to kernels.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch

from quire.attention.context_parallel import SplitContext
from quire.attention.interface import AttentionBackend
from quire.attention.paged import PagedBackend
from quire.attention.prompt_parallel import SplitPrompt
from quire.attention.selector import Selection, select_backend
from quire.config import EngineConfig
from quire.config.borrowed_sight import sees_through_transformers
from quire.config.hf_config import HFConfig
from quire.config.hub.outer_parts import FOLDERS
from quire.config.load_formats import LOAD_FORMATS
from quire.config.resolve import LAYOUT
from quire.distributed.communicator import Communicator, SingleRank
from quire.distributed.token_exchange import open_exchange
from quire.errors import ConfigError
from quire.layers.assembly import Sliceable
from quire.layers.decoder import Decoder, attention_requests
from quire.layers.interface import CausalLM, ModelContext
from quire.layers.linear import PLAIN, UnquantizedLinear
from quire.layers.parallel import ParallelPlan, StagePlan
from quire.layers.plan_check import check_balanced, check_split_context, check_split_prompts
from quire.layers.pooling.trunk import as_trunk, trunk_architectures
from quire.layers.spec_check import check_spec
from quire.layers.transformers_backend import TransformersModel, knows, refuse_other_kinds
from quire.layers.weights import cache_scales, canonical_name, check_names, check_shapes, is_cache_scale
from quire.logger import init_logger
from quire.lora.merging import merged
from quire.lora.method import adapted
from quire.model_loader.checkpoint import DTYPE_NAMES, PLAIN_DTYPES, OwnMemory, TensorInfo, WeightReader
from quire.model_loader.device_reader import upload_tensors
from quire.model_loader.dummy import dummy_weights
from quire.model_loader.gguf_reader import GGUFReader
from quire.model_loader.page_size import choose_block_size
from quire.model_loader.safetensors_reader import SafetensorsReader
from quire.model_loader.sharded_state import MAX_BYTES, PATTERN, copy_description, load_state, save_state
from quire.model_loader.towers import borrow_towers, build_decoder
from quire.model_loader.wrapped_readers import JoinedReader, MistralReader
from quire.models.patterns import text_only
from quire.models.registry import BESIDE_TRANSFORMERS, TRANSFORMERS, Entry, ModelRegistry
from quire.models.spec import DecoderSpec
from quire.models.text_part import knows_text
from quire.platforms.interface import Capabilities, Platform, UploadStream
from quire.quantization.method import QuantizedLinear
from quire.quantization.registry import linear_method
from quire.timeline import STARTUP

logger = init_logger(__name__)


FLOAT8_NAMES = ("fp8", "fp8_e4m3")
"""What kv_cache_dtype calls float8 e4m3."""
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model that can run, the backend that its pages belong to, and why that one."""

    model: CausalLM
    backend: AttentionBackend
    selection: Selection

    def explain(self) -> dict[str, Any]:
        """For `quire explain`."""
        return {"reasons": dict(self.selection.reasons), "model": self.model.describe()}


def resolve_entry(config: EngineConfig) -> Entry:
    """Who runs the configured checkpoint: its architecture's entry, or Transformers.

    Raises:
        ConfigError: neither can run it.
    """
    architecture, wanted = config.model.architecture, config.model.model_impl
    if wanted == "transformers":
        return Entry(architecture, TRANSFORMERS, "quire")
    try:
        return ModelRegistry.resolve(trunk_architectures(config.model))
    except ConfigError:
        if wanted != "auto":
            raise
        if sees_through_transformers(architecture, config.model.hf_config):
            half = BESIDE_TRANSFORMERS if knows_text(config.model.hf_config) else TRANSFORMERS
            return Entry(architecture, half, "quire")
        if not knows(config.model.hf_config):
            refuse_other_kinds(config.model.hf_config)
            raise
        logger.warning(
            "No spec for %s: Transformers' modules run it, with our attention; slower than a spec", architecture
        )
        return Entry(architecture, TRANSFORMERS, "quire")


def build_spec(config: EngineConfig, entry: Entry) -> DecoderSpec:
    """The spec of the configured checkpoint.

    Raises:
        ConfigError: config.json lacks a field that the spec needs, or has a number there that no model can have.
    """
    try:
        spec = entry.make_spec(config.model.hf_config)
    except ConfigError:
        raise
    except (AttributeError, TypeError, ValueError, LookupError, ZeroDivisionError) as error:
        zeros = [name for name, value in config.model.hf_config.to_dict().items() if value == 0 and value is not False]
        hint = f" (0 is the value of {', '.join(zeros)})" if isinstance(error, ZeroDivisionError) and zeros else ""
        raise ConfigError(f"config.json does not fit {entry.architecture}: {error}{hint}", setting="model") from error
    if (spec.vision is not None or spec.hearing is not None) and config.multimodal is None:
        spec = text_only(spec)
    if config.model.added_tokens:
        spec = with_added_tokens(spec, config.model.added_tokens)
    check_spec(spec, config.model.hf_config)
    if config.model.pooling is not None:
        spec = as_trunk(spec, config.model)
    return spec.without_windows() if config.model.disable_sliding_window else spec


def with_added_tokens(spec: DecoderSpec, count: int) -> DecoderSpec:
    """A copy with room for further tokens of adapters. Raises ConfigError: its tables of tokens cannot be longer."""
    if spec.normalized_head or spec.layer_input is not None:
        raise ConfigError(
            f"lora_extra_vocab_size={count}: this model's tables of tokens cannot have further rows",
            setting="lora_extra_vocab_size",
        )
    return dataclasses.replace(spec, vocab=spec.vocab + count, added_tokens=count)


def load_model(
    config: EngineConfig,
    platform: Platform,
    device: torch.device,
    max_tokens: int,
    max_logits: int,
    free_bytes: int | None = None,
    communicator: Communicator | None = None,
) -> LoadedModel:
    """Build the model on a device and read its weights.

    Args:
        platform: its kernels are selected already; says which backends to ask and which type buffers have.
        max_tokens, max_logits: the largest step.
        free_bytes: device memory that weights and buffers may take; what cannot fit is refused before it is read.
        communicator: this rank's word with the others; None for one rank.

    Raises:
        ConfigError: what cannot work, with the setting at fault.
    """
    with STARTUP.phase("model"):
        model, selection = build_model(config, platform, device, max_tokens, max_logits, communicator)
        if free_bytes is not None:
            check_fit(model, free_bytes)
    with STARTUP.phase("weights") as phase:
        num_bytes = load_weights(model, config, platform.upload_stream(device))
        model.post_load()
    if num_bytes > GIB // 8 and phase.seconds:
        phase.note = f"{num_bytes / 1e9 / phase.seconds:.1f} GB/s"
    return LoadedModel(model, model.attention_backend, selection)


def build_model(
    config: EngineConfig,
    platform: Platform,
    device: torch.device,
    max_tokens: int,
    max_logits: int,
    communicator: Communicator | None = None,
) -> tuple[CausalLM, Selection]:
    """A model without weights."""
    entry = resolve_entry(config)
    source = entry.load()
    dtype = _torch_dtype(config.model.dtype, "dtype")
    capabilities = platform.capabilities()
    kv_dtype = _cache_dtype(config.cache.cache_dtype, dtype, capabilities)
    parallel, communicator = config.parallel, communicator or SingleRank()
    sizes = (parallel.tensor_parallel_size, parallel.rank)
    redundant = None if parallel.eplb is None else parallel.eplb.num_redundant_experts
    copies = (1, 0) if parallel.sharing is None else (parallel.sharing.count, parallel.sharing.number)
    context_size = parallel.decode_context_parallel_size
    plan = ParallelPlan(*sizes, parallel.enable_expert_parallel, context_size, redundant, *copies)
    stage = StagePlan(parallel.stage, parallel.pipeline_parallel_size, parallel.layer_split)
    spec = None if isinstance(source, type) else build_spec(config, entry)
    if plan.context > 1:
        check_split_context(config, spec, plan)
    if communicator.prompts is not None:
        check_split_prompts(config, spec)
    if plan.redundant is not None:
        check_balanced(config, spec, plan)

    def select(block_size: int) -> Selection:
        needs = (kv_dtype, block_size // plan.context, plan, config.model.deterministic)
        if isinstance(source, type):
            requests = source.attention_requests(config.model.hf_config, *needs)
        else:
            requests = attention_requests(cast(DecoderSpec, spec), *needs)
        return select_backend(requests, platform.attention_backends(), config.attention.backend)

    selection = select(config.cache.block_size)
    method = linear_method(config.model.quantization, config.model.hf_config, capabilities)
    activation = capabilities.activation_dtype.value
    context = ModelContext(
        path=config.model.path,
        hf=config.model.hf_config,
        seed=config.model.seed,
        dtype=dtype,
        kv_dtype=kv_dtype,
        activation_dtype=dtype if activation == "model" else _torch_dtype(activation, "activation_dtype"),
        block_size=config.cache.block_size,
        max_tokens=max_tokens,
        max_logits=max_logits,
        max_positions=config.model.max_model_len,
        device=device,
        backend=open_backend(selection, plan, communicator),
        linear_method=method if config.lora is None else adapted(method),
        plan=plan,
        stage=stage,
        communicator=communicator,
        exchange=open_exchange(parallel, communicator),
        deterministic=config.model.deterministic,
    )
    if isinstance(source, type):
        if stage.count > 1:
            raise ConfigError(
                f"pipeline_parallel_size={stage.count}: {source.__name__} (for {config.model.architecture}) has no stages; use 1",
                setting="pipeline_parallel_size",
            )
        _refuse_stored_format(config, source)
        model = cast(Any, source)(context)
        if source is TransformersModel:
            model.towers = dict(borrow_towers(config, context))
        return model, selection
    spec = cast(DecoderSpec, spec)
    block_size = choose_block_size(spec, context, select, is_given=config.cache.is_block_size_given)
    if block_size != context.block_size:
        selection = select(block_size)
        context = dataclasses.replace(
            context, block_size=block_size, backend=open_backend(selection, plan, communicator)
        )
    slots = _torch_dtype(capabilities.slot_dtype.value, "slot_dtype")
    model = build_decoder(config, spec, context, platform, slots)
    _warn_of_experts(model, config.model.quantization)
    return model, selection


def open_backend(selection: Selection, plan: ParallelPlan, communicator: Communicator) -> AttentionBackend:
    """The chosen backend; over a part of each context where ranks share them."""
    backend = selection.backend()
    setting = "decode_context_parallel_size" if plan.context > 1 else "prefill_context_parallel_size"
    if plan.context == 1 and communicator.prompts is None:
        return backend
    if not isinstance(backend, PagedBackend) or "lse" not in inspect.signature(backend.forward).parameters:
        text = (
            f"the attention backend {backend.name!r} cannot attend to a part of a context: leave attention_backend out."
        )
        raise ConfigError.of(setting, text)
    if communicator.prompts is not None:
        return SplitPrompt(backend, communicator.prompts)
    return SplitContext(backend, communicator, plan.context)


def _refuse_stored_format(config: EngineConfig, source: type) -> None:
    section = config.model.hf_config.get("quantization_config")
    if isinstance(section, HFConfig):
        raise ConfigError(
            f"the checkpoint is stored as {section.get('quant_method')!r}, which {source.__name__} (for "
            f"{config.model.architecture}) cannot read: use the plain checkpoint",
            setting="quantization",
        )


def _warn_of_experts(model: Decoder, asked: str | None) -> None:
    method = model.linear_method
    if asked and any(
        method.stored(module.sources[0]) is PLAIN
        and not method.keeps_experts(module.sources[0], module.local_shape(model.plan)[1], model.dtype)
        for module in model.modules
        if module.kind == "experts" and module.columns
    ):
        logger.warning("Experts stay in the model's own type: quantization=%r covers the other matrices only", asked)


def load_weights(
    model: CausalLM, config: EngineConfig, uploads: UploadStream | None = None, *, copies: bool = False
) -> int:
    """Read the weights as `load_format` says.

    Args:
        uploads: copies to a device that run beside the reading; None where weights are used where they lie.
        copies: no weight is to lie in the files' own memory: they may be written anew.

    Returns:
        Bytes of the weights as they were stored.
    """
    load_format = config.load.load_format
    if config.load.merge_lora is not None and (
        not isinstance(model, Decoder) or load_format in ("sharded_state", "dummy")
    ):
        raise ConfigError("merge_lora needs a model with a spec, and a checkpoint's own weights", setting="merge_lora")
    if not isinstance(model, Decoder):
        return _load_class(model, config)
    if load_format == "sharded_state":
        model.take_weights(load_state(model, config.model.path))
        return int(model.describe()["weight_bytes"])
    if load_format == "dummy":
        model.load_weights(_random_weights(model, config))
        return int(model.describe()["weight_bytes"])
    reader = open_weights(config)
    check_checkpoint(model, reader.infos)
    if config.load.merge_lora is None:
        model.load_weights(read_tensors(model, reader, uploads, copies=copies))
    else:
        model.load_weights(merged(model, config.load, read_tensors(model, reader, None, copies=copies)))
    logger.info("Read %.2f GiB of weights from %s", reader.num_bytes / GIB, reader.path)
    for note in model.linear_method.notes():
        logger.warning("Of the checkpoint, %s", note)
    return reader.num_bytes


def read_tensors(
    model: Decoder, reader: WeightReader, uploads: UploadStream | None, *, copies: bool = False
) -> Iterator[tuple[str, Sliceable]]:
    """A checkpoint's tensors on their way to the model; see `load_weights`."""
    if uploads is not None and isinstance(reader, SafetensorsReader):
        return upload_tensors(reader, _wanted_rows(model, reader), uploads, model.device)
    tensors = with_progress(reader)
    return ((name, OwnMemory(tensor)) for name, tensor in tensors) if copies else tensors


def _random_weights(model: Decoder, config: EngineConfig) -> Iterator[tuple[str, Sliceable]]:
    return dummy_weights(model.sources.values(), model.spec, config.model.seed, model.dtype, model.device)


def save_sharded_state(
    model: CausalLM, config: EngineConfig, path: str, pattern: str | None, max_size: int | None
) -> list[str]:
    """Assemble the weights once more, each to be written as soon as it is finished; returns the files' names.

    Raises:
        ConfigError: the model is a class of its own, was loaded from such a state, or the files cannot be written.
    """
    is_parted = config.parallel.pipeline_parallel_size > 1
    if not isinstance(model, Decoder) or config.load.load_format == "sharded_state" or is_parted:
        raise ConfigError(
            "only a model with a spec, in one stage, that was loaded from a checkpoint can be saved",
            setting="load_format",
        )
    if config.load.load_format == "dummy":
        weights = _random_weights(model, config)
    else:
        weights = with_progress(open_weights(config))
        weights = weights if config.load.merge_lora is None else merged(model, config.load, weights)
    method = model.linear_method
    with method.keeping_layout() if isinstance(method, QuantizedLinear) else contextlib.nullcontext():
        files = save_state(model, model.assemble(weights), path, pattern or PATTERN, max_size or MAX_BYTES)
    if model.plan.rank == 0:
        copy_description(config.model.path, path)
    return files


def open_weights(config: EngineConfig) -> WeightReader:
    """The checkpoint's files, by `load_format`, with those of parts that are checkpoints of their own.

    Raises:
        ConfigError: an unknown format, or a folder that does not have it.
    """
    own, ignored = _own_weights(config), config.load.ignore_patterns
    folders = config.model.hf_config.to_dict().get(FOLDERS)
    if not folders:
        return own
    return JoinedReader(own, {prefix: SafetensorsReader(folder, ignored) for prefix, folder in folders.items()})


def _own_weights(config: EngineConfig) -> WeightReader:
    section = config.model.hf_config.get("quantization_config")
    if isinstance(section, HFConfig) and section.get("quant_method") == "gguf":
        return GGUFReader(config.model.hf_config)
    load_format = config.load.load_format
    if load_format == "gguf":
        raise ConfigError(
            f"load_format='gguf', but model={config.model.model!r} is neither a .gguf file nor a folder with one",
            setting="load_format",
        )
    LOAD_FORMATS.entry(load_format)  # or an error that names what there is
    folder, ignored = config.model.path, config.load.ignore_patterns
    if config.model.hf_config.get("weights_layout") == LAYOUT:
        return MistralReader(folder, ignored, config.model.hf_config)
    extra = config.load.model_loader_extra_config if load_format in LOAD_FORMATS.added() else {}
    return LOAD_FORMATS[load_format](folder, ignored, **extra)


def with_progress(reader: WeightReader) -> Iterator[tuple[str, Any]]:
    """The reader's tensors but for empty ones (experts of which there are none), with a bar on a terminal if they take longer
    than a moment."""
    from tqdm import tqdm

    bar: Any = tqdm(
        desc="Reading weights", total=reader.num_bytes, unit="B", unit_scale=True, delay=1.0, leave=False, disable=None
    )
    with bar:
        for name, tensor in reader.stream():
            if 0 not in reader.infos[name].shape:
                yield name, tensor
            bar.update(reader.infos[name].num_bytes)


def _load_class(model: CausalLM, config: EngineConfig) -> int:
    """A model that is a class of its own gets whole tensors."""
    if config.load.load_format == "dummy":
        model.load_dummy()
    else:
        model.load_weights((name, tensor[...]) for name, tensor in with_progress(open_weights(config)))
    return int(model.describe()["weight_bytes"])


def _wanted_rows(model: Decoder, reader: SafetensorsReader) -> dict[str, list[slice]]:
    """Of each tensor of the checkpoint, the stretches of its first dimension that this rank keeps."""
    wanted: dict[str, list[slice]] = {}
    for name, info in reader.infos.items():
        source = model.sources.get(canonical_name(name, model.sources, model.spec))
        whole = [slice(0, (*info.shape, 1)[0])]
        if source is not None:
            parts = [source.index(block) for block in source.blocks]
            wanted[name] = _merged([part[0] for part in parts]) if all(parts) else whole
        elif cache_scales(name, model.spec):
            wanted[name] = whole
    return wanted


def _merged(stretches: list[slice]) -> list[slice]:
    """The same in order, those that touch or overlap as one."""
    merged: list[slice] = []
    for stretch in sorted(stretches, key=lambda stretch: stretch.start):
        if merged and stretch.start <= merged[-1].stop:
            merged[-1] = slice(merged[-1].start, max(merged[-1].stop, stretch.stop))
        else:
            merged.append(stretch)
    return merged


def check_checkpoint(model: Decoder, infos: Mapping[str, TensorInfo]) -> None:
    """Compare headers with the spec before anything is read.

    Raises:
        ConfigError: lists missing and unexpected names, wrong shapes, or number types that are not plain floats.
    """
    model.follow_names(infos.keys())
    _check_twice(model, infos)
    check_names(model.sources, model.spec, [name for name, info in infos.items() if 0 not in info.shape])
    check_shapes(model.sources, model.spec, {name: info.shape for name, info in infos.items()})
    check_types(model, infos)
    num_cache_scales = sum(is_cache_scale(name) for name in infos)
    if num_cache_scales and model.kv_dtype != torch.float8_e4m3fn:
        logger.info(
            "The checkpoint's %d scales for keys and values are not used: they are for kv_cache_dtype='fp8'",
            num_cache_scales,
        )


def check_types(model: Decoder, infos: Mapping[str, TensorInfo]) -> None:
    """Raises ConfigError that lists tensors of another number type than the model's format has."""
    wrong: list[str] = []
    for name, info in infos.items():
        source = model.sources.get(canonical_name(name, model.sources, model.spec))
        if source is None:
            continue
        allowed = [DTYPE_NAMES[dtype] for dtype in source.stored.dtypes or PLAIN_DTYPES]
        if info.dtype not in allowed:
            wrong.append(f"{name} is {info.dtype}, not {' or '.join(allowed)}")
    if wrong:
        method = model.linear_method
        why = (
            "The checkpoint seems quantized, but config.json has no quantization_config"
            if method.name == UnquantizedLinear.name
            else f"config.json says that the checkpoint is stored as {method.name!r}"
        )
        raise ConfigError(
            f"{len(wrong)} weights have another type than they should: {', '.join(wrong[:5])}. {why}", setting="model"
        )


def _check_twice(model: Decoder, infos: Mapping[str, TensorInfo]) -> None:
    found: dict[str, str] = {}
    for name in infos:
        canonical = canonical_name(name, model.sources, model.spec)
        if canonical in model.sources and found.setdefault(canonical, name) != name:
            raise ConfigError(
                f"the checkpoint has {found[canonical]} (in {infos[found[canonical]].file}) and {name} (in {infos[name].file}), "
                f"which are the same weight: remove one of the files, or name it in ignore_patterns",
                setting="model",
            )


def check_fit(model: CausalLM, free_bytes: int, what: str = "are free") -> None:
    """Raises ConfigError with the numbers where weights and buffers need more than there is. `what`: that memory, in words."""
    report = model.describe()
    weights, buffers = report["weight_bytes"], report["workspace_bytes"]
    if weights + buffers <= free_bytes:
        return
    setting = "model" if weights > free_bytes else "max_num_batched_tokens"
    raise ConfigError(
        f"the model needs {weights / GIB:.2f} GiB for its weights ({report['parameters'] / 1e6:.0f} M parameters as "
        f"{report['dtype']}) and {buffers / GIB:.2f} GiB for buffers, but {free_bytes / GIB:.2f} GiB {what}: use a "
        f"smaller model or dtype, or lower max_num_batched_tokens or max_num_seqs",
        setting=setting,
    )


def _cache_dtype(name: str, dtype: torch.dtype, capabilities: Capabilities) -> torch.dtype:
    """Type of keys and values in their pages."""
    if name == "auto":
        return dtype
    if name not in FLOAT8_NAMES:
        return _torch_dtype(name, "kv_cache_dtype")
    if not capabilities.fp8.value:
        raise ConfigError(
            f"kv_cache_dtype={name!r} cannot run on this device: {capabilities.fp8.why}", setting="kv_cache_dtype"
        )
    return torch.float8_e4m3fn


def _torch_dtype(name: str, setting: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{setting}={name!r} is not a torch dtype", setting=setting)
    return dtype
