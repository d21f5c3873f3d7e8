"""From a GGUF file to a folder as checkpoints are: config.json and the tokenizer's files, kept between runs.

The weights stay where they are; config.json's `quantization_config` names them. A file may also be one of a repository of the
hub, named `owner/name:Q4_K_M` or `owner/name/folder/file.gguf`.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire import envs
from quire.config.gguf.container import GGUFFile, read_header
from quire.config.gguf.model_config import build_config
from quire.config.gguf.tokenizer import build_tokenizer
from quire.errors import ConfigError

LAYOUT = 2
"""Raised when what is written changes, so that folders of earlier versions are not used."""
NO_TOKENIZER = "no_tokenizer.txt"
"""Why a file's tokenizer could not be written."""
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf$")
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""Files that are better than what the GGUF file has of the same."""


def find_gguf(model: str) -> Path | None:
    """The (first) GGUF file that a file or folder means; None for a folder in the hub's layout, or none at all.
    Raises ConfigError: a folder with several models."""
    path = Path(model).expanduser()
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    firsts = [
        file for file in sorted(path.glob("*.gguf")) if (part := SPLIT.match(file.name)) is None or int(part[2]) == 1
    ]
    if len(firsts) > 1:
        raise ConfigError(
            f"model={model!r} holds several models ({', '.join(file.name for file in firsts[:8])}); name one of these files",
            setting="model",
        )
    return firsts[0] if firsts else None


def gguf_folder(first: Path) -> str:
    """The folder for a GGUF file; written where it is not there yet, or the file has changed.
    Raises ConfigError: the file is damaged, a part of a split one is missing, or the model is not supported."""
    paths = [file.resolve() for file in _parts(first)]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in paths]
    beside = [(name, (first.parent / name).stat().st_mtime_ns) for name in BESIDE if (first.parent / name).is_file()]
    key = hashlib.sha256(json.dumps([LAYOUT, stats, beside]).encode()).hexdigest()[:24]
    folder = Path(envs.QUIRE_CACHE_ROOT) / "gguf" / f"{first.stem}-{key}"
    if not (folder / "config.json").is_file():
        files = [read_header(str(file)) for file in paths]
        config = build_config(files)
        folder.mkdir(parents=True, exist_ok=True)
        _write_tokenizer(folder, first.parent, files[0])
        _write(folder / "config.json", config)  # last: its presence says that all is there
    return str(folder)


def _parts(first: Path) -> list[Path]:
    split = SPLIT.match(first.name)
    if split is None:
        return [first]
    count = int(split[3])
    parts = [first.with_name(f"{split[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        message = f"{first} is one of {count} files, of which {', '.join(missing[:5])} is missing"
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
    """All of it or nothing, also with several processes at once."""
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    partial.replace(path)


TYPED = re.compile(r"([\w.-]+/[\w.-]+):([A-Za-z0-9_.-]+)")
FILE = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")


def names_hub_file(model: str) -> bool:
    """Whether a name that is no path here means a GGUF file in a repository."""
    return not model.startswith((".", "/", "~")) and bool(TYPED.fullmatch(model) or FILE.fullmatch(model))


def download_gguf(model: str, download: Callable[[str, Sequence[str]], str]) -> Path:
    """The (first) file on this machine, after it was downloaded. `download`: takes a repository and patterns of file names,
    gives the folder.
    Raises ConfigError: the repository has no such file, or several."""
    typed, named = TYPED.fullmatch(model), FILE.fullmatch(model)
    if typed:
        repository, wanted = typed.groups()
        # Names end in the type, or its folder has it: x-Q4_K_M.gguf, x.q4_k_m.gguf, Q4_K_M/x-00001-of-00002.gguf.
        spellings = dict.fromkeys((wanted, wanted.upper(), wanted.lower()))
        patterns = [
            pattern
            for spelling in spellings
            for pattern in (f"*[-._]{spelling}.gguf", f"*[-._]{spelling}-*-of-*.gguf", f"{spelling}/*.gguf")
        ]
        match = re.compile(
            rf"(.*[-._/])?{re.escape(wanted)}(-\d{{5}}-of-\d{{5}})?\.gguf|{re.escape(wanted)}/.*\.gguf", re.I
        )
    else:
        assert named
        repository, wanted = named.groups()
        split = SPLIT.match(wanted)
        patterns = [f"{split[1]}-*-of-{split[3]}.gguf" if split else wanted]
        match = re.compile(re.escape(wanted))
    folder = Path(download(repository, (*patterns, *BESIDE)))
    there = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.gguf"))
    found = [
        name for name in there if match.fullmatch(name) and ((part := SPLIT.match(name)) is None or int(part[2]) == 1)
    ]
    # Pictures' encoders stand beside the model, under the same type.
    found = [name for name in found if not Path(name).name.startswith("mmproj")] if typed else found
    if len(found) != 1:
        what = (
            f"several such files ({', '.join(found[:8])}): name one, as {repository}/{found[0]}"
            if found
            else "no such file"
        )
        known = f" (downloaded earlier: {', '.join(there[:8])})" if there and not found else ""
        raise ConfigError(f"model={model!r}: the repository {repository} has {what}{known}", setting="model")
    return folder / found[0]
