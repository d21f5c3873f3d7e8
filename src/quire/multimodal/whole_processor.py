"""Images of models that see through Transformers' own modules: their places in a prompt are what the checkpoint's processor
makes of one image.

The processor runs with a text that is one marker; what it puts in the marker's place is the item.
"""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.config.hf_config import HFConfig
from quire.multimodal.image_families import EMBEDDED, Arrays, Encode, Expansion, Family

TOKENS, PLACES = "input_ids", "places"
"""What an item has for the encoder besides what the processor gives: its tokens, and which of these are embeddings."""
_NO_INPUTS = ("attention_mask", "token_type_ids")


def read_processor(path: str, images: Any) -> "WholeProcessor":
    """The processor that lies in a folder, with this image processor, and without what reads videos and sounds."""
    from transformers.models.auto import processing_auto

    folder, files = Path(path), ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
    whole, *others = (json.loads(file.read_bytes()) if (file := folder / name).exists() else {} for name in files)
    model_type = json.loads((folder / "config.json").read_bytes()).get("model_type")
    named = [fields["processor_class"] for fields in (whole, *others) if "processor_class" in fields]
    usual: Any = getattr(processing_auto, "PROCESSOR_MAPPING_NAMES", {}).get(model_type, "")
    found: Any = processing_auto.processor_class_from_name([*named, usual][0])
    if found is None:
        raise ValueError(f"Transformers has no processor for model_type={model_type!r}")
    known = inspect.signature(found.__init__).parameters
    options = {name: value for name, value in whole.items() if name in known}
    for name in found.get_attributes():
        is_text = "tokenizer" in name  # what reads videos and sounds is not asked, only looked at
        options[name] = found._load_tokenizer_from_pretrained(name, path) if is_text else images
    lenient = type(found.__name__, (found,), {"check_argument_for_proper_class": lambda self, name, argument: None})
    return WholeProcessor(lenient(**options))


class WholeProcessor:
    """A checkpoint's processor of images and text."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    @property
    def marker(self) -> str:
        """What stands for an image in a text."""
        return str(self._processor.image_token)

    @property
    def token(self) -> int:
        """The marker's token."""
        return int(self._processor.tokenizer.convert_tokens_to_ids(self.marker))

    @property
    def begin(self) -> list[int]:
        """The token that its tokenizer has for a text's beginning, or else for its end."""
        tokenizer = self._processor.tokenizer
        token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        return [] if token is None else [int(token)]

    def number(self, before: list[int], number: int) -> list[int]:
        """The tokens before an image, of one that is not the first, where they name its number."""
        first, other = (self._numbered(each) for each in (0, number))
        return other + before[len(first) :] if first and before[: len(first)] == first else before

    def _numbered(self, number: int) -> list[int]:
        begin, end = (getattr(self._processor, f"image_id_{side}_token", None) for side in ("start", "end"))
        return (
            self._processor.tokenizer.encode(f"{begin}{number}{end}", add_special_tokens=False) if begin and end else []
        )

    def __call__(self, images: npt.NDArray[Any], **options: Any) -> Mapping[str, Any]:
        """What it gives for one image, each as a batch of one."""
        from PIL import Image

        options = {
            name: value for name, value in options.items() if name not in ("return_tensors", "input_data_format")
        }
        given = self._processor(
            images=[Image.fromarray(images)],
            text=[self.marker],
            return_tensors="pt",
            add_special_tokens=False,
            **options,
        )
        arrays = {name: np.asarray(value) for name, value in given.items() if name not in _NO_INPUTS}
        return {name: array[None] for name, array in arrays.items()}


def whole_family(processor: WholeProcessor) -> Family:
    """The rule that a processor is."""

    def expand(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
        tokens, token = arrays[TOKENS].reshape(-1), family.embedded_token(hf)
        places = np.flatnonzero(np.isin(tokens, [token, *(hf.to_dict().get("visual_indicator_token_ids") or ())]))
        if not len(places):
            raise ValueError(f"the processor puts no token {token} in the place of an image")
        first, end, ids = int(places[0]), int(places[-1]) + 1, tokens.tolist()
        own = ids[first:end]
        written = own if len(places) == len(own) else []
        own = [EMBEDDED if at in places else each for at, each in enumerate(own, first)]
        return Expansion(own, {**arrays, PLACES: places}, before=ids[:first], after=ids[end:], written=written)

    names = ("image_token_id", "image_token_index")
    family = Family(
        names, processor.token, expand, marker_text=processor.marker, is_whole=True, number=processor.number
    )
    return family
