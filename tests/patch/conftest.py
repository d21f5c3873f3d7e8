"""A made-up engine and a made-up vendor, as packages of a folder, for tests of patches."""

import datetime
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.patch import Patch, Target
from quire.patch.plan import Found
from quire.patch.process import ProcessPatches
from quire.patch.targets import hash_signature, load

ENGINE = {
    "__init__.py": "",
    "core.py": """
SIZE = 16

def double(x, times=2):
    return x * times

async def later(x):
    return x

class Counter:
    unit = "tokens"

    def __init__(self, start=0):
        self.value = start

    def add(self, n):
        self.value += n
        return self.value

    @staticmethod
    def half(x):
        return x // 2

    @classmethod
    def named(cls, name):
        return f"{cls.__name__} {name}"

    @property
    def shown(self):
        return str(self.value)

class Special(Counter):
    pass
""",
    "user.py": """
import dataclasses
from lab_engine.core import SIZE, Counter, double
from lab_engine import core

REGISTRY = {"double": double}
LIST = [double]
SIXTEEN = 16

@dataclasses.dataclass(frozen=True)
class Entry:
    function: object

class Holder:
    tool = double

ENTRY = Entry(double)

def use(x):
    return double(x), REGISTRY["double"](x), LIST[0](x), ENTRY.function(x), Holder.tool(x), core.double(x)
""",
    "stuck.py": "from lab_engine.core import double\nPAIR = (double,)\n",
}
VENDOR = {
    "__init__.py": "",
    "by.py": """
import functools
from lab_engine.core import Counter as OldCounter
from lab_engine.core import double as old_double

SIZE = 128
partial = functools.partial(print)
a_lambda = lambda x: x

def more(original, x, *args):
    return original(x, *args) + 1

def still_more(original, x, *args):
    return original(x, *args) + 100

def triple(x, times=3):
    return x * times

def with_old(x, times=2):
    return old_double(x, times) + 1000

@functools.wraps(triple)
def disguised(x):
    return x

async def later(original, x):
    return await original(x) + 1

def add(original, self, n):
    return original(self, 10 * n)

def half(original, x):
    return original(x) + 1

def named(original, cls, name):
    return original(cls, name) + "!"

def shown(original, self):
    return f"<{original(self)}>"

class Counter(OldCounter):
    unit = "pages"

def extra():
    return "extra"

""",
    "asked.py": """
def yes():
    return True

def no():
    return False

def is_big(config):
    return config == "big"
""",
}


@pytest.fixture(autouse=True)
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Both packages, fresh, in no module of this process."""
    for package, files in (("lab_engine", ENGINE), ("lab_vendor", VENDOR)):
        (tmp_path / package).mkdir()
        for name, text in files.items():
            (tmp_path / package / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("QUIRE_PATCH_DATE", "2026-11-01")
    yield tmp_path
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith(("lab_engine", "lab_vendor"))]:
        del sys.modules[name]


def target(path: str, kind: Any, by: str, signature: str | None = None) -> Target:
    """A target of the made-up engine; its signature is the one that is there unless one is given."""
    full = f"lab_engine.{path}"
    if signature is None:
        signature = "" if kind == "add" else hash_signature(load(full))
        forget()
    return Target(path=full, kind=kind, by=f"lab_vendor.by:{by}", signature=signature)


def patch(*targets: Target, id: str = "a-patch", **changes: Any) -> Patch:
    fields: dict[str, Any] = {
        "processes": ("core",),
        "versions": ">=0.1",
        "owner": "the vendor",
        "why": "The engine does it in another way.",
        "how": "It does it in the vendor's way.",
        "related_change": "none: this is a test",
        "removal_plan": "remove it when the engine does it so",
        "removal_check": "lab_vendor.asked:no",
        "expires": datetime.date(2027, 1, 1),
    }
    return Patch(id=id, targets=targets, **fields | changes)


@pytest.fixture
def start() -> Iterator[Any]:
    """Makes the patches of a process, and takes them out at the end."""
    made: list[ProcessPatches] = []

    def make(*patches: Patch, kinds: tuple[str, ...] = ("core",), strict: bool = False) -> ProcessPatches:
        process = ProcessPatches([Found(each, "vendor 1.0") for each in patches], strict=strict)
        made.append(process)
        for kind in kinds:
            process.begin(kind)
        return process

    yield make
    for process in made:
        process.close()
