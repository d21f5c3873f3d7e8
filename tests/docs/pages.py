"""The pages of the project: their blocks of code, and the commands in them.

Knows Markdown's fences and a little of the shell's grammar. Runs nothing.
"""

import dataclasses
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
DEMO_SERVER = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):8000")
COMMANDS = frozenset(["quire", "curl", "pip", "make", "python", "cat", "export", "vllm", "source", "git"])
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DOCUMENT = re.compile(r"<<'(\w+)'\n.*?^\1$", re.MULTILINE | re.DOTALL)
_ENDS = frozenset(("|", "||", "&&", "&", ";", ">", ">>"))


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        place: page and line, for messages.
        language: the word after the fence; "" if there is none.
    """

    page: str
    place: str
    language: str
    text: str

    @property
    def is_shell(self) -> bool:
        """Whether it has commands; the prompt of a console is not part of them."""
        if self.language not in ("", "sh", "bash", "console"):
            return False
        words = re.sub(r"^(\$ |[A-Z_0-9]+=\S+ )*", "", self.text.lstrip()).split()
        return words[0] in COMMANDS

    @property
    def script(self) -> str:
        """The shell's text."""
        return re.sub(r"^\$ ", "", self.text, flags=re.MULTILINE)


def read_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in their order."""
    text, name = page.read_text(encoding="utf-8"), page.name
    return [
        Block(name, f"{name}:{text.count(chr(10), 0, match.start()) + 1}", match[1], match[2])
        for match in _FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in read_blocks(page)]
SHELL = [block for block in BLOCKS if block.is_shell]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def split_commands(script: str) -> list[list[str]]:
    """Return the simple commands of a shell's text, as words, without variables, redirections and the text
    between `<<'END'` and `END`."""
    commands: list[list[str]] = []
    for line in statements(script):
        line = _DOCUMENT.sub("", line).replace("\\\n", " ")
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;>")
        lexer.whitespace_split = True
        words = list(lexer)
        while words:
            end = next((at for at, word in enumerate(words) if word in _ENDS), len(words))
            command, ended = words[:end], words[end : end + 1]
            words = words[end + (2 if ended in (["&gt;"], [">"], [">>"]) else 1) :]
            while command and re.fullmatch(r"[A-Z_0-9]+=.*", command[0]):
                command = command[1:]
            if command:
                commands.append(command)
    return commands


def statements(script: str) -> list[str]:
    """Return the statements of a shell's text. A line that ends in quotes, with a backslash or before a document continues."""
    found: list[str] = []
    kept = ""
    for line in script.splitlines():
        kept = f"{kept}\n{line}" if kept else line
        if kept.endswith("\\") or ("<<'" in kept and not _DOCUMENT.search(kept)):
            continue
        try:
            shlex.split(_DOCUMENT.sub("", kept), comments=True)
        except ValueError:
            continue
        if kept.strip():
            found.append(kept)
        kept = ""
    assert not kept, f"a quote is not closed: {kept[:200]}"
    return found


def commands_named(name: str) -> list[tuple[Block, list[str]]]:
    """Return every use of a command in blocks of shell."""
    return [(block, words) for block in SHELL for words in split_commands(block.script) if words[0] == name]


def inline_commands() -> list[tuple[str, list[str]]]:
    """Return every `quire …` within a line of text: its place and its words."""
    found: list[tuple[str, list[str]]] = []
    for page in PAGES:
        text = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text(encoding="utf-8"))
        found += [
            (f"{page.name}:{text.count(chr(10), 0, match.start()) + 1}", split_commands(match[1])[0])
            for match in re.finditer(r"`(quire [^`]+)`", text)
        ]
    return found
