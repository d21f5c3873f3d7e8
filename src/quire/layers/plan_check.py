"""What ranks cannot share or move, refused in words before anything is built."""

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.layers.parallel import ParallelPlan
from quire.models.spec import MLA, Attention, DecoderSpec, MoE

SETTING = "decode_context_parallel_size"


def check_split_context(config: EngineConfig, spec: DecoderSpec | None, plan: ParallelPlan) -> None:
    """Raises ConfigError: ranks cannot share the contexts of such a model, or not with such a setting."""
    refused = {
        "deterministic": config.model.deterministic,
        "kv_transfer_config": config.kv_transfer is not None,
        "speculative_config": config.speculative is not None and config.speculative.has_model,
    }
    for setting, is_asked in refused.items():
        if is_asked:
            raise ConfigError.of(SETTING, f"it does not go with {setting}: leave one of them out.")
    if spec is None or spec.encoder is not None:
        raise ConfigError.of(SETTING, f"{config.model.architecture} has no layers whose contexts ranks could share.")
    mixers = dict.fromkeys(mixer for layer in range(spec.layers) for mixer in spec.mixers_of(layer))
    shared = [mixer for mixer in mixers if not (type(mixer) is Attention and mixer.is_local)]
    if not shared:
        raise ConfigError.of(SETTING, "every layer of this model has a window, which each rank keeps whole.")
    for mixer in shared:
        if (why := _why_not(mixer)) is not None:
            raise ConfigError.of(
                SETTING,
                f"ranks share the contexts of plain causal attention and of latents only, and this model has {why}.",
            )
        kv_heads = mixer.kv_heads if isinstance(mixer, Attention) else 1  # all heads read one latent
        if plan.size % (kv_heads * plan.context):
            most = plan.size // kv_heads
            text = (
                f"it is {plan.context}; with tensor_parallel_size={plan.size} and {kv_heads} KV heads, {most or 1} ranks "
                "have the same KV head, and it is a divisor of that."
            )
            raise ConfigError.of(SETTING, text)


def check_split_prompts(config: EngineConfig, spec: DecoderSpec | None) -> None:
    """Raises ConfigError: ranks cannot share the prompts of such a model, or not with such a setting."""
    parallel, setting = config.parallel, "prefill_context_parallel_size"
    refused = {
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "enable_eplb": parallel.eplb is not None,
        "enable_lora": config.lora is not None,
        "kv_transfer_config": config.kv_transfer is not None,
        "speculative_config": config.speculative is not None and config.speculative.has_model,
    }
    for other, is_asked in refused.items():
        if is_asked:
            raise ConfigError.of(setting, f"it does not go with {other}: leave one of them out.")
    if spec is None or spec.encoder is not None or config.model.pooling is not None:
        raise ConfigError.of(setting, f"{config.model.architecture} has no prompts that ranks could share.")
    for mixer in dict.fromkeys(mixer for layer in range(spec.layers) for mixer in spec.mixers_of(layer)):
        if type(mixer) not in (Attention, MLA) or (isinstance(mixer, Attention) and not mixer.causal):
            why = (
                "layers that are not causal"
                if isinstance(mixer, Attention)
                else f"layers of kind {type(mixer).__name__}"
            )
            raise ConfigError.of(
                setting, f"ranks share prompts of causal attention and latents only; this model has {why}."
            )


def check_balanced(config: EngineConfig, spec: DecoderSpec | None, plan: ParallelPlan) -> None:
    """Raises ConfigError: experts of such a model cannot be moved between ranks, or not with such a setting."""
    mixtures = [] if spec is None else [mlp for mlp in spec.mlps() if isinstance(mlp, MoE)]
    if not mixtures:
        raise ConfigError.of("enable_eplb", f"{config.model.architecture} has no experts that ranks could move.")
    reasons = {
        "a single rank": plan.size * plan.copies == 1,
        "experts in a number format of their own (quantization)": config.model.quantization is not None,
        "enable_lora": config.lora is not None,
        "deterministic": config.model.deterministic,
        "experts that every token takes, or that have no matrices": any(
            mlp.always or mlp.zero_experts for mlp in mixtures
        ),
        "experts with limits of their own": any(
            mlp.clamp is not None and mlp.clamp.gate_limit is not None for mlp in mixtures
        ),
    }
    for reason, is_there in reasons.items():
        if is_there:
            raise ConfigError.of("enable_eplb", f"it does not go with {reason}.")


def _why_not(mixer: object) -> str | None:
    if type(mixer) is MLA:
        return "sinks" if mixer.sinks else None
    if type(mixer) is not Attention:
        return f"layers of kind {type(mixer).__name__}"
    limits = {
        "slopes": mixer.alibi,
        "layers that see items whole": mixer.sees_items,
        "layers that are not causal": not mixer.causal,
    }
    return next((name for name, has in limits.items() if has), None)
