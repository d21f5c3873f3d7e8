"""The processors that lie beside a checkpoint's weights, read by Transformers: each once a process.

Importing Transformers' part for images takes seconds, in which no stream of a server gets a token: a server reads its processor
while the weights load (`read_ahead`), `LLM` with the first image or sound.
"""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from quire.config import EngineConfig
from quire.config.borrowed_sight import sees_through_transformers
from quire.config.hf_config import HFConfig
from quire.extras import install_command
from quire.logger import init_logger
from quire.media import AUDIO, IMAGE, VIDEO
from quire.multimodal.byte_pixels import BytePixels, leaves_bytes
from quire.multimodal.content import require_library
from quire.multimodal.image_families import FAMILIES
from quire.multimodal.own_processors import DeepseekTiles, GraniteFrames
from quire.multimodal.whole_processor import WholeProcessor, read_processor

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
def _read(kind: str, path: str, bins: int | None = None) -> Any:
    require_library("transformers", "audio" if kind == "sound" else "vision")
    if kind == "sound":
        from transformers import AutoFeatureExtractor, WhisperFeatureExtractor

        fields = _extractor_fields(Path(path))
        if bins is not None and not fields:
            return WhisperFeatureExtractor(feature_size=bins)
        if fields.get("feature_extractor_type") == "GraniteSpeechFeatureExtractor":
            return GraniteFrames(fields)
        return AutoFeatureExtractor.from_pretrained(path)
    own = Path(path) / "processor_config.json"
    fields = json.loads(own.read_bytes()) if own.exists() else {}
    if fields.get("processor_class") == "DeepseekVLV2Processor":
        return DeepseekTiles(fields)
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(path, backend="pil")
    except (ImportError, ValueError) as error:
        if "torchvision" in str(error).lower():
            raise ValueError(f"the model's processor needs torchvision: {install_command('vision')}") from None
        raise
    if kind == "whole":
        return read_processor(path, processor)
    is_torchvisions = any(base.__name__ == "TorchvisionBackend" for base in type(processor).__mro__)
    if is_torchvisions:
        return _WithTensors(processor)
    return BytePixels(processor) if leaves_bytes(processor) else processor


class _WithTensors:
    """A processor that there is with torchvision alone: its tensors as arrays."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, images: Any, *, return_tensors: str, **options: Any) -> Mapping[str, Any]:
        given = self._processor(images, return_tensors="pt", **options)
        return {name: (each.float() if each.is_floating_point() else each).numpy() for name, each in given.items()}


def _extractor_fields(folder: Path) -> dict[str, Any]:
    """The config of a checkpoint's feature extractor; Ultravox has none, and hears Whisper's frames."""
    own, whole = folder / "preprocessor_config.json", folder / "processor_config.json"
    fields = json.loads(whole.read_bytes()) if whole.exists() else {}
    found = fields.get("feature_extractor") or fields.get("audio_processor")
    return found or (json.loads(own.read_bytes()) if own.exists() else {})


def image_processor(path: str) -> ImageProcessor:
    """The checkpoint's image processor, which computes with PIL and NumPy."""
    with _READING:
        return _read("image", path)


def whole_processor(path: str) -> WholeProcessor:
    """The checkpoint's processor of images and text together."""
    with _READING:
        return _read("whole", path)


def feature_extractor(path: str, hf: HFConfig) -> FeatureExtractor:
    """The checkpoint's feature extractor, of sounds; `hf` tells the size of frames where it has none."""
    audio = hf.get("audio_config", HFConfig({}))
    with _READING:
        return _read("sound", path, audio.get("num_mel_bins"))


@cache
def video_options(path: str) -> dict[str, Any]:
    """The options of the checkpoint's video processor; without one, of its image processor."""
    for name in ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"):
        file = Path(path) / name
        found = json.loads(file.read_bytes()) if file.exists() else {}
        found = found.get("video_processor") if name.startswith("processor") else found
        if found:
            return {name: value for name, value in found.items() if value is not None}
    return {}


def read_ahead(config: EngineConfig) -> threading.Thread | None:
    """Read what the model's images or sounds need, in a thread that ends when it is there; None where they need nothing."""
    model = config.model
    if config.multimodal is None or not model.modalities:
        return None
    family = FAMILIES.get(model.architecture)
    is_borrowed = family is None and sees_through_transformers(model.architecture, model.hf_config)
    see = whole_processor if is_borrowed or (family is not None and family.is_whole) else image_processor
    readers = {IMAGE: see, VIDEO: video_options, AUDIO: partial(feature_extractor, hf=model.hf_config)}
    reads = [readers[modality] for modality in model.modalities]
    thread = threading.Thread(target=_try, args=(reads, model.path), name="processor-loader", daemon=True)
    thread.start()
    return thread


def _try(reads: Iterable[Callable[[str], object]], path: str) -> None:
    try:
        for read in reads:
            read(path)
    except Exception as error:  # the first request that needs it is told
        logger.warning("The model's processor could not be read: %s", error)
