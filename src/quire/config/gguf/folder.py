"""From a GGUF file to a folder as checkpoints are: config.json and the tokenizer's files, kept between runs.

The weights stay where they are; config.json's `quantization_config` names them.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from quire import envs
from quire.config.gguf.choice import first_files, parts_of
from quire.config.gguf.container import GGUFFile, read_header
from quire.config.gguf.model_config import build_config
from quire.config.gguf.tokenizer import build_tokenizer
from quire.errors import ConfigError
from quire.kept_files import write_whole

LAYOUT = 2
"""Raised when what is written changes, so that folders of earlier versions are not used."""
NO_TOKENIZER = "no_tokenizer.txt"
"""Why a file's tokenizer could not be written."""
BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that are better than what the GGUF file has of the same."""


def find_gguf(model: str) -> Path | None:
    """The (first) GGUF file that a file or folder means; None for a folder in the hub's layout, or none at all.
    Raises ConfigError: a folder with several models."""
    path = Path(model).expanduser()
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    firsts = first_files([file.name for file in path.glob("*.gguf")])
    if len(firsts) > 1:
        raise ConfigError(
            f"model={model!r} holds several models ({', '.join(firsts[:8])}); name one of these files", setting="model"
        )
    return path / firsts[0] if firsts else None


def gguf_folder(first: Path, beside: Path | None = None) -> str:
    """The folder for a GGUF file; written where it is not there yet, or the file has changed. `beside`: the folder with the
    files of `BESIDE`, if it is not the file's own.
    Raises ConfigError: the file is damaged, a part of a split one is missing, or the model is not supported."""
    paths = [file.resolve() for file in _parts(first)]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in paths]
    side = beside or first.parent
    times = [(name, (side / name).stat().st_mtime_ns) for name in BESIDE if (side / name).is_file()]
    key = hashlib.sha256(json.dumps([LAYOUT, stats, times]).encode()).hexdigest()[:24]
    folder = Path(envs.QUIRE_CACHE_ROOT) / "gguf" / f"{first.stem}-{key}"
    if not (folder / "config.json").is_file():
        files = [read_header(str(file)) for file in paths]
        config = build_config(files)
        folder.mkdir(parents=True, exist_ok=True)
        _write_tokenizer(folder, side, files[0])
        _write(folder / "config.json", config)  # last: its presence says that all is there
    return str(folder)


def _parts(first: Path) -> list[Path]:
    parts = [first.with_name(name) for name in parts_of(first.name)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        message = f"{first} is one of {len(parts)} files, of which {', '.join(missing[:5])} is missing"
        raise ConfigError(message, setting="model")
    return parts


def _write_tokenizer(folder: Path, beside: Path, file: GGUFFile) -> None:
    for name in BESIDE:
        if (beside / name).is_file():
            shutil.copyfile(beside / name, folder / name)
    if (folder / "tokenizer.json").is_file():
        return
    try:
        tokenizer, config = build_tokenizer(file)
    except ConfigError as error:  # told when a tokenizer is needed: there may be another one, or none
        (folder / NO_TOKENIZER).write_text(str(error), "utf-8")
        return
    _write(folder / "tokenizer.json", tokenizer)
    _write(folder / "tokenizer_config.json", config)


def _write(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, json.dumps(content, ensure_ascii=False).encode())
