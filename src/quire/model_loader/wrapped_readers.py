"""Readers around another one: a checkpoint together with those that are parts of it, and Mistral's file under the hub's names."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.config.hf_config import HFConfig
from quire.config.resolve import checkpoint_name
from quire.model_loader.checkpoint import WeightReader
from quire.model_loader.gguf_reader import heads_in_halves
from quire.model_loader.safetensors_reader import SafetensorsReader


class MistralReader(WeightReader):
    """A folder's weights in Mistral's own layout.

    Args:
        path: the folder.
        ignore_patterns: file names (shell patterns) that are not read.
        hf: the configuration that was made of params.json.

    Raises:
        ConfigError: as `SafetensorsReader`.
    """

    def __init__(self, path: str, ignore_patterns: Sequence[str], hf: HFConfig) -> None:
        self._inner = SafetensorsReader(path, ignore_patterns)
        self._heads = {
            "q_proj": hf.num_attention_heads,
            "k_proj": hf.get("num_key_value_heads", hf.num_attention_heads),
        }
        self.path = self._inner.path
        self.infos = {checkpoint_name(name): info for name, info in self._inner.infos.items()}

    def stream(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor), in the order in which they lie on the disk."""
        for stored, tensor in self._inner.stream():
            name = checkpoint_name(stored)
            module, _, suffix = name.rpartition(".")
            heads = self._heads.get(module.rpartition(".")[2]) if suffix in ("weight", "bias") else None
            yield name, tensor if heads is None else heads_in_halves(tensor[...], heads)


class JoinedReader(WeightReader):
    """The weights of several checkpoints.

    Args:
        own: the model's; of two tensors of one name, its is read.
        parts: by what their tensors' names begin with in the whole.
    """

    def __init__(self, own: WeightReader, parts: Mapping[str, WeightReader]) -> None:
        self._readers = {"": own, **parts}
        self.path, self.infos = own.path, {}
        for prefix, reader in self._readers.items():
            self.infos = {prefix + name: info for name, info in reader.infos.items()} | self.infos

    def stream(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor), one checkpoint after the other."""
        told = set[str]()
        for prefix, reader in self._readers.items():
            for name, tensor in reader.stream():
                if prefix + name not in told:
                    told.add(prefix + name)
                    yield prefix + name, tensor
