"""Which files of a checkpoint are needed: one rule for a folder's reader and for what is fetched from a hub.

Knows file names. Knows nothing of networks, and opens no file.
"""

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Sequence

from quire.errors import ConfigError
from quire.guards import is_dict

CONFIG, PARAMS = "config.json", "params.json"
INDEX_NAME = "model.safetensors.index.json"
PICKLED_INDEX_NAME = "pytorch_model.bin.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DESCRIPTION = (
    "*.json",
    "*.txt",
    "*.jinja",
    "*.model",
    "*.model.v*",
    "*.tiktoken",
    "*.spm",
    "*.bpe",
    "*.codes",
    "additional_chat_templates/*.jinja",
    "[0-9]*_*/config.json",
)
"""A checkpoint's files beside its weights: configurations, tokenizers of every kind, chat templates, and the configurations of
sentence-transformers' modules."""
NOT_DESCRIPTION = ("*.index.json", "*_state.json", "*_results.json", "*requirements*.txt", "LICENSE*", "README*")
SECOND_COPY = ("consolidated*", "adapter_model*")
"""Weights beside the checkpoint's own: the same in their author's layout, or an adapter's."""
STATE = "*-rank-*-part-*.safetensors"
"""What `LLM.save_sharded_state` writes."""
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_TRAINING = ("training_args.bin", "optimizer*", "scheduler*", "rng_state*", "scaler*")
_MODULE_WEIGHTS = re.compile(r"\d+_\w+/[^/]+\.safetensors")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file's name fits one of some shell patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def description_files(names: Iterable[str]) -> list[str]:
    """Of a checkpoint's files, all but the weights and what no reader opens. Names in subfolders have slashes."""
    return [name for name in names if _is_description(name)]


def _is_description(name: str) -> bool:
    # fnmatch lets a star cross slashes: a pattern of the top folder must not find files below it.
    patterns = [pattern for pattern in DESCRIPTION if pattern.count("/") == name.count("/")]
    return matches(name, patterns) and not matches(name, NOT_DESCRIPTION)


def index_name(names: Iterable[str], load_format: str) -> str | None:
    """The file that lists the shards, if the checkpoint has one."""
    wanted = PICKLED_INDEX_NAME if load_format == "pt" else INDEX_NAME
    return wanted if wanted in set(names) and load_format not in ("sharded_state", "dummy") else None


def weight_files(
    names: Sequence[str],
    load_format: str,
    ignore_patterns: Sequence[str],
    read_index: Callable[[str], object],
    where: str,
) -> list[str]:
    """The files that hold the weights.

    Args:
        names: of all files of the checkpoint.
        read_index: gives the content of an index.
        where: what an error calls the place, a folder or a repository.

    Raises:
        ConfigError: there are none of this format, or the index is not valid, or names files that are missing.
    """
    if load_format == "dummy":
        return []
    top = sorted(name for name in names if "/" not in name)
    if load_format == "sharded_state":
        return [name for name in top if matches(name, (STATE,))]
    index = index_name(top, load_format)
    if index is not None:
        indexed = shards_of(read_index(index), index, where)
        check_shards(indexed, set(top), index, where)
        files = [file for file in indexed if not matches(file, ignore_patterns)]
    elif load_format == "pt":
        files = pickled_files(top, ignore_patterns, where)
    else:
        files = safetensors_files(top, ignore_patterns, where)
    if "modules.json" in top:
        files += sorted(name for name in names if _MODULE_WEIGHTS.fullmatch(name))
    return files


def shards_of(content: object, index: str, where: str) -> list[str]:
    """Files that an index names. Raises ConfigError if it is no index, or names a file outside of its folder."""
    weight_map = content.get("weight_map") if is_dict(content) else None
    if not is_dict(weight_map):
        raise ConfigError(f"{where}: {index} is not an index with a weight_map", setting="model")
    files = sorted({str(file) for file in weight_map.values()})
    outside = [file for file in files if os.path.basename(file) != file]
    if outside:
        raise ConfigError(f"{where}: {index} names a file outside its folder: {outside[0]!r}", setting="model")
    return files


def check_shards(files: Sequence[str], present: set[str], index: str, where: str) -> None:
    """Raises ConfigError if some of an index's files are missing."""
    missing = [file for file in files if file not in present]
    if missing:
        raise ConfigError(
            f"{where}: {index} names {len(missing)} of {len(files)} files that are not there: {', '.join(missing[:5])}; "
            f"download the checkpoint again",
            setting="model",
        )


def safetensors_files(names: Sequence[str], ignore_patterns: Sequence[str], where: str) -> list[str]:
    """Of a folder without an index. Raises ConfigError if it has none; the message says what it has instead."""
    files = [name for name in names if name.endswith(".safetensors") and not matches(name, ignore_patterns)]
    files = [name for name in files if not matches(name, SECOND_COPY)] or files
    if files:
        return files
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if pickled:
        raise ConfigError(
            f"{where} has only pickled weights ({', '.join(pickled[:3])}); Quire reads safetensors unless it is "
            f"told otherwise: take a revision that has them, convert them with Transformers' save_pretrained, or say "
            f"load_format='pt' (tensors only, through PyTorch's restricted unpickler)",
            setting="load_format",
        )
    found = ", ".join(names[:8]) or "nothing"
    raise ConfigError(
        f"{where} has no *.safetensors (it holds {found}); load_format='dummy' runs random weights", setting="model"
    )


def pickled_files(names: Sequence[str], ignore_patterns: Sequence[str], where: str) -> list[str]:
    """Of a folder without an index. Raises ConfigError if it has none."""
    files = [
        name
        for name in names
        if name.endswith(_PICKLED[:3]) and not matches(name, (*_TRAINING, *SECOND_COPY, *ignore_patterns))
    ]
    if not files:
        raise ConfigError(f"load_format='pt', but {where} has no *.bin, *.pt or *.pth", setting="load_format")
    return files
