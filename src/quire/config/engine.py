"""An engine's one frozen configuration and its sections; built once by `EngineArgs.create_engine_config`, read everywhere."""

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, Literal, Self

from quire.config.checks import FLAG, read_object, setting, whole
from quire.config.kv_events import KVEventsConfig
from quire.config.kv_transfer import KVTransferConfig
from quire.config.model import ModelConfig
from quire.config.multimodal import MultiModalConfig
from quire.config.observability import ObservabilityConfig, StructuredOutputsConfig
from quire.config.reasoning import ReasoningConfig
from quire.config.speculative import SpeculativeConfig
from quire.errors import ConfigError
from quire.plugins.registry import Registry

SETTING = "eplb_config"


@dataclasses.dataclass(frozen=True)
class EplbConfig:
    """How often experts are dealt anew, and by which load.

    Attributes:
        window_size: the last so many steps before are counted.
        num_redundant_experts: places beyond one for each expert, on all ranks together.
    """

    window_size: int = setting(1000, whole(1))
    step_interval: int = setting(3000, whole(1))
    num_redundant_experts: int = setting(0, whole(0))
    log_balancedness: bool = setting(False, FLAG)


def read_eplb_config(is_enabled: bool, given: Mapping[str, Any], has_ranks: bool) -> EplbConfig | None:
    """The settings; None where experts stay.
    Raises ConfigError: a key or a value that is none, or there are no ranks that have whole experts."""
    if not is_enabled:
        if given:
            raise ConfigError.of(SETTING, "it needs enable_eplb.")
        return None
    if not has_ranks:
        text = "experts are balanced over ranks that have some of them whole: it needs enable_expert_parallel and several ranks."
        raise ConfigError.of("enable_eplb", text)
    return read_object(EplbConfig, SETTING, given)


@dataclasses.dataclass(frozen=True)
class DeviceConfig:
    """`device`: `auto` or a platform's name. `cpu_threads`: worker threads on a CPU; 0 means all cores this process may use."""

    device: str = "auto"
    cpu_threads: int = 0


@dataclasses.dataclass(frozen=True)
class LoadConfig:
    """`load_format`: `auto`, `safetensors`, `pt` (pickled tensors), `dummy` (random weights from the seed). `hf_token`: the
    user's token at the hub; None or True means the one that the hub's client finds. `merge_lora`: an adapter that is added to the
    weights."""

    load_format: str = "auto"
    download_dir: str | None = None
    ignore_patterns: tuple[str, ...] = ()
    model_loader_extra_config: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    hf_token: str | bool | None = dataclasses.field(default=None, repr=False)
    merge_lora: str | None = None


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """`backend`: a backend's name, or None to let the platform choose. vLLM's names are accepted, too."""

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


SUMMED_EXPERTS = "allgather_reducescatter"
"""Each rank, which has all tokens, computes its own experts for all of them, and the parts are summed."""
TOKEN_EXCHANGES: Registry[Any] = Registry(
    "exchange of tokens", "all2all_backend", {"all_to_all": "quire.distributed.token_exchange:AllToAll"}
)
"""Subclasses of `quire.distributed.token_exchange.TokenExchange`, by the name that `all2all_backend` gives."""


def exchanges_tokens(backend: str) -> bool:
    """Whether an `all2all_backend` sends tokens to the ranks that have their experts."""
    return backend in TOKEN_EXCHANGES or ":" in backend


@dataclasses.dataclass(frozen=True)
class SharingCopies:
    """Copies of the model that share experts, as one of them knows them.

    Attributes:
        rendezvous: the address where their ranks meet.
        number: this copy's among them; `count`: how many they are.
        address: of this host, as other hosts' copies reach it; empty where all are here.
    """

    rendezvous: str
    number: int
    count: int
    address: str = ""


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout.

    Attributes:
        enable_expert_parallel: each worker has some experts whole, not a part of every expert.
        all2all_backend: how tokens get to these: a name of `TOKEN_EXCHANGES`, a class path, or another word for sums.
        distributed_executor_backend: None (in-process for one worker, else `mp`), `uni`, `mp` (a process a device), or a class.
        recovery: an engine core in a process of its own that dies is started again, and its requests go on; True asks for such
            a process, None takes what there is.
        spare_core: a process that has imported what a core needs waits for a death; None: for one device that is no CPU.
        decode_context_parallel_size: so many of the workers that have the same KV head share the tokens of each context.
        prefill_context_parallel_size: so many workers have the same part of each layer, and share the tokens of long prompts.
        prompt_part: which of these this worker is; set with the rank.
        eplb: how whole experts are moved to where the load is even; None: they stay.
        rank: which of the workers that share a layer this is; the executor sets it when it starts them.
        rendezvous: the address where these meet; set with the rank.
        data_parallel_size: copies of the model that this engine has.
        data_parallel_elsewhere: so many of them, the last ones, are on other hosts, which join at `data_parallel_address` and
            `data_parallel_rpc_port`.
        data_parallel_start: the number of the first of them among those of all engines.
        data_parallel_rank: which of this engine's copies this is; set when the copy starts.
        copies_everywhere: of the model, those of all engines.
        sharing: what a copy needs to know of those with which it shares experts; set when it starts.
        device_index: the worker's device among those that its process sees; None: as its number is among all workers.
        stage: which of the pipeline's stages it belongs to. `stage_rendezvous`: where stages meet; both set with the rank.
        nnodes: hosts among which the workers are divided, in their order. `node_rank`: which of them this one is; the first one
            has the engine, and the others come to it at `master_addr` and `master_port`.
        layer_split: how many layers each stage has (`QUIRE_PP_LAYER_PARTITION`); empty: about as many each.
    """

    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_elsewhere: int = 0
    data_parallel_address: str = ""
    data_parallel_rpc_port: int = 0
    enable_expert_parallel: bool = False
    all2all_backend: str = SUMMED_EXPERTS
    distributed_executor_backend: str | type[Any] | None = None
    worker_cls: str = "auto"
    disable_custom_all_reduce: bool = False
    recovery: bool | None = None
    spare_core: bool | None = None
    data_parallel_start: int = 0
    data_parallel_rank: int = 0
    copies_everywhere: int = 1
    sharing: SharingCopies | None = None
    rank: int = 0
    prompt_part: int = 0
    rendezvous: str = ""
    device_index: int | None = None
    stage: int = 0
    stage_rendezvous: str = ""
    layer_split: tuple[int, ...] = ()
    eplb: EplbConfig | None = None
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0

    @property
    def workers_per_node(self) -> int:
        """Workers of one engine on each host."""
        return self.world_size // self.nnodes

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return self.pipeline_parallel_size * self.stage_size

    @property
    def stage_size(self) -> int:
        """Workers of one stage."""
        return self.prefill_context_parallel_size * self.tensor_parallel_size

    @property
    def num_copies_here(self) -> int:
        """Copies on this host."""
        return self.data_parallel_size - self.data_parallel_elsewhere

    @property
    def num_devices(self) -> int:
        """Devices of all copies on this host together; those of one where there is none."""
        return self.workers_per_node * max(1, self.num_copies_here)

    @property
    def device_number(self) -> int:
        """This worker's number among those of all copies on this host."""
        return self.data_parallel_rank * self.world_size + self.world_rank % self.workers_per_node

    @property
    def copy_number(self) -> int:
        """This copy's number among those of all engines."""
        return self.data_parallel_start + self.data_parallel_rank

    @property
    def among_all(self) -> Self:
        """The same with the copies of all engines counted, as vLLM counts them."""
        count = max(self.copies_everywhere, self.data_parallel_size)
        return dataclasses.replace(
            self, data_parallel_size=count, data_parallel_rank=self.copy_number, data_parallel_start=0
        )

    @property
    def wish_for_processes(self) -> str | None:
        """The setting, with its value, for which a core needs a process of its own; None where none does."""
        if self.data_parallel_size > 1 or self.data_parallel_elsewhere:
            return f"data_parallel_size={self.data_parallel_size}"
        return "recovery=True" if self.recovery else None

    @property
    def world_rank(self) -> int:
        """This worker's number among all of the engine's."""
        return self.stage * self.stage_size + self.prompt_part * self.tensor_parallel_size + self.rank

    @property
    def is_last_stage(self) -> bool:
        """Whether this worker's stage gives logits."""
        return self.stage == self.pipeline_parallel_size - 1


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Scheduler settings.

    Attributes:
        max_num_batched_tokens: tokens a step.
        max_num_seqs: requests that may run at once.
        policy: `fcfs`, `priority` (lower first), `fair` (deficit round robin over tenants), or what a plugin adds.
        preemption_mode: `recompute` drops pages, `swap` moves them to host memory (needs swap_space).
        long_prefill_token_threshold: a prefill gets at most this many tokens a step; 0 means no limit.
        max_num_partial_prefills: prompts that may be part-way through their prefill at once; 0 means no limit.
        max_step_ms: size chunks so that a step is predicted to take at most this long; 0 turns it off.
        max_step_factor: the same, as a multiple of the step without prompts; 0 turns it off. While requests queue for long, it
            does not hold. `min_prefill_tokens`: so many prompt tokens may always join.
        async_scheduling: plan step N+1 before step N's tokens are known.
        num_stages: of the pipeline: as many steps are in flight, each with a part of the requests.
        max_num_waiting, max_waiting_tokens: bounds of the queue; 0 means the built-in limit.
        max_waiting_time: predicted seconds in the queue from which on it is full; 0 means no limit.
        request_timeout: seconds that any request may take in all; 0 means no limit.
        stream_interval: tokens of a stream that are sent together, after the first one.
        record_timelines: keep what happened to requests, for the console.
        watermark: share of all pages that stays free when a request starts beside others.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 4096
    policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    delay_factor: float = 0.0
    async_scheduling: bool = False
    num_stages: int = 1
    scheduler_cls: str | type[Any] | None = None
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 0
    max_step_ms: float = 0.0
    max_step_factor: float = 0.0
    min_prefill_tokens: int = 0
    max_num_waiting: int = 0
    max_waiting_tokens: int = 0
    max_waiting_time: float = 0.0
    request_timeout: float = 0.0
    stream_interval: int = 1
    record_timelines: bool = True
    watermark: float = 0.0

    @property
    def max_open_tokens(self) -> int:
        """Tokens for which a request may hold pages beyond what is collected: of the steps in flight."""
        return self.max_num_batched_tokens * self.depth

    @property
    def depth(self) -> int:
        """Steps that are in flight at most."""
        return max(2 if self.async_scheduling else 1, self.num_stages)


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """KV-cache settings.

    Attributes:
        block_size: tokens a page. `is_block_size_given`: the user set it; otherwise a model whose layers keep states may
            have longer pages.
        gpu_memory_utilization: share of the device's memory that the engine may use (on a CPU, of the host's free memory).
        kv_cache_memory_bytes: an explicit size for the cache; overrides the share.
        num_gpu_blocks_override: an explicit number of pages; overrides both.
        swap_space: GiB of host memory for swapped pages.
        cache_dtype: `auto` (the model's) or a torch dtype name.
        num_gpu_blocks: the number of pages, known once the engine has started.
        kv_cache_size_tokens, kv_cache_max_concurrency: known from then on, too: how many requests of `max_model_len` tokens fit
            into the cache at once, and their tokens together.
    """

    block_size: int = 16
    is_block_size_given: bool = True
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    swap_space: float = 0.0
    cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "blake2b"
    sliding_window: int | None = None
    num_gpu_blocks: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Adapters.

    Attributes:
        max_loras: adapters that steps can have at once; None: as many as rows.
        max_lora_rank: the largest rank that is taken; None: any, and there is room for what is loaded.
        max_cpu_loras: adapters that are kept on the host for their next use; None leaves it to the engine.
        fully_sharded_loras: accepted as in vLLM; ranks share updates as they share the matrices.
        lora_dtype: of adapters' numbers: the model's.
        target_modules: what adapters may change, by the ends of the matrices' names (or vLLM's names of several that are packed);
            none: everything.
        default_mm_loras: by modality, the folder or hub id of the adapter of a request that names none: the first one of whose
            modality its prompt has an item.
    """

    max_loras: int | None = None
    max_lora_rank: int | None = None
    max_cpu_loras: int | None = None
    fully_sharded_loras: bool = False
    lora_dtype: str = "auto"
    target_modules: tuple[str, ...] = ()
    default_mm_loras: dict[str, str] = dataclasses.field(default_factory=dict[str, str])

    def num_slots(self, max_num_seqs: int) -> int:
        """Adapters that can be on the device at once."""
        return self.max_loras or max_num_seqs

    def expected(self, max_num_seqs: int) -> tuple[int, int]:
        """For how many adapters, of which rank, memory is set aside; a guess where settings leave it open."""
        return self.max_loras or min(max_num_seqs, EXPECTED_ADAPTERS), self.max_lora_rank or EXPECTED_RANK


EXPECTED_ADAPTERS, EXPECTED_RANK = 8, 16


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Every decision, made before anything is built.

    Attributes:
        lora: None: no request can have an adapter.
        multimodal: None: no request can have media.
        drafter: the model that guesses tokens, if one does.
        kv_transfer: None: pages stay here.
        kv_events: None: nobody is told what the prefix cache has.
        instance_id: a short random id, in logs and metrics.
        provenance: for settings that were derived, `"scheduler.max_num_seqs" -> "why"`; `quire explain` prints it.
        set_by: for settings (fields of `EngineArgs`) that are not at their defaults, who set them: `user` or `platform NAME`.
    """

    model: ModelConfig
    cache: CacheConfig
    parallel: ParallelConfig
    scheduler: SchedulerConfig
    device: DeviceConfig
    load: LoadConfig
    attention: AttentionConfig
    observability: ObservabilityConfig
    structured_outputs: StructuredOutputsConfig = dataclasses.field(default_factory=StructuredOutputsConfig)
    reasoning: ReasoningConfig = dataclasses.field(default_factory=ReasoningConfig)
    lora: LoRAConfig | None = None
    multimodal: MultiModalConfig | None = None
    speculative: SpeculativeConfig | None = None
    drafter: ModelConfig | None = None
    kv_transfer: KVTransferConfig | None = None
    kv_events: KVEventsConfig | None = None
    instance_id: str = ""
    provenance: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    set_by: dict[str, str] = dataclasses.field(default_factory=dict[str, str])

    def settled(self, num_blocks: int, block_size: int, max_model_len: int, max_concurrency: float) -> Self:
        """The configuration with what is known once the core has started: the number of pages, the length that fits in them, and
        how many requests of that length fit at once."""
        cache = dataclasses.replace(
            self.cache,
            num_gpu_blocks=num_blocks,
            block_size=block_size,
            kv_cache_size_tokens=int(max_concurrency * max_model_len),
            kv_cache_max_concurrency=max_concurrency,
        )
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, max_model_len=max_model_len),
            cache=cache,
            scheduler=dataclasses.replace(self.scheduler, max_model_len=max_model_len),
        )

    def reading_from(self, path: str) -> Self:
        """The configuration with another folder that weights are read from."""
        load_format = "auto" if self.load.load_format == "dummy" else self.load.load_format
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, path=path),
            load=dataclasses.replace(self.load, load_format=load_format),
        )

    def of_drafter(self, drafter: ModelConfig, block_size: int) -> Self:
        """The configuration that a worker loads its drafter with: one rank (heads are laid out as their model is), and the pages
        of the model that it drafts for."""
        return dataclasses.replace(
            self,
            model=drafter,
            cache=dataclasses.replace(self.cache, block_size=block_size, is_block_size_given=True),
            parallel=ParallelConfig(),
            lora=None,
            multimodal=None,
            speculative=None,
            drafter=None,
        )

    @property
    def max_logits(self) -> int:
        """Tokens of a step that need logits, at most: one a row, and the drafts."""
        rows = self.scheduler.max_num_seqs
        return rows if self.speculative is None else rows + self.speculative.drafts_of_step(rows)

    # The names by which users of vLLM know the parts.
    model_config = property(operator.attrgetter("model"))
    cache_config = property(operator.attrgetter("cache"))
    parallel_config = property(operator.attrgetter("parallel.among_all"))
    scheduler_config = property(operator.attrgetter("scheduler"))
    device_config = property(operator.attrgetter("device"))
    load_config = property(operator.attrgetter("load"))
    attention_config = property(operator.attrgetter("attention"))
    observability_config = property(operator.attrgetter("observability"))
    speculative_config = property(operator.attrgetter("speculative"))
    structured_outputs_config = property(operator.attrgetter("structured_outputs"))
