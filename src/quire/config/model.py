"""Which model, and how it is read."""

import dataclasses
from typing import Any, Literal

from quire.config.hf_config import HFConfig
from quire.config.hub.listing import HubModel
from quire.config.pooling import PoolingConfig
from quire.errors import ConfigError

GEMMA3_VOCABULARY = 262208
"""What Gemma 3's configs mean where they leave it out."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model's settings after resolution.

    Attributes:
        model: what the user gave: a local folder or a hub id.
        path: the local folder that holds config.json (resolved; equal to `model` for a folder).
        hf_config: the checkpoint's config.json as attributes.
        dtype: torch's name of the weights' type: `float32`, `float16` or `bfloat16` (never `auto` here).
        max_model_len: tokens a request may have in all. `fits_max_model_len`: the user left it open; the engine lowers it to what
            fits in memory.
        eos_token_ids: every id that ends generation (config and generation config together).
        default_sampling: sampling defaults from the model's generation config.
        hf_overrides, rope_scaling, rope_theta: what the user asked for; `hf_config` has them in already (an override
            that is a function leaves no other trace).
        model_impl: the implementation: Quire's spec (`quire`, or `vllm`), Transformers, or the spec if there is one
            (`auto`).
        pooling: what prompts become; None for a model that generates.
        modalities: what prompts may have besides text.
        encoder_length: the longest that an encoder may read beside a prompt; 0: the model has none.
        added_tokens: rows of tokens that adapters may have, behind the checkpoint's.
        hub: where weights that are not in `path` yet are fetched from; None for a model of this machine.
    """

    model: str
    path: str
    hf_config: HFConfig
    tokenizer: str
    tokenizer_path: str
    dtype: str
    max_model_len: int
    architecture: str
    fits_max_model_len: bool = False
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    tokenizer_mode: str = "auto"
    seed: int = 0
    revision: str | None = None
    tokenizer_revision: str | None = None
    quantization: str | None = None
    model_impl: Literal["auto", "quire", "vllm", "transformers"] = "auto"
    enforce_eager: bool = False
    deterministic: bool = False
    max_logprobs: int = 20
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = "raw_logprobs"
    disable_sliding_window: bool = False
    skip_tokenizer_init: bool = False
    served_model_name: tuple[str, ...] = ()
    generation_config: str = "auto"
    runner: str = "auto"
    convert: str = "auto"
    logits_processors: tuple[Any, ...] = ()
    chat_template: str | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    hf_overrides: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    override_generation_config: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    pooling: PoolingConfig | None = None
    io_processor_plugin: str | None = None
    modalities: tuple[str, ...] = ()
    encoder_length: int = 0
    added_tokens: int = 0
    hub: HubModel | None = None

    @property
    def vocab_size(self) -> int:
        """Size of the embedding and of the logits."""
        return self.own_vocab_size + self.added_tokens

    @property
    def own_vocab_size(self) -> int:
        """The same of the checkpoint, which models that see have in `text_config`."""
        text = self.hf_config.get("text_config")
        for config in (self.hf_config, text):
            if isinstance(config, HFConfig):
                size = config.get("padded_vocab_size") or config.get("vocab_size")
                # Of Inkling: the rows of the head behind these are of no token.
                size = min(config.get("unpadded_vocab_size") or size, size) if size else size
                if size is not None:
                    return int(size)
        if self.hf_config.get("model_type") == "gemma3":
            return GEMMA3_VOCABULARY
        raise ConfigError("config.json names no vocab_size", setting="model")

    @property
    def returns_logits(self) -> bool:
        """Whether logits are returned in place of logprobs; a score cannot be computed from them."""
        return self.logprobs_mode.endswith("logits")

    # --- what programs written for vLLM read ---

    @property
    def hf_text_config(self) -> HFConfig:
        """The part of config.json that is about text; all of it where there is no other."""
        text = self.hf_config.get("text_config")
        return text if isinstance(text, HFConfig) else self.hf_config

    @property
    def architectures(self) -> list[str]:
        """The architectures that config.json names."""
        return list(self.hf_config.get("architectures") or [self.architecture])

    @property
    def runner_type(self) -> str:
        """`generate` or `pooling`."""
        return self.runner

    @property
    def is_multimodal_model(self) -> bool:
        """Whether requests may have media."""
        return bool(self.modalities)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether prompts have an encoder's half."""
        return self.encoder_length > 0

    def get_vocab_size(self) -> int:
        """As `vocab_size`."""
        return self.vocab_size

    def get_sliding_window(self) -> int | None:
        """Tokens that a sliding window covers, None where there is none."""
        window = self.hf_text_config.get("sliding_window")
        return window if isinstance(window, int) and not self.disable_sliding_window else None
