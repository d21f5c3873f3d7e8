"""The engine's settings: a field for each, with its type, its default, the values it may have, and its help.

Flags, checks and `EngineArgs` come from these fields. What depends on the model or the device is checked where it is resolved.
"""

# ruff: noqa: RUF009  (`setting` makes the field)

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from quire.config import limits
from quire.config.checks import (
    FLAG,
    TEXT,
    Check,
    class_path,
    default_of,
    mapping,
    names_class,
    number,
    number_or,
    one_of,
    registered,
    setting,
    strings,
    whole,
    whole_or,
)
from quire.config.engine import SUMMED_EXPERTS, TOKEN_EXCHANGES
from quire.config.load_formats import LOAD_FORMATS, SPECIAL_FORMATS
from quire.config.resolve import DTYPE_NAMES
from quire.config.speculative import MOST_TOKENS
from quire.core.policies import POLICIES
from quire.errors import check_all
from quire.guards import is_mapping, is_sequence

TOKEN = Check("a token, or True for the stored one", lambda value: isinstance(value, str | bool))
PROCESSORS = Check(
    "a list of classes or of class paths such as 'package.module:Class'",
    lambda value: is_sequence(value) and all(names_class(item) for item in value),
)
DTYPE = Check(
    f"one of auto, {', '.join(DTYPE_NAMES)}",
    lambda value: str(value).removeprefix("torch.") in ("auto", *DTYPE_NAMES),  # torch's own object has such a name
)

SAME_FORMATS = {
    "fastsafetensors": "safetensors",
    "runai_streamer": "safetensors",
    "instanttensor": "safetensors",
    "npcache": "pt",
}
"""vLLM's load formats that differ in the library that reads the files; Quire reads them all in one streaming pass."""
SUMS = f"""{SUMMED_EXPERTS} naive pplx passthrough deepep_high_throughput deepep_low_latency deepep_v2 mori_high_throughput
mori_low_latency moonep nixl_ep flashinfer_all2allv flashinfer_nvlink_one_sided flashinfer_nvlink_two_sided""".split()
"""vLLM's other names of `all2all_backend`: it uses them for copies of a model that share experts."""
SAME_HASHES = {"sha256_cbor": "sha256", "xxhash": "blake2b", "xxhash_cbor": "blake2b"}
"""vLLM's names of hashes. Quire never pickles what it hashes, and its fast hash is blake2b."""
OTHER_FORMATS = {
    "tensorizer": "files of its own: save the model as safetensors",
    "runai_streamer_sharded": "shards of its own: save them with LLM.save_sharded_state and use 'sharded_state'",
    "ipc_cache": "a process that keeps weights: use 'auto'",
    "modelexpress": "a service that keeps weights: use 'auto'",
}
"""Load formats that Quire does not read, and what they need."""


@dataclasses.dataclass
class EngineSettings:
    """The fields of `EngineArgs`, named as in vLLM; None lets the engine decide."""

    model: str | None = setting(
        None,
        TEXT,
        "a local folder or a hub id; none, or quire-demo, means the built-in demo model "
        "(quire-demo-vision sees, quire-demo-speech hears)",
    )
    tokenizer: str | None = setting(None, TEXT, "folder or hub id of the tokenizer, if it is not the model's")
    tokenizer_mode: str = setting(
        "auto", one_of("auto", "hf", "slow", "mistral"), "auto, hf, slow or mistral (mistral-common)"
    )
    skip_tokenizer_init: bool = setting(False, FLAG, "token ids in, token ids out")
    dtype: str = setting("auto", DTYPE, "auto, float32, float16 or bfloat16")
    seed: int = setting(0, whole(0, 2**63 - 1), "seed of random weights and of requests without one")
    max_model_len: int | str | None = setting(
        None,
        whole_or("auto", -1, 1, limits.MAX_MODEL_LEN),
        "tokens a request may have in all, for example 32k; auto (or -1): as many as memory has room for",
    )
    served_model_name: str | list[str] | None = setting(
        None, strings("a name, or a list of names"), "names under which the server knows the model"
    )
    revision: str | None = setting(None, TEXT, "branch, tag or commit at the hub")
    tokenizer_revision: str | None = setting(None, TEXT, "branch, tag or commit of the tokenizer at the hub")
    hf_overrides: dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]] = setting(
        {}, mapping(function=True), "JSON object of values that replace those of config.json"
    )
    hf_config_path: str | None = setting(
        None, TEXT, "folder or hub id whose config.json takes the place of the model's"
    )
    rope_scaling: dict[str, Any] | None = setting(None, mapping(), "JSON object that replaces config.json's")
    rope_theta: float | None = setting(None, number(0.0, above=True), "replaces config.json's")
    quantization: str | None = setting(
        None, TEXT, "format of matrices: fp8, int8 and int4 round a plain checkpoint's at load; a stored one's is found"
    )
    model_impl: str = setting(
        "auto",
        one_of("auto", "quire", "vllm", "transformers"),
        "quire (a spec), transformers (its modules, our attention), or auto: a spec where there is one",
    )
    enforce_eager: bool = setting(False, FLAG, "record no steps")
    deterministic: bool = setting(
        False, FLAG, "a request's logits are the same to the bit alone and in any batch, at some cost in speed"
    )
    max_logprobs: int = setting(20, whole(-1), "most logprobs a request may ask for; -1 means the whole vocabulary")
    logprobs_mode: str = setting(
        "raw_logprobs",
        one_of("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
        "what logprobs are: raw_logprobs or processed_logprobs (after penalties and temperature), or logits in their place",
    )
    disable_sliding_window: bool = setting(False, FLAG, "limit max_model_len to the model's sliding window")
    generation_config: str = setting("auto", TEXT, "auto (the model's), quire (none), or a folder")
    override_generation_config: dict[str, Any] = setting({}, mapping(), "JSON object of sampling defaults")
    chat_template: str | None = setting(None, TEXT, "a file or a template, in place of the model's")
    chat_template_content_format: str = setting(
        "auto",
        one_of("auto", "string", "openai"),
        "how the template gets message contents: auto (detected), string, or openai (lists of parts)",
    )
    logits_processors: list[Any] | None = setting(None, PROCESSORS, "class paths of the engine's logits processors")
    runner: str = setting(
        "auto", one_of("auto", "generate", "pooling"), "auto, generate or pooling (embeddings, classes, scores)"
    )
    convert: str = setting(
        "auto",
        one_of("auto", "none", "embed", "classify", "reward"),
        "what a pooling model returns: auto (by its architecture), embed, classify or reward",
    )
    task: str | None = setting(
        None,
        one_of("auto", "generate", "embed", "classify", "score", "reward"),
        "older spelling of runner and convert: generate, embed, classify, score or reward",
    )
    pooler_config: dict[str, Any] | None = setting(
        None, mapping(), 'JSON object: how to pool, for example {"seq_pooling_type": "MEAN", "use_activation": false}'
    )
    io_processor_plugin: str | None = setting(
        None, TEXT, "name of an installed IO processor: an application's data in, its answers out (docs/plugins.md)"
    )
    structured_outputs_config: dict[str, Any] | None = setting(
        None, mapping(), 'JSON object: {"backend": "auto", "guidance" or "xgrammar", "disable_any_whitespace": true}'
    )
    reasoning_config: dict[str, Any] | None = setting(
        None,
        mapping(),
        "JSON object: reasoning_parser, reasoning_start_str, reasoning_end_str (forced when a thinking budget is spent)",
    )
    guided_decoding_backend: str | None = setting(None, TEXT, "older spelling of structured_outputs_config.backend")

    load_format: str = setting(
        "auto",
        registered(LOAD_FORMATS, *SPECIAL_FORMATS, *SAME_FORMATS, *OTHER_FORMATS),
        "auto, safetensors, mistral, gguf, pt (pickled), sharded_state (saved by Quire) or dummy (random weights)",
    )
    download_dir: str | None = setting(None, TEXT, "where downloads are kept (HF_HOME)")
    hf_token: str | None = setting(
        None, TOKEN, "the user's token at the hub (HF_TOKEN, or `hf auth login`)", is_secret=True
    )
    ignore_patterns: list[str] | str | None = setting(
        None, strings("a file name pattern, a list of them, or None"), "file name patterns neither to read nor to fetch"
    )
    model_loader_extra_config: dict[str, Any] = setting({}, mapping(), "JSON object for the loader of load_format")

    block_size: int | None = setting(None, whole(1, 4096), "tokens a KV-cache page (16)")
    gpu_memory_utilization: float = setting(
        0.9, number(0.0, 1.0, above=True), "share of the device's memory to use", aliases=("device_memory_utilization",)
    )
    kv_cache_memory_bytes: int | None = setting(None, whole(1), "size of the KV cache, for example 2G")
    num_gpu_blocks_override: int | None = setting(None, whole(2, 2**31 - 1), "number of KV-cache pages")
    swap_space: float = setting(0.0, number(0.0), "GiB of host memory for swapped pages")
    kv_cache_dtype: str = setting(
        "auto",
        one_of("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3"),
        "auto (the model's), float32, float16, bfloat16, or fp8 (e4m3) on devices that have it",
        aliases=("cache_dtype",),
    )
    enable_prefix_caching: bool | None = setting(None, FLAG, "keep pages of finished prompts for reuse (on)")
    prefix_caching_hash_algo: str = setting(
        "blake2b",
        one_of("blake2b", "sha256", *SAME_HASHES),
        "blake2b or sha256; vLLM's sha256_cbor means sha256, xxhash and xxhash_cbor the faster one, blake2b",
    )
    kv_transfer_config: dict[str, Any] | None = setting(
        None,
        mapping(),
        "a connector for pages of elsewhere: kv_connector is memory, disk, lmcache, tcp, nccl, nixl, mooncake or a plugin's",
    )
    kv_offloading_size: float | None = setting(
        None, number(0.0, above=True), "GiB of host memory for computed pages: short for kv_connector memory"
    )
    kv_offloading_backend: str = setting("native", one_of("native"), "native: Quire's own host memory")
    kv_events_config: dict[str, Any] | None = setting(
        None,
        mapping(),
        "tell over ZMQ which pages the prefix cache has: enable_kv_cache_events, endpoint …; a JSON object",
    )

    pipeline_parallel_size: int = setting(1, whole(1), "ranks that share the layers, one after another")
    tensor_parallel_size: int = setting(1, whole(1), "ranks that share every layer")
    decode_context_parallel_size: int = setting(
        1, whole(1), "ranks with the same KV head that share the tokens of each context, so that more of them fit"
    )
    prefill_context_parallel_size: int = setting(
        1, whole(1), "ranks with the same part of each layer that share the tokens of long prompts"
    )
    data_parallel_size: int = setting(1, whole(1), "copies of the model, each with its own devices, behind one engine")
    data_parallel_rank: int | None = setting(
        None,
        whole(0),
        "the number of the one copy that this engine has; another load balancer has the others (external)",
    )
    data_parallel_start_rank: int | None = setting(
        None, whole(0), "the number of the first copy of this engine (hybrid), or of this host (headless)"
    )
    data_parallel_size_local: int | None = setting(
        None,
        whole(0),
        "how many of the copies this host has; the others join (`--headless`), or are another engine's (hybrid)",
    )
    data_parallel_address: str | None = setting(
        None, TEXT, "the head node's address, where other hosts join with their copies (127.0.0.1)"
    )
    data_parallel_rpc_port: int | None = setting(None, whole(1, 65535), "the port at that address (29550)")
    data_parallel_external_lb: bool = setting(False, FLAG, "this engine has one of the copies: see data_parallel_rank")
    data_parallel_hybrid_lb: bool = setting(
        False,
        FLAG,
        "this engine has some of the copies, and spreads its requests over them: see data_parallel_size_local",
    )
    nnodes: int = setting(1, whole(1), "hosts that share the ranks of one engine, or its copies, in their order")
    node_rank: int = setting(0, whole(0), "which of them this host is; all but the first run `quire serve --headless`")
    master_addr: str = setting("127.0.0.1", TEXT, "the first host's address, where the others join it")
    master_port: int = setting(29501, whole(1, 65535), "the port at that address")
    enable_expert_parallel: bool = setting(False, FLAG, "give each rank whole experts")
    enable_eplb: bool = setting(False, FLAG, "move whole experts between ranks to where the load is even")
    eplb_config: dict[str, Any] = setting(
        {}, mapping(), "window_size, step_interval, num_redundant_experts, log_balancedness; a JSON object"
    )
    all2all_backend: str = setting(
        SUMMED_EXPERTS,
        registered(TOKEN_EXCHANGES, *SUMS, paths=True),
        "how tokens get to whole experts: all_to_all sends each to those that it needs; other words send all to all (default)",
    )
    distributed_executor_backend: str | type[Any] | None = setting(
        None, class_path("uni", "mp", "ray", "external_launcher"), "uni, mp, ray, external_launcher or a class path"
    )
    worker_cls: str = setting("auto", class_path("auto"), "class path of the worker")
    recovery: bool | None = setting(
        None,
        FLAG,
        "start an engine core that died again; its requests continue (on for cores in a process of their own)",
    )
    spare_core: bool | None = setting(
        None,
        FLAG,
        "keep a process that has imported what the next engine core needs (on for one GPU; costs its host memory)",
    )
    disable_custom_all_reduce: bool = setting(False, FLAG, "use the collectives of the communication library alone")

    max_num_batched_tokens: int | None = setting(None, whole(1, 2**31 - 1), "tokens a step, for example 8k")
    max_num_seqs: int | None = setting(None, whole(1, 2**20), "requests that run at once")
    scheduling_policy: str = setting(
        "fcfs",
        registered(POLICIES, paths=True),
        "fcfs, priority or fair, a plugin's name, or a class path",
        aliases=("policy",),
    )
    enable_chunked_prefill: bool | None = setting(None, FLAG, "split long prompts over steps (on)")
    preemption_mode: str | None = setting(None, one_of("recompute", "swap"), "recompute or swap, when pages run out")
    delay_factor: float = setting(
        0.0,
        number(0.0),
        "wait this share of the last prefill's time before the next",
        aliases=("scheduler_delay_factor",),
    )
    async_scheduling: bool | None = setting(None, FLAG, "plan a step before the previous step's tokens are known")
    scheduler_cls: str | type[Any] | None = setting(None, class_path(), "class path of the scheduler")
    long_prefill_token_threshold: int = setting(0, whole(0), "most tokens a step for one prefill; 0 means no limit")
    max_num_partial_prefills: int = setting(
        0, whole(0), "prompts that may be part-way through at once; 0 means no limit"
    )
    max_step_ms: float | str = setting(
        "auto",
        number_or("auto", 0.0),
        "a step with a prompt is predicted to take at most this long; auto: in servers, twice as long as without; 0: any time",
    )
    watermark: float = setting(
        0.0, number(0.0, 1.0), "share of the KV-cache pages that stays free when a request starts beside others"
    )
    max_num_waiting: int = setting(
        0,
        whole(0),
        "requests that may wait before others are refused; 0: 16 times max_num_seqs, at least 1024",
        aliases=("max_num_queued_reqs",),
    )
    max_waiting_tokens: int = setting(
        0,
        whole(0),
        "prompt tokens that may wait before requests are refused; 0: what a part of the host's memory can hold",
        aliases=("max_num_queued_tokens",),
    )
    max_waiting_time: float = setting(
        300.0, number(0.0), "refuse requests that are predicted to wait longer than these seconds; 0: never"
    )
    request_timeout: float = setting(
        0.0, number(0.0), "seconds after which any request ends with an error; 0: never. A request may name fewer"
    )
    stream_interval: int = setting(
        1, whole(1, 2**20), "tokens of a stream that are sent together, after the first one; a request may ask for more"
    )

    limit_mm_per_prompt: dict[str, Any] = setting(
        {}, mapping(), 'JSON object: most items of a modality in one prompt, for example {"image": 4}; 0: none is read'
    )
    allowed_local_media_path: str = setting(
        "", TEXT, "folder below which requests may name files as media (file:///…); none: no files are read"
    )
    allowed_media_domains: list[str] | str | None = setting(
        None,
        strings("a host, a list of hosts, or None"),
        "the only hosts from which media are fetched, also private ones (none: any host of the public internet)",
    )
    enable_prompt_embeds: bool = setting(False, FLAG, "take prompts that are embeddings in the place of tokens")
    enable_mm_embeds: bool = setting(
        False, FLAG, "take images that are embeddings, made before, in the place of pixels"
    )
    language_model_only: bool = setting(False, FLAG, "read no media, and load no weights that only media need")
    media_io_kwargs: dict[str, Any] = setting(
        {},
        mapping(),
        'JSON object: which frames of video files are read, for example {"video": {"num_frames": 32, "fps": 2}}',
    )
    mm_processor_kwargs: dict[str, Any] | None = setting(
        None, mapping(), 'JSON object: options of the model\'s media processor, for example {"max_pixels": 1003520}'
    )
    mm_processor_cache_gb: float = setting(
        4.0,
        number(0.0),
        "GiB of host memory in which processed media are kept for their next use, by all frontends; 0: none",
    )
    mm_encoder_tp_mode: str = setting(
        "weights",
        one_of("weights", "data"),
        "what ranks of tensor parallelism encode: weights (each of them every item) or data (each its share of the items)",
    )
    mm_shm_cache_max_object_size_mb: int = setting(
        128, whole(1, 2**20), "MiB of the largest item that several frontends keep (--api-server-count)"
    )

    enable_lora: bool = setting(False, FLAG, "take requests with adapters (LoRA)")
    max_loras: int | None = setting(
        None, whole(1, 2**16), "adapters that a step may have at once; none: as many as max_num_seqs"
    )
    max_lora_rank: int | None = setting(None, whole(1, 512), "largest rank of an adapter; none: any up to 512")
    max_cpu_loras: int | None = setting(None, whole(1), "adapters kept in host memory for their next use (64)")
    fully_sharded_loras: bool = setting(
        False, FLAG, "accepted as in vLLM; ranks always share updates as they share the matrices"
    )
    lora_target_modules: list[str] | None = setting(
        None, strings("a module's name, or a list of names"), "modules that adapters change, for example o_proj (all)"
    )
    lora_dtype: str = setting("auto", TEXT, "type of adapters' numbers; auto and the model's own can be served")
    lora_extra_vocab_size: int = setting(
        0,
        whole(0, 4096),
        "tokens that adapters may have beyond the model's own; each widens embedding and logits by a row",
    )
    default_mm_loras: dict[str, str] | None = setting(
        None,
        mapping(),
        'JSON object: the adapter of requests that name none, by what is in their prompts, for example {"image": FOLDER}',
    )
    merge_lora: str | None = setting(
        None,
        TEXT,
        "an adapter (folder or hub id) that is added to the weights as they are read; requests need not name it",
    )
    speculative_config: dict[str, Any] | str | None = setting(
        None,
        mapping("auto"),
        'auto, or a JSON object: {"method": "ngram", "num_speculative_tokens": 8} guesses tokens and verifies several a step',
    )
    spec_method: str | None = setting(None, TEXT, "speculative_config.method: ngram, draft_model …")
    spec_model: str | None = setting(None, TEXT, "speculative_config.model: the folder or hub id of a drafter")
    spec_tokens: int | None = setting(None, whole(1, MOST_TOKENS), "speculative_config.num_speculative_tokens")

    device: str = setting("auto", TEXT, "auto, cpu, or a platform plugin's name")
    cpu_threads: int = setting(0, whole(0, 2**16), "threads on a CPU; 0 means all cores this process may use")
    attention_backend: str | None = setting(
        None, TEXT, "auto (the platform chooses), triton, flash, flashinfer, cpu, reference, or a class path"
    )
    attention_config: dict[str, Any] | None = setting(
        None,
        mapping(),
        'JSON object: {"backend": "triton"} is --attention-backend; other keys of vLLM have no effect',
    )

    disable_log_stats: bool = setting(False, FLAG, "do not log statistics")
    log_stats_interval: float | None = setting(
        None, number(0.001), "seconds between two log lines with statistics (QUIRE_LOG_STATS_INTERVAL, 10)"
    )
    record_timelines: bool = setting(True, FLAG, "keep timelines of the last requests, for the console (on)")
    custom_histogram_buckets: dict[str, Any] | None = setting(
        None, mapping(), 'JSON object: bounds of metrics by family, for example {"request_latency": [0.1, 0.5, 1, 5]}'
    )
    otlp_traces_endpoint: str | None = setting(
        None, TEXT, "endpoint for OpenTelemetry spans of requests, for example http://localhost:4317"
    )
    profiler_config: dict[str, Any] | None = setting(
        None,
        mapping(),
        'JSON object: {"profiler": "torch", "torch_profiler_dir": FOLDER} lets /start_profile write traces',
    )
    logging_config: dict[str, Any] | None = setting(
        None, mapping(), 'JSON object: {"log_level": "DEBUG", "formatter": "json", "pylogging_config_file": FILE}'
    )


def check_settings(args: Any) -> None:
    """Check every field of a dataclass of settings by itself. Raises ConfigError for all values that are not valid."""
    fields = dataclasses.fields(args)
    check_all(partial(field.metadata["check"], field.name, getattr(args, field.name)) for field in fields)


def as_plain(value: Any) -> Any:
    """A config object (a dataclass, or one with `model_dump`) as a dict without its defaults; any other value unchanged."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {field.name: (getattr(value, field.name), default_of(field)) for field in dataclasses.fields(value)}
        return {name: each for name, (each, default) in given.items() if each is not None and each != default}
    dump = getattr(value, "model_dump", None)
    return dump(exclude_defaults=True) if callable(dump) else value


def normalise(args: Any) -> None:
    """Bring the values of a dataclass of settings to their plain forms: objects as dicts, paths as text, and None as the default
    if the setting always has an object."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if value is None and (callable(field.default_factory) or field.name == "seed"):  # vLLM's seed used to be None
            value = default_of(field)
        elif isinstance(value, os.PathLike):
            value = os.fspath(cast("os.PathLike[str]", value))
        elif field.metadata["check"].is_object and not is_mapping(value):
            value = as_plain(value)
        setattr(args, field.name, value)
