"""Which models see through Transformers' own modules: those that it knows, and that Quire has no description of.

Knows names. Imports Transformers only for a model that may be one of them.
"""

from quire.config.hf_config import HFConfig

REFUSED: dict[str, str] = {}
"""By architecture: why it cannot be run in this way."""


def sees_through_transformers(architecture: str, hf: HFConfig) -> bool:
    """Whether Transformers has this architecture among those that read images and write."""
    if hf.get("vision_config") is None or architecture in REFUSED:
        return False
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    except ImportError:
        return False
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(hf.get("model_type", "")) == architecture
