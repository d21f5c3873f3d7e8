"""Says how many command lines of vLLM's documents and examples `quire serve` takes.

    python -m tools.vllm_commands PATH             of an unpacked source distribution of vLLM: counts, and what is absent most
    python -m tools.vllm_commands PATH --show      each line that is not taken, with its absent flags (also: --json FILE)

A line is *taken* if no flag of it is absent (`quire translate`). Lines that occur twice count once. Prose that has `vllm serve`
in it is left out: a line counts if a model or a flag follows.
"""

import argparse
import json
import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

FOLDERS = ("docs", "examples", "recipes", "benchmarks")
SUFFIXES = {".md", ".sh", ".yaml", ".yml", ".py"}
_START = re.compile(r"(?<![\w`/.-])vllm serve[ \\]")
_MOST_LINES = 60


def command_lines(root: Path) -> list[str]:
    """Each different line once, in order."""
    found: dict[str, None] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                text = re.sub(r"\\\n\s*(#|//)?", " ", path.read_text("utf-8", errors="replace"))
                lines = (_one_line(_quoted(text, match.start())) for match in _START.finditer(text))
                found |= dict.fromkeys(line for line in lines if line)
    return list(found)


def _quoted(text: str, start: int) -> str:
    """The text from there on; of a command within quotes, the text up to their end."""
    quote = text[start - 1 : start]
    return text[start : text.find(quote, start)] if quote and quote in "'\"" else text[start:]


def _one_line(text: str) -> str:
    """A command from its beginning: to the end of the line, or of a quoted value that goes over lines."""
    lines = text.split("\n")
    for count in range(1, min(len(lines), _MOST_LINES) + 1):
        line = "\n".join(lines[:count]).partition("```")[0].rstrip().rstrip("`\"'" if count == 1 else "")
        try:
            words = shlex.split(line)
        except ValueError:
            continue
        is_command = len(words) > 2 and re.match(r"[\w$<{/.-]*[/$<{-]|--|MODEL|model", words[2])
        return re.sub(r"\s+", " ", line) if is_command else ""
    return ""


def judge(line: str) -> dict[str, Any]:
    """What is absent of a line."""
    from quire.entrypoints.cli.translate import translate
    from quire.errors import ConfigError

    try:
        translation = translate(line)
    except ConfigError as error:
        return {"line": line, "absent": [["(the line)", str(error)]]}
    return {"line": line, "absent": [[fate.flag, fate.why] for fate in translation.absent]}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="an unpacked source distribution of vLLM")
    parser.add_argument("--show", action="store_true", help="print the lines that are not taken")
    parser.add_argument("--json", type=Path, help="write every line to this file")
    arguments = parser.parse_args()
    judged = [judge(line) for line in command_lines(arguments.root.resolve())]
    if not judged:
        sys.exit(f"{arguments.root}: no command lines; give the path of an unpacked source distribution of vLLM")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(judged, indent=1), encoding="utf-8")
    refused = [each for each in judged if each["absent"]]
    for each in refused if arguments.show else ():
        print(each["line"], *(f"    {flag}: {why}" for flag, why in each["absent"]), sep="\n")
    causes = Counter(re.split(r"[= ]", flag)[0] for each in refused for flag, _ in each["absent"])
    for flag, count in causes.most_common():
        print(f"{count:>5}  {flag}")
    print(f"{len(judged) - len(refused)} of {len(judged)} command lines are taken")


if __name__ == "__main__":
    main()
