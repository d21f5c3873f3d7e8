"""Which models see through Transformers' own modules: those that it knows, and that Quire has no description of.

Knows names. Imports Transformers only for a model that may be one of them.
"""

from quire.config.hf_config import HFConfig

TEXT_ONLY = ("InklingForConditionalGeneration", "Step3p7ForConditionalGeneration")
"""Those whose text alone is read: their language models have specs, and Transformers' modules of them do not run on pages."""


def sees_through_transformers(architecture: str, hf: HFConfig) -> bool:
    """Whether Transformers has this architecture among those that read images and write."""
    if hf.get("vision_config") is None or architecture in TEXT_ONLY:
        return False
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    except ImportError:
        return False
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(hf.get("model_type", "")) == architecture
