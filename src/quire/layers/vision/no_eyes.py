"""Models of Transformers whose eyes are of the library timm, without these: their text and their ears need no timm.

Knows config classes. Knows no weights.
"""

import functools
from typing import Any


def is_timms(config: Any) -> bool:
    """Whether a model's eyes are timm's."""
    return hasattr(getattr(config, "vision_config", None), "architecture")


def without_timm(config: Any) -> Any:
    """The config, of whose model the eyes have no modules if they would be timm's."""
    if is_timms(config):
        eyes = config.vision_config
        config.vision_config = _blind(type(eyes)).from_dict(eyes.to_dict() | {"label_names": []})
    return config


@functools.cache
def _blind(kind: Any) -> Any:
    """A config class with the fields of this one, whose model is empty."""
    from transformers import AutoModel, PreTrainedModel

    config: Any = type("NoEyesConfig", (kind,), {"model_type": f"no_{kind.model_type}", "__module__": __name__})
    unread = {"_keys_to_ignore_on_load_unexpected": [r"\bvision_tower\."]}
    empty: Any = type("NoEyes", (PreTrainedModel,), unread | {"config_class": config, "__module__": __name__})
    AutoModel.register(config, empty)
    return config
