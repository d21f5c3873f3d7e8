"""The table of vLLM's modules: where Quire has their names, which of them run as programs, and why others are absent.

Plain text: importing it imports nothing of Quire's.
"""

_FACES = "quire.as_vllm.faces"
_PICTURES = "quire.as_vllm.pictures"
_LOGITS = "quire.as_vllm.logits"
_SLOTS = "quire.as_vllm.slot_logits"
_PARSERS = ("quire.parsers.plugin", "quire.as_vllm.parser_names", "quire.entrypoints.openai.protocol")
_CONFIG = ("quire.as_vllm.configs", "quire.config", "quire.config.speculative")
_CONFIG_PARTS = (
    "attention cache compilation device kernel kv_events kv_transfer load logging lora model multimodal observability "
    "parallel pooler profiler reasoning scheduler speculative structured_outputs vllm weight_transfer"
)

MODULES: dict[str, tuple[str, ...]] = {
    "vllm": (_FACES, "quire"),
    "vllm.version": ("quire.as_vllm.version",),
    "vllm.envs": ("quire.as_vllm.environment",),
    "vllm.logger": ("quire.logger",),
    "vllm.exceptions": ("quire.exceptions",),
    "vllm.inputs": ("quire.inputs",),
    "vllm.inputs.data": ("quire.inputs",),
    "vllm.outputs": ("quire.outputs",),
    "vllm.logprobs": ("quire.logprobs",),
    "vllm.sequence": ("quire.logprobs", "quire.outputs"),
    "vllm.sampling_params": (_FACES, "quire.sampling_params"),
    "vllm.pooling_params": ("quire.pooling_params",),
    "vllm.beam_search": ("quire.entrypoints.llm",),
    "vllm.config": _CONFIG,
    **{f"vllm.config.{part}": _CONFIG for part in _CONFIG_PARTS.split()},
    "vllm.engine.arg_utils": ("quire.engine.arg_utils",),
    "vllm.engine.async_llm_engine": ("quire",),
    "vllm.engine.llm_engine": ("quire.engine.llm_engine",),
    "vllm.v1.engine.async_llm": ("quire.engine.async_llm",),
    "vllm.v1.engine.llm_engine": ("quire.engine.llm_engine",),
    "vllm.v1.engine.exceptions": ("quire.exceptions",),
    "vllm.v1.metrics.reader": (_FACES, "quire.metrics.snapshot"),
    "vllm.v1.sample.logits_processor": (_LOGITS,),
    "vllm.v1.sample.logits_processor.interface": (_LOGITS,),
    "vllm.v1.sample.logits_processor.builtin": (_LOGITS,),
    "vllm.v1.worker.gpu.sample.logits_processor": (_SLOTS,),
    "vllm.v1.worker.gpu.sample.logits_processor.interface": (_SLOTS,),
    "vllm.entrypoints.llm": (_FACES, "quire.entrypoints.llm"),
    "vllm.entrypoints.cli.main": ("quire.entrypoints.cli.main",),
    **{
        f"vllm.{part}": _PARSERS
        for part in (
            *("tool_parsers", "tool_parsers.abstract_tool_parser", "reasoning", "reasoning.abs_reasoning_parsers"),
            *("reasoning.basic_parsers", "entrypoints.openai.tool_parsers", "entrypoints.openai.protocol"),
            *("entrypoints.openai.tool_parsers.abstract_tool_parser", "entrypoints.openai.engine.protocol"),
            "entrypoints.openai.chat_completion.protocol",
        )
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector": ("quire.hidden_states",),
    "vllm.lora.request": ("quire.adapters",),
    "vllm.lora.resolver": ("quire.lora.resolver",),
    "vllm.model_executor.models": ("quire.models.registry",),
    "vllm.model_executor.models.registry": ("quire.models.registry",),
    "vllm.model_executor.model_loader": (_FACES,),
    "vllm.plugins": ("quire.plugins",),
    "vllm.benchmarks.datasets": ("quire.as_vllm.sample_prompts",),
    "vllm.usage.usage_lib": ("quire.engine.arg_utils",),
    "vllm.tokenizers": (_FACES, "quire.tokenizers.loader"),
    "vllm.transformers_utils.tokenizer": (_FACES, "quire.tokenizers.loader"),
    "vllm.transformers_utils.repo_utils": (_FACES,),
    "vllm.platforms": (_FACES,),
    "vllm.distributed": (_FACES,),
    "vllm.distributed.parallel_state": (_FACES,),
    **{f"vllm.assets.{kind}": (_PICTURES,) for kind in ("audio", "image", "video")},
    **{f"vllm.multimodal.{part}": (_PICTURES,) for part in ("image", "media.audio", "utils")},
    "vllm.utils": (_FACES,),
    **{
        f"vllm.utils.{part}": (_FACES,)
        for part in ["argparse_utils", "gpu_sync_debug", "network_utils", "print_utils", "system_utils", "torch_utils"]
    },
}
"""vLLM's modules, and Quire's that have their names; the first one that has a name wins."""

PROGRAMS: dict[str, tuple[str, ...]] = {
    "vllm.entrypoints.openai.api_server": ("serve",),
    "vllm.entrypoints.openai.run_batch": ("run-batch",),
    "vllm.entrypoints.cli.main": (),
    "vllm.collect_env": ("collect-env",),
}
"""Modules that are run with `python -m`, and the words of Quire's command line that they mean."""

ABSENT: dict[str, str] = {
    "vllm.multimodal": "how models see is a table (docs/multimodal.md)",
    "vllm.distributed.kv_transfer": "KV connectors are classes of plugins (docs/kv_tiers.md)",
    "vllm.distributed.weight_transfer": "a trainer calls the engine's own methods or routes (docs/weights.md)",
    "vllm.model_executor": "a model is a description, and has no class (docs/models.md)",
    "vllm.attention": "attention backends have Quire's interface (docs/attention.md)",
    "vllm.v1.attention": "attention backends have Quire's interface (docs/attention.md)",
    "vllm.v1.spec_decode": "proposers have Quire's interface (docs/speculative_decoding.md)",
    "vllm.v1.watermarking": "there are no watermarks",
    "vllm.v1": "it is inside vLLM's engine; Quire's own is in docs/architecture.md",
    "vllm.parser": "a format is registered with quire.parsers (docs/tools.md)",
    "vllm.entrypoints": "the server's parts are Quire's own; start it with `quire serve`",
    "vllm.benchmarks": "`quire bench` measures (docs/benchmarks.md)",
    "vllm.ray": "--distributed-executor-backend ray places the workers (docs/distributed.md)",
}
"""Why modules and their names are absent: the longest beginning of a name that is here tells it."""


def why_absent(name: str) -> str:
    """A sentence about a name of vLLM's that Quire does not have."""
    found = max((start for start in ABSENT if f"{name}.".startswith(f"{start}.")), key=len, default="")
    return ABSENT.get(found, "it has no counterpart (docs/migrating-from-vllm.md)")
