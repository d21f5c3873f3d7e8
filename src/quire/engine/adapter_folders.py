"""What a frontend must know of an adapter before it is loaded: its virtual tokens, its vocabulary, and the tokenizer beside it.

Looks into a local folder, and again when its configuration changes; of an adapter that a hub has, nothing is known. Knows headers
of files; knows none of an adapter's numbers.
"""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

from quire.adapters import CONFIG, LoRARequest, read_config, virtual_tokens_of
from quire.config import ModelConfig
from quire.config.files import tensors_in
from quire.errors import ConfigError, refusing
from quire.guards import is_mapping
from quire.tokenizers.interface import Tokenizer
from quire.tokenizers.loader import get_tokenizer, has_tokenizer

_MOST_KNOWN = 4096
"""Adapters whose folders are remembered."""
_MOST_TOKENIZERS = 16
"""Tokenizers of adapters that are kept: each may take as much memory as the model's."""
_OF_TOKENS = ("embed", "lm_head", "wte", "trainable_tokens")
"""What is in names of tensors that have a row for each token, or for some."""


@dataclasses.dataclass(frozen=True)
class AdapterFolder:
    """What a folder says.

    Attributes:
        num_virtual: tokens that the adapter puts before prompts.
        num_tokens: that its requests may have.
        has_tokenizer: it brings its own tokenizer, and has rows of its own for tokens.
    """

    num_virtual: int
    num_tokens: int
    has_tokenizer: bool


class AdapterFolders:
    """Folders of adapters of one model."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        # What is remembered holds for a path and the time at which its configuration was written.
        self._folder = functools.lru_cache(_MOST_KNOWN)(self._look)
        self._tokenizer = functools.lru_cache(_MOST_TOKENIZERS)(self._open)

    def read(self, adapter: LoRARequest) -> AdapterFolder | None:
        """What is known of an adapter; None where there is no folder to look into. Raises RequestError: its files are damaged."""
        changed = _changed(adapter.lora_path)
        with refusing(ConfigError, param="lora_request"):
            return None if changed is None else self._folder(adapter.lora_path, changed)

    def tokenizer(self, adapter: LoRARequest) -> Tokenizer | None:
        """The adapter's own tokenizer; None: it has the model's. Raises RequestError: its files are damaged."""
        changed = _changed(adapter.lora_path)
        with refusing(ConfigError, param="lora_request"):
            if changed is None or not self._folder(adapter.lora_path, changed).has_tokenizer:
                return None
            return self._tokenizer(adapter.lora_path, changed)

    def _open(self, path: str, changed: int) -> Tokenizer:
        found = get_tokenizer(path, self._model.tokenizer_mode, chat_template=self._model.chat_template)
        found.content_format = self._model.chat_template_content_format
        return found

    def _look(self, path: str, changed: int) -> AdapterFolder:
        config, model = read_config(path), self._model
        own, shapes = model.own_vocab_size, _read_shapes(path)
        counts, given = [own], config.get("trainable_token_indices") or config.get("token_indices") or ()
        trained: list[Any] = list(given.values()) if is_mapping(given) else [given]
        counts += [token + 1 for ids in trained for token in ids or () if isinstance(token, int)]
        for name, shape in shapes.items():
            if name.endswith("_embeddings") and len(shape) == 2:  # rows of new tokens alone
                counts.append(own + shape[0])
            elif any(part in name for part in _OF_TOKENS) and len(shape) == 2:
                counts.append(shape["lora_embedding_A" in name])
        of_tokens = bool(given) or any(part in name for name in shapes for part in _OF_TOKENS)
        fitting = max(count for count in counts if count <= model.vocab_size)
        has_own = of_tokens and bool(model.tokenizer_path) and not model.skip_tokenizer_init and has_tokenizer(path)
        return AdapterFolder(virtual_tokens_of(config), fitting, has_own)


def _changed(path: str) -> int | None:
    """When a folder's configuration was written; None: there is none."""
    try:
        return os.stat(os.path.join(path, CONFIG)).st_mtime_ns
    except OSError:
        return None


def _read_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a folder's tensors, by name; of a damaged file there are none: who loads it says what is wrong."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            shapes |= {name: tuple(entry["shape"]) for name, entry in tensors_in(file).items()}
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return shapes
