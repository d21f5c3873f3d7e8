"""Resolves the user's settings, the model's files and the platform to the sections of an `EngineConfig`.

Each value that is derived comes with a note on where it came from. Knows no torch.
"""

import dataclasses
import enum
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from quire import envs
from quire.config import (
    CacheConfig,
    DeviceConfig,
    HFConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    SchedulerConfig,
    limits,
)
from quire.config.checks import check_keys, read_object
from quire.config.drafter import as_drafter, check_drafter, check_layout
from quire.config.generation import default_sampling, eos_token_ids, load_generation_config
from quire.config.hub import (
    DEMO_MODEL,
    FoundModel,
    built_in_folder,
    find_model,
    find_tokenizer,
    stored_types,
    with_outer_parts,
)
from quire.config.hub.listing import HubSettings
from quire.config.kv_transfer import extracted_layers
from quire.config.multimodal import read_limit, video_reading
from quire.config.observability import LoggingConfig
from quire.config.pooling import PoolingConfig, limit_length, resolve_pooling
from quire.config.resolve import load_hf_config, resolve_architecture, resolve_dtype, resolve_max_model_len
from quire.config.speculative import SpeculativeConfig, read_speculative_config
from quire.core.step_budget import PATIENCE_S
from quire.engine.copies_here import parallel_settings
from quire.engine.platform_settings import check_ranks, refuse_together, settle_settings
from quire.engine.settings import OTHER_FORMATS, SAME_FORMATS, SAME_HASHES, EngineSettings
from quire.engine.vllm_settings import LIST, NO_EFFECT
from quire.errors import ConfigError
from quire.guards import is_sequence
from quire.logger import init_logger, leave_logging_alone, use_log_config, use_log_format, use_log_level
from quire.media import MODALITIES
from quire.multimodal.encoder_half import HALVES
from quire.multimodal.processor import readable_modalities
from quire.platforms.host import usable_memory
from quire.platforms.interface import Capabilities, Platform


class UsageContext(enum.StrEnum):
    """The user of an engine."""

    LLM_CLASS = "offline"
    API_SERVER = "server"
    ENGINE_CONTEXT = "engine"

    @property
    def column(self) -> int:
        """Which of a platform's (offline, server) defaults applies."""
        return 0 if self is UsageContext.LLM_CLASS else 1


logger = init_logger(__name__)
SectionT = TypeVar("SectionT")
DEFAULT_BLOCK_SIZE = 16
MAX_ENCODER_BUDGET = 16384
ENCODED_TOGETHER = 8
"""Halves of prompts of the longest kind that an encoder beside a decoder reads in one step."""
"""Embeddings of media that a step may compute: as many as the largest image of Qwen2.5-VL has."""
STEP_FACTOR = 2.0
"""A prompt makes the steps of those who decode at most so many times longer, by default."""


def _demo_model() -> FoundModel:
    """The built-in demo model. Raises ConfigError if this installation has none."""
    if (folder := built_in_folder(DEMO_MODEL)) is None:
        raise ConfigError(
            "no model is named, and this installation has no built-in demo model: give model= a local folder or a hub id",
            setting="model",
        )
    return FoundModel(folder)


def section(kind: type[SectionT], args: object, **decided: Any) -> SectionT:
    """A section of the configuration: what was decided, and for the rest the settings that are called as its fields."""
    fields: Any = kind
    names = {field.name for field in dataclasses.fields(fields)} & vars(args).keys() - decided.keys()
    return kind(**{name: getattr(args, name) for name in names}, **decided)


def hub_settings(load: LoadConfig, revision: str | None) -> HubSettings:
    """How a hub is asked, as the settings of loading say."""
    return HubSettings(revision, load.download_dir, load.hf_token, load.load_format, load.ignore_patterns)


def _is_causal(model: ModelConfig) -> bool:
    return model.pooling is None or model.pooling.is_causal


@dataclasses.dataclass
class Resolver:
    """One resolution. `provenance` holds a note for each value that was derived: where it came from."""

    args: EngineSettings
    platform: Platform
    capabilities: Capabilities
    provenance: dict[str, str]
    usage_context: UsageContext

    def settle(self) -> dict[str, str]:
        """Find the model, and let the platform have its word on the settings; returns who set those that are not at their
        defaults. Raises ConfigError: the platform refuses one."""
        model = self.args.model
        self._found = _demo_model() if model is None else find_model(model, self._hub_settings())
        other = self.args.hf_config_path
        described = find_model(other, self._hub_settings()) if other else self._found
        self._hf_config = with_outer_parts(load_hf_config(described.path, self._hf_overrides()), self._hub_settings())
        self.args, set_by = settle_settings(self.args, self.platform, self._hf_config)
        check_ranks(self.args, self.platform)
        return set_by

    def model(self) -> ModelConfig:
        """After `settle`, as all others."""
        args, (path, hub), hf_config = self.args, self._found, self._hf_config
        tokenizer_path = self._tokenizer_path(path)
        far = functools.partial(stored_types, hub, self._hub_settings()) if hub is not None else None
        is_open = args.max_model_len in ("auto", -1)
        asked = args.max_model_len if isinstance(args.max_model_len, int) and not is_open else None
        length = resolve_max_model_len(
            asked, hf_config, tokenizer_path, disable_sliding_window=args.disable_sliding_window
        )
        generation = load_generation_config(args.generation_config, path)
        name = args.model or DEMO_MODEL
        architecture = resolve_architecture(hf_config)
        pooling = self._pooling(path, hf_config, architecture)
        can = self.capabilities
        dtype = resolve_dtype(args.dtype, hf_config, path, can.dtypes, far, can.narrows, pooling is not None)
        half = HALVES.get(architecture) if pooling is None else None
        if pooling is not None:
            length = limit_length(length, asked, pooling, hf_config)
        self.provenance["model.dtype"] = dtype.why
        self.provenance["model.max_model_len"] = f"what fits in memory, at most {length.why}" if is_open else length.why
        if args.model is None:
            self.provenance["model.model"] = "none was named: the built-in demo model"
        return section(
            ModelConfig,
            args,
            model=name,
            path=path,
            hf_config=hf_config,
            tokenizer=args.tokenizer or name,
            tokenizer_path=tokenizer_path or "",
            dtype=dtype.value,
            max_model_len=length.value,
            fits_max_model_len=is_open,
            architecture=architecture,
            eos_token_ids=self._eos_token_ids(hf_config, generation),
            default_sampling=default_sampling(generation, args.generation_config, args.override_generation_config),
            served_model_name=_several(args.served_model_name) or (name,),
            runner="generate" if pooling is None else "pooling",
            logits_processors=tuple(args.logits_processors or ()),
            hf_overrides={} if callable(args.hf_overrides) else dict(args.hf_overrides),
            override_generation_config=dict(args.override_generation_config),
            pooling=pooling,
            modalities=self._modalities(architecture, hf_config),
            encoder_length=0 if half is None else half.longest(hf_config),
            io_processor_plugin=args.io_processor_plugin,
            added_tokens=args.lora_extra_vocab_size if args.enable_lora else 0,
            hub=hub,
        )

    def _modalities(self, architecture: str, hf_config: HFConfig) -> tuple[str, ...]:
        """What prompts may have besides text: what the model reads, but for what the user turned off."""
        args = self.args
        if architecture in HALVES:
            return tuple({HALVES[architecture].modality} & MODALITIES.keys())
        if args.language_model_only or args.model_impl == "transformers":
            return ()
        readable = readable_modalities(architecture, hf_config)
        return tuple(name for name in readable if read_limit(args.limit_mm_per_prompt, name) != 0)

    def multimodal(self, model: ModelConfig) -> MultiModalConfig | None:
        """How media are read; None where none are."""
        takes_embeds = self.args.enable_prompt_embeds
        if takes_embeds and model.pooling is not None:
            raise ConfigError(
                "enable_prompt_embeds: a pooling model takes texts and token ids", setting="enable_prompt_embeds"
            )
        if model.is_encoder_decoder:
            self._check_encoder_decoder(model)
        elif not model.modalities and not takes_embeds:
            return None
        domains = self.args.allowed_media_domains
        limits_of = {name: read_limit(self.args.limit_mm_per_prompt, name) for name in self.args.limit_mm_per_prompt}
        budget = MAX_ENCODER_BUDGET if takes_embeds else min(MAX_ENCODER_BUDGET, model.max_model_len)
        if model.is_encoder_decoder:
            budget = max(model.encoder_length, min(MAX_ENCODER_BUDGET, ENCODED_TOGETHER * model.encoder_length))
        return MultiModalConfig(
            prompt_embeds=takes_embeds,
            mm_embeds=self.args.enable_mm_embeds,
            limit_mm_per_prompt={name: limit for name, limit in limits_of.items() if limit is not None},
            mm_processor_kwargs=dict(self.args.mm_processor_kwargs or {}),
            video_reading=video_reading(self.args.media_io_kwargs),
            mm_processor_cache_gb=float(self.args.mm_processor_cache_gb),
            mm_shm_cache_max_object_size_mb=self.args.mm_shm_cache_max_object_size_mb,
            allowed_local_media_path=self._media_folder(),
            allowed_media_domains=None if domains is None else _several(domains),
            encoder_budget=budget,
            encoder_cache_size=budget,
            mm_encoder_tp_mode=self.args.mm_encoder_tp_mode,
        )

    def _check_encoder_decoder(self, model: ModelConfig) -> None:
        """Raises ConfigError: a setting that a model with an encoder beside its decoder does not have."""
        args = self.args
        refused = {
            "enable_lora": args.enable_lora,
            "speculative_config": args.speculative_config is not None or args.spec_method is not None,
            "kv_transfer_config": args.kv_transfer_config is not None or args.kv_offloading_size is not None,
            "enable_prompt_embeds": args.enable_prompt_embeds,
            "pipeline_parallel_size": args.pipeline_parallel_size > 1,
            "swap_space": bool(args.swap_space),
        }
        why = f"{model.architecture}, which has an encoder beside its decoder: leave it out"
        refuse_together(refused, f"{{}} is not supported with {why}")

    def _media_folder(self) -> str:
        """The folder whose files requests may name, without links in its path."""
        given = self.args.allowed_local_media_path
        if given and not os.path.isdir(given):
            raise ConfigError.of("allowed_local_media_path", f"{given!r} is not a folder")
        return os.path.realpath(given) if given else ""

    def _pooling(self, path: str, hf_config: HFConfig, architecture: str) -> PoolingConfig | None:
        """How the model pools; None where it generates. `task` is an older spelling of `runner` and `convert`."""
        args = self.args
        runner, convert = args.runner, args.convert
        if args.task not in (None, "auto"):
            runner = "generate" if args.task == "generate" else "pooling"
            convert = args.task if args.task in ("embed", "classify", "reward") else convert
        if architecture in HALVES:
            if runner == "pooling":
                raise ConfigError.of("runner", f"'pooling' is not supported with {architecture}: use 'generate'")
            return None
        pooling = resolve_pooling(
            path, hf_config, architecture, runner=runner, convert=convert, pooler_config=args.pooler_config
        )
        tokens = hf_config.get("classifier_from_token")
        if pooling is not None and not pooling.embeds and is_sequence(tokens):
            pooling = dataclasses.replace(pooling, label_tokens=self._label_tokens(path, tokens))
        if pooling is not None:
            seen = f"{architecture} gives {pooling.tasks[0]}"
            self.provenance["model.runner"] = seen if runner == "auto" else "as asked"
        return pooling

    def _label_tokens(self, path: str, tokens: Sequence[Any]) -> tuple[int, ...]:
        """Ids of the tokens that `classifier_from_token` names. Raises ConfigError if the tokenizer does not have one."""
        from quire.tokenizers.loader import get_tokenizer

        tokenizer = get_tokenizer(self._tokenizer_path(path) or path, self.args.tokenizer_mode)
        ids = [tokenizer.token_to_id(str(token)) for token in tokens]
        if None in ids:
            message = f"classifier_from_token={list(tokens)}: the tokenizer has no {tokens[ids.index(None)]!r}"
            raise ConfigError(message, setting="hf_overrides")
        return tuple(token_id for token_id in ids if token_id is not None)

    def _hub_settings(self) -> HubSettings:
        memory = self.platform.memory_bytes()
        ranks = self.args.tensor_parallel_size * self.args.pipeline_parallel_size
        ranks *= self.args.data_parallel_size if self.args.enable_expert_parallel else 1  # copies may share experts
        settings = hub_settings(self.load(), self.args.revision)
        return dataclasses.replace(settings, max_weight_bytes=None if memory is None else memory * ranks)

    def _tokenizer_path(self, model_path: str) -> str | None:
        args = self.args
        if args.skip_tokenizer_init:
            return None
        if args.tokenizer is None and args.tokenizer_revision is None:
            return model_path
        name, revision = args.tokenizer or args.model, args.tokenizer_revision
        if name is None or (name == args.model and revision in (None, args.revision)):
            return model_path
        return find_tokenizer(name, hub_settings(self.load(), revision))

    def _hf_overrides(self) -> dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]:
        args = self.args
        rope: dict[str, Any] = {}
        if args.rope_scaling is not None:
            rope["rope_scaling"] = args.rope_scaling
        if args.rope_theta is not None:
            rope["rope_theta"] = args.rope_theta
        overrides = args.hf_overrides
        if callable(overrides):
            return lambda values: {**overrides(values), **rope}
        return {**overrides, **rope}

    def _eos_token_ids(self, hf_config: HFConfig, generation: dict[str, Any]) -> tuple[int, ...]:
        override = self.args.override_generation_config
        if override.get("eos_token_id") is not None:
            generation = {**generation, "eos_token_id": override["eos_token_id"]}
        ids = eos_token_ids(hf_config, generation)
        self.provenance["model.eos_token_ids"] = "config.json and generation_config.json together"
        return ids

    def cache(self, model: ModelConfig) -> CacheConfig:
        args = self.args
        block_size = args.block_size
        if block_size is None:
            align = self.capabilities.page_alignment
            block_size = -(-DEFAULT_BLOCK_SIZE // align.value) * align.value
            why = f"{DEFAULT_BLOCK_SIZE}, in steps of {align.value}: {align.why}; longer where layers keep states (see model)"
            self.provenance["cache.block_size"] = why
        if (ranks := args.decode_context_parallel_size) > 1:
            self.provenance["cache.block_size"] = f"{block_size} on each rank: {ranks} times as many tokens fit"
        window = model.hf_config.get("sliding_window")
        return section(
            CacheConfig,
            args,
            block_size=block_size * ranks,
            is_block_size_given=args.block_size is not None,
            swap_space=float(args.swap_space),
            cache_dtype=args.kv_cache_dtype,
            prefix_caching_hash_algo=SAME_HASHES.get(args.prefix_caching_hash_algo, args.prefix_caching_hash_algo),
            enable_prefix_caching=args.enable_prefix_caching is not False and _is_causal(model),
            sliding_window=window if isinstance(window, int) and not args.disable_sliding_window else None,
        )

    def parallel(self) -> ParallelConfig:
        split = envs.QUIRE_PP_LAYER_PARTITION if self.args.pipeline_parallel_size > 1 else ()
        return section(ParallelConfig, self.args, layer_split=tuple(split), **parallel_settings(self.args))

    def scheduler(self, model: ModelConfig) -> SchedulerConfig:
        args = self.args
        chunked = args.enable_chunked_prefill is not False and _is_causal(model)
        if not _is_causal(model):
            self.provenance["scheduler.enable_chunked_prefill"] = "every token sees every other: a prompt is one step"
        seqs = self._rows()
        return section(
            SchedulerConfig,
            args,
            max_num_batched_tokens=self._step_tokens(seqs, model.max_model_len, chunked),
            max_num_seqs=seqs,
            max_model_len=model.max_model_len,
            policy=args.scheduling_policy,
            enable_chunked_prefill=chunked,
            preemption_mode=self._preemption_mode(model),
            delay_factor=float(args.delay_factor),
            async_scheduling=self._async_scheduling(),
            num_stages=args.pipeline_parallel_size,
            **self._step_limit(chunked),
            **self._queue_bounds(seqs),
            record_timelines=args.record_timelines and self.usage_context is not UsageContext.LLM_CLASS,
        )

    def _step_limit(self, chunked: bool) -> dict[str, Any]:
        """How long prompts may make the steps of those who decode."""
        asked, least = self.args.max_step_ms, self.capabilities.min_prefill_tokens
        if asked != "auto":
            return {"max_step_ms": float(asked)}
        if self.usage_context is UsageContext.LLM_CLASS or not chunked:
            return {"max_step_ms": 0.0}
        why = f"{STEP_FACTOR:g} times a step without prompts, but at least {least.value} prompt tokens ({least.why})"
        self.provenance["scheduler.max_step_factor"] = (
            f"{why}; while requests wait for more than {PATIENCE_S:g} s, no limit"
        )
        return {"max_step_ms": 0.0, "max_step_factor": STEP_FACTOR, "min_prefill_tokens": least.value}

    def _queue_bounds(self, seqs: int) -> dict[str, Any]:
        """How long a server's queue may become. Offline, who queues is who waits: only the built-in limits hold."""
        args = self.args
        bounds: dict[str, Any] = {"request_timeout": float(args.request_timeout), "max_waiting_time": 0.0}
        if self.usage_context is UsageContext.LLM_CLASS:
            return bounds
        bounds["max_waiting_time"] = float(args.max_waiting_time)
        if not args.max_num_waiting:
            bounds["max_num_waiting"] = max(limits.MIN_NUM_WAITING, limits.WAITING_BATCHES * seqs)
            why = f"{limits.WAITING_BATCHES} times max_num_seqs, at least {limits.MIN_NUM_WAITING}"
            self.provenance["scheduler.max_num_waiting"] = why
        if not args.max_waiting_tokens:
            memory = usable_memory()[1]
            share = limits.WAITING_MEMORY_SHARE
            bounds["max_waiting_tokens"] = min(
                limits.DEFAULT_MAX_WAITING_TOKENS, int(memory * share) // limits.BYTES_PER_WAITING_TOKEN
            )
            why = f"{share:.0%} of {memory >> 30} GiB of memory, {limits.BYTES_PER_WAITING_TOKEN} bytes a token"
            self.provenance["scheduler.max_waiting_tokens"] = why
        return bounds

    def _rows(self) -> int:
        if self.args.max_num_seqs is not None:
            return self.args.max_num_seqs
        default = self.capabilities.max_num_seqs
        rows, tokens = default.value[self.usage_context.column], self.args.max_num_batched_tokens
        why = f"{self.usage_context.value} on {self.platform.name}: {default.why}"
        if tokens is not None and tokens < rows:
            rows, why = tokens, "max_num_batched_tokens: every running request needs one token of a step"
        self.provenance["scheduler.max_num_seqs"] = why
        return rows

    def _step_tokens(self, seqs: int, max_model_len: int, chunked: bool) -> int:
        asked = self.args.max_num_batched_tokens
        if asked is not None:
            if asked < seqs:
                raise ConfigError(
                    f"max_num_batched_tokens={asked} is less than max_num_seqs={seqs}: every running request needs one "
                    f"token of a step; raise the first or lower the second",
                    setting="max_num_batched_tokens",
                )
            if not chunked and asked < max_model_len:
                raise ConfigError(
                    f"max_num_batched_tokens={asked} is less than max_model_len={max_model_len}, and chunked prefill is "
                    f"off: a long prompt could never run; raise the first, lower the second or turn chunked prefill on",
                    setting="max_num_batched_tokens",
                )
            return asked
        default = self.capabilities.max_num_batched_tokens
        tokens = max(default.value[self.usage_context.column], seqs)
        why = f"{self.usage_context.value} on {self.platform.name}: {default.why}"
        if tokens == seqs:
            why = "max_num_seqs: one token each"
        if not chunked and tokens < max_model_len:
            tokens, why = max_model_len, "max_model_len: without chunked prefill a prompt takes one step"
        self.provenance["scheduler.max_num_batched_tokens"] = why
        return tokens

    def _preemption_mode(self, model: ModelConfig) -> Any:
        mode = self.args.preemption_mode
        if mode == "swap" and model.pooling is not None:
            message = "preemption_mode='swap' keeps pages, but not what a pooling model has summed up: use 'recompute'"
            raise ConfigError(message, setting="preemption_mode")
        if mode == "swap":
            swap = self.capabilities.swap
            if not swap.value:
                message = f"preemption_mode='swap' cannot run on the {self.platform.name} platform: {swap.why}"
                raise ConfigError(message, setting="preemption_mode")
            if self.args.swap_space <= 0:
                raise ConfigError(
                    f"preemption_mode='swap' needs swap_space above 0 (GiB of host memory), not {self.args.swap_space}",
                    setting="swap_space",
                )
        return mode or "recompute"

    def _async_scheduling(self) -> bool:
        if self.args.pipeline_parallel_size > 1:
            self.provenance["scheduler.async_scheduling"] = "a row waits for its token, while stages compute others"
            return False
        able = self.capabilities.async_output
        asked = self.args.async_scheduling
        if asked is None:
            self.provenance["scheduler.async_scheduling"] = able.why
            return able.value
        return asked

    def lora(self, model: ModelConfig) -> LoRAConfig | None:
        """Adapters; None: no request can have one. Raises ConfigError: they shall be of another type than the model."""
        asked = self.args.lora_dtype
        if asked not in ("auto", model.dtype):
            message = (
                f"lora_dtype={asked!r}: adapters' numbers are kept in the model's type, {model.dtype}; leave it out"
            )
            raise ConfigError(message, setting="lora_dtype")
        by_media = self.args.default_mm_loras or {}
        if by_media and not (self.args.enable_lora and by_media.keys() <= set(model.modalities)):
            can_read = " or ".join(model.modalities) or "nothing but text"
            message = (
                f"default_mm_loras names {', '.join(by_media)}: it needs enable_lora, and this model reads {can_read}"
            )
            raise ConfigError(message, setting="default_mm_loras")
        if not self.args.enable_lora:
            return None
        names = _several(self.args.lora_target_modules)
        return section(LoRAConfig, self.args, target_modules=names, default_mm_loras=by_media)

    def speculative(self, model: ModelConfig) -> SpeculativeConfig | None:
        args = self.args
        if extracted_layers(args.speculative_config) is not None:
            return None
        config = read_speculative_config(args.speculative_config, args.spec_method, args.spec_model, args.spec_tokens)
        if config is None or model.pooling is None:
            return config
        if config.method == "auto":
            self.provenance["speculative"] = "a pooling model gives no tokens that could be guessed"
            return None
        message = (
            f"speculative_config.method={config.method!r} cannot be used: a pooling model gives no tokens; leave it out"
        )
        raise ConfigError(message, setting="speculative_config")

    def drafter(self, model: ModelConfig, config: SpeculativeConfig | None) -> ModelConfig | None:
        """The model that guesses tokens for `model`; None where none does. Raises ConfigError: it cannot."""
        if config is None or not config.has_model:
            return None
        if model.modalities:
            raise ConfigError(
                f"speculative_config.method={config.method!r}: a model that guesses reads text only; use 'ngram', or "
                "language_model_only",
                setting="speculative_config",
            )
        check_layout(config, self.args.pipeline_parallel_size)
        if config.model is None:  # it is in the model's own checkpoint
            return model
        found = find_model(config.model, dataclasses.replace(self._hub_settings(), revision=config.revision))
        hf_config = load_hf_config(found.path, {})
        drafter = as_drafter(model, config, found.path, found.hub, hf_config, resolve_architecture(hf_config))
        check_drafter(drafter, model, config, self.args.tensor_parallel_size)
        return drafter

    def device(self) -> DeviceConfig:
        if self.args.device == "auto":
            why = "QUIRE_PLATFORM" if envs.QUIRE_PLATFORM else "the platform that answered for this machine"
            self.provenance["device.device"] = why
        return DeviceConfig(device=self.platform.name, cpu_threads=self.args.cpu_threads)

    def load(self) -> LoadConfig:
        asked = self.args.load_format
        if asked in OTHER_FORMATS:
            message = f"load_format={asked!r} is not read by Quire; it needs {OTHER_FORMATS[asked]}"
            raise ConfigError(message, setting="load_format")
        if asked in SAME_FORMATS:
            self.provenance["load.load_format"] = f"{asked}: read in one streaming pass, without that library"
        return section(
            LoadConfig,
            self.args,
            load_format=SAME_FORMATS.get(asked, asked),
            ignore_patterns=_several(self.args.ignore_patterns),
            model_loader_extra_config=dict(self.args.model_loader_extra_config),
        )


def attention_backend(asked: str | None, given: Mapping[str, Any] | None) -> str | None:
    """The backend that `attention_backend` or `attention_config` names.
    Raises ConfigError if they name two, or if the object has an unknown key."""
    values = {name: value for name, value in (given or {}).items() if value is not None}
    check_keys("attention_config", values, ("backend", *LIST["keys_without_effect"]["attention_config"]))
    for name in values.keys() - {"backend"}:
        logger.info("attention_config.%s has no effect: %s", name, NO_EFFECT["kernel_config"])
    backend = values.get("backend")
    if backend is None:
        return asked
    name = str(getattr(backend, "name", backend))  # a member of vLLM's enumeration has the name
    if asked not in (None, "auto", name):
        message = f"attention_backend={asked!r} and attention_config.backend={name!r} are one setting: give one of them"
        raise ConfigError(message, setting="attention_config")
    return name


def apply_logging(given: Mapping[str, Any]) -> None:
    """Set the log up as `logging_config` says, in this process and its children.
    Raises ConfigError if a key or a value is not known."""
    level = given.get("log_level")
    config = read_object(LoggingConfig, "logging_config", {**given, "log_level": level and str(level).upper()})
    if not config.configure_logging:
        leave_logging_alone()
        return
    if config.pylogging_config_file is not None:
        use_log_config(config.pylogging_config_file)
    if config.log_level is not None:
        use_log_level("DEBUG" if config.log_level == "NOTSET" else config.log_level)
    if config.formatter is not None:
        use_log_format(config.formatter)


def _several(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """One text, or some."""
    return (given,) if isinstance(given, str) else tuple(given or ())
