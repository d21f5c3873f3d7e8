"""The processors that lie beside a checkpoint's weights, read by Transformers: each once a process.

Importing Transformers' part for images takes seconds, in which no stream of a server gets a token: a server reads its processor
while the weights load (`read_ahead`), `LLM` with the first image or sound.
"""

import os
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol

from quire.config import EngineConfig
from quire.logger import init_logger

logger = init_logger(__name__)

_READING = threading.Lock()


class ImageProcessor(Protocol):
    """What is used of Hugging Face's image processors."""

    def __call__(self, images: Any, *, return_tensors: str, **options: Any) -> Mapping[str, Any]: ...


class FeatureExtractor(Protocol):
    """What is used of Hugging Face's feature extractors."""

    sampling_rate: int

    def __call__(self, raw_speech: Any, *, sampling_rate: int, return_tensors: str, **options: Any) -> Any: ...


@cache
def _read(kind: str, path: str) -> Any:
    if kind == "sound":
        from transformers import AutoFeatureExtractor

        return AutoFeatureExtractor.from_pretrained(path)
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(path, backend="pil")


def image_processor(path: str) -> ImageProcessor:
    """The checkpoint's image processor, which computes with PIL and NumPy."""
    with _READING:
        return _read("image", path)


def feature_extractor(path: str) -> FeatureExtractor:
    """The checkpoint's feature extractor, of sounds."""
    with _READING:
        return _read("sound", path)


def read_ahead(config: EngineConfig) -> threading.Thread | None:
    """Read what the model's images or sounds need, in a thread that ends when it is there; None where they need nothing."""
    model = config.model
    is_listening = model.is_encoder_decoder and os.path.exists(os.path.join(model.path, "preprocessor_config.json"))
    if config.multimodal is None or not (is_listening or (model.modalities and not model.is_encoder_decoder)):
        return None
    read = feature_extractor if is_listening else image_processor
    thread = threading.Thread(target=_try, args=(read, model.path), name="processor-loader", daemon=True)
    thread.start()
    return thread


def _try(read: Callable[[str], object], path: str) -> None:
    try:
        read(path)
    except Exception as error:  # the first request that needs it is told
        logger.warning("The model's processor could not be read: %s", error)
