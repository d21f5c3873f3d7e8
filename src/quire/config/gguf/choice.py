"""Which of a repository's GGUF files a name means: `owner/name:Q4_K_M`, `owner/name/folder/file.gguf`, or `owner/name` where
there is one model.

Knows file names, and opens no file.
"""

import re
from collections.abc import Iterable, Sequence

from quire.errors import ConfigError

SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf$")
_TYPED = re.compile(r"([\w.-]+/[\w.-]+):([A-Za-z0-9_.-]+)")
_FILE = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")
_TYPE = re.compile(r"(?:^|[-._/])((?:UD-)?(?:IQ|TQ|Q)\d\w*|MXFP4\w*|NVFP4\w*|B?F16|F32)(?=[-._/])", re.IGNORECASE)


def split_name(model: str) -> tuple[str, str]:
    """The repository that a name means, and what of it: a type of numbers (`Q4_K_M`), a file, or an empty string for a name
    that is no GGUF file's."""
    if not model.startswith((".", "/", "~")):
        for pattern in (_TYPED, _FILE):
            if found := pattern.fullmatch(model):
                return found[1], found[2]
    return model, ""


def first_files(names: Iterable[str]) -> list[str]:
    """Of GGUF files, one for each model: itself, or the first of its parts. Encoders of pictures (mmproj) are none."""
    found = sorted(name for name in names if name.endswith(".gguf"))
    found = [name for name in found if (part := SPLIT.match(name)) is None or int(part[2]) == 1]
    return [name for name in found if not name.rpartition("/")[2].startswith("mmproj")] or found


def parts_of(first: str) -> list[str]:
    """The names of all parts of a file."""
    split = SPLIT.match(first)
    if split is None:
        return [first]
    return [f"{split[1]}-{number:05d}-of-{split[3]}.gguf" for number in range(1, int(split[3]) + 1)]


def choose_gguf(names: Sequence[str], repository: str, wanted: str) -> list[str]:
    """The file that is wanted, or its parts.

    Args:
        names: of the repository's files.
        wanted: as `split_name` gives it.

    Raises:
        ConfigError: there is no such file, there are several, or a part is missing.
    """
    firsts = first_files(names)
    if wanted.endswith(".gguf"):
        found = [name for name in names if name == wanted]
    elif wanted:
        found = [name for name in firsts if _has_type(name, wanted)]
    else:
        found = firsts
    if len(found) != 1:
        raise ConfigError(_refusal(repository, wanted, found, firsts), setting="model")
    parts = parts_of(found[0])
    missing = [name for name in parts if name not in names]
    if missing:
        message = f"model={repository!r}: {found[0]} is one of {len(parts)} files, of which {missing[0]} is missing"
        raise ConfigError(message, setting="model")
    return parts


def _has_type(name: str, wanted: str) -> bool:
    """Names end in the type, or their folder has it: x-Q4_K_M.gguf, x.q4_k_m.gguf, Q4_K_M/x-00001-of-00002.gguf."""
    pattern = rf"(.*[-._/])?{re.escape(wanted)}(-\d{{5}}-of-\d{{5}})?\.gguf|(.*/)?{re.escape(wanted)}/.*\.gguf"
    return re.fullmatch(pattern, name, re.IGNORECASE) is not None


def _refusal(repository: str, wanted: str, found: Sequence[str], firsts: Sequence[str]) -> str:
    named = (
        f"{repository}:{wanted}" if wanted and not wanted.endswith(".gguf") else f"{repository}/{wanted}".rstrip("/")
    )
    types = list(dict.fromkeys(match[1] for name in firsts if (match := _TYPE.search(name))))
    if found and wanted:
        return (
            f"model={named!r}: the repository has several such files ({', '.join(found[:8])}): name one, as "
            f"{repository}/{found[0]}"
        )
    if found:
        has = ", ".join(types or firsts[:8])
        example = f"{repository}:{types[0]}" if types else f"{repository}/{firsts[0]}"
        return f"model={named!r}: the repository holds {len(found)} GGUF models ({has}): name one, as {example}"
    has = f"it has {', '.join(types or firsts[:8])}" if firsts else "it has no GGUF file"
    return f"model={named!r}: the repository has no such file ({has})"
