"""What decode context parallelism does not go with, refused in words before anything is built."""

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.layers.parallel import ParallelPlan
from quire.models.spec import Attention, DecoderSpec

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
    for mixer in dict.fromkeys(mixer for layer in range(spec.layers) for mixer in spec.mixers_of(layer)):
        if (why := _why_not(mixer)) is not None:
            raise ConfigError.of(
                SETTING, f"ranks share the contexts of plain causal attention only, and this model has {why}."
            )
        assert isinstance(mixer, Attention)
        if plan.size % (mixer.kv_heads * plan.context):
            most = plan.size // mixer.kv_heads
            text = (
                f"it is {plan.context}; with tensor_parallel_size={plan.size} and {mixer.kv_heads} KV heads, {most or 1} ranks "
                "have the same KV head, and it is a divisor of that."
            )
            raise ConfigError.of(SETTING, text)


def _why_not(mixer: object) -> str | None:
    if type(mixer) is not Attention:
        return f"layers of kind {type(mixer).__name__}"
    limits = {
        "windows": mixer.window,
        "chunks": mixer.chunk,
        "sinks": mixer.sinks,
        "slopes": mixer.alibi,
        "layers that see items whole": mixer.sees_items,
        "layers that are not causal": not mixer.causal,
    }
    return next((name for name, has in limits.items() if has), None)
