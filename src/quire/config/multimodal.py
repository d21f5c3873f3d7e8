"""How media of prompts are read and kept; for models that read any."""

import dataclasses
from typing import Any

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class MultiModalConfig:
    """Media settings, named as in vLLM.

    Attributes:
        limit_mm_per_prompt: most items of each modality in one prompt; a modality that is not named has no limit of its own.
        mm_processor_kwargs: options of the model's processor, for all requests.
        mm_processor_cache_gb: GiB of host memory in which a frontend keeps what it has processed; 0 keeps nothing.
        encoder_budget: embeddings that one step may compute; also the most that one item may have.
        encoder_cache_size: embeddings that a worker keeps.
        prompt_embeds: a prompt may consist of embeddings.
        mm_embeds: an image may be given as its embeddings.
        allowed_local_media_path: the folder whose files requests may name, with no link in its path; empty: none.
        allowed_media_domains: the only hosts from which media are fetched, private ones too; None: any public one.
    """

    limit_mm_per_prompt: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    mm_processor_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    mm_processor_cache_gb: float = 4.0
    encoder_budget: int = 16384
    encoder_cache_size: int = 16384
    prompt_embeds: bool = False
    mm_embeds: bool = False
    allowed_local_media_path: str = ""
    allowed_media_domains: tuple[str, ...] | None = None

    def limit_of(self, modality: str) -> int | None:
        """Most items of a modality in one prompt; None: any number."""
        return self.limit_mm_per_prompt.get(modality)
