"""A GGUF file in a repository of the hub, as its users name it: `owner/name:Q4_K_M`, or `owner/name/folder/file.gguf`.

Knows names. Downloads through what it is given.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.config.gguf.folder import BESIDE, SPLIT
from quire.errors import ConfigError

TYPED = re.compile(r"([\w.-]+/[\w.-]+):([A-Za-z0-9_.-]+)")
FILE = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")


def names_hub_file(model: str) -> bool:
    """Whether a name that is no path here means a GGUF file in a repository."""
    return not model.startswith((".", "/", "~")) and bool(TYPED.fullmatch(model) or FILE.fullmatch(model))


def download_gguf(model: str, download: Callable[[str, Sequence[str]], str]) -> Path:
    """The (first) file on this machine, after it was downloaded.

    Args:
        download: takes a repository and patterns of file names, gives the folder.

    Raises:
        ConfigError: the repository has no such file, or several.
    """
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
