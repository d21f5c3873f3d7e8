"""What a check is, what it may find, and the platform that it is about.

A check is a function of a `Subject`. It returns a few words of what it saw, raises `NotClaimed` where the platform says that it
does not do this, and `Failed` where it does something else than the contract says; any other exception is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fnmatch
import functools
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quire.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch

    from quire.config import EngineConfig
    from quire.platforms.interface import Capabilities, DeviceRuntime, Platform

CHECKED_IN = (
    "capability_checks",
    "device_checks",
    "page_checks",
    "attention_checks",
    "sampler_checks",
    "engine_checks",
    "rank_checks",
    "kernel_checks",
)
"""The modules of checks, in the report's order."""
Function = TypeVar("Function", bound="Callable[[Subject], str]")


class Outcome(enum.StrEnum):
    """What a check found."""

    PASS = "pass"
    FAIL = "fail"
    NOT_CLAIMED = "not claimed"
    ERROR = "error"


class NotClaimed(Exception):
    """The platform says that it does not do this; the text is its reason."""


class Failed(Exception):
    """The platform does something else than the contract says."""

    def __init__(self, message: str, expected: object = "", got: object = "") -> None:
        super().__init__(message)
        self.expected, self.got = str(expected), str(got)


def expect(is_right: object, message: str, expected: object, got: object) -> None:
    """Raises Failed: it is not so."""
    if not is_right:
        raise Failed(message, expected, got)


@dataclasses.dataclass(frozen=True)
class Check:
    """One promise of the contract.

    Attributes:
        name: `group/name`.
        about: the promise in one sentence.
        is_long: left out of a quick run.
        is_alone: looks at the device as a whole: nothing else may run there.
    """

    name: str
    about: str
    function: Callable[[Subject], str]
    is_long: bool = False
    is_alone: bool = False

    @property
    def group(self) -> str:
        """The part before the slash."""
        return self.name.partition("/")[0]


checks: dict[str, Check] = {}
"""By name, in the order of the report."""


def check(name: str, about: str, *, is_long: bool = False, is_alone: bool = False) -> Callable[[Function], Function]:
    """Register a function as a check. Raises ValueError: there is one of this name already."""

    def register(function: Function) -> Function:
        if name in checks:
            raise ValueError(f"the check {name!r} is registered twice")
        checks[name] = Check(name, about, function, is_long, is_alone)
        return function

    return register


def load_checks() -> None:
    """Register every check of this package; again has no effect."""
    import importlib

    for module in CHECKED_IN:
        importlib.import_module(f"{__package__}.{module}")


def select_checks(only: Sequence[str] = (), *, is_quick: bool = False) -> list[Check]:
    """The checks that are named, by groups, names or patterns of names; all of them where nothing is named.

    Raises:
        ConfigError: something names no check.
    """
    load_checks()
    chosen: dict[str, Check] = {}
    for wanted in only or ["*"]:
        found = [each for each in checks.values() if wanted == each.group or fnmatch.fnmatchcase(each.name, wanted)]
        if not found:
            known = [*dict.fromkeys(each.group for each in checks.values()), *checks]
            raise ConfigError.of("only", f"{wanted!r} names no check{did_you_mean(wanted, known)}; --list shows them")
        chosen |= {each.name: each for each in found if not is_quick or not each.is_long or wanted == each.name}
    return [each for each in checks.values() if each.name in chosen]


class Subject:
    """The platform that is checked, in the process that checks it.

    Args:
        name: as `--device` has it.
        is_quick: fewer and smaller cases.

    Attributes:
        folder: for files of checks; removed at the end.
    """

    def __init__(self, name: str, *, seed: int = 0, is_quick: bool = False) -> None:
        self.name, self.seed, self.is_quick = name, seed, is_quick
        self._folder = tempfile.TemporaryDirectory(prefix="quire-conformance-")
        self.folder = Path(self._folder.name)
        self.memory: dict[str, Any] = {}

    def close(self) -> None:
        """Release everything."""
        if "runtime" in self.__dict__:
            self.runtime.close()
        self._folder.cleanup()

    @functools.cached_property
    def platform(self) -> Platform:
        """The platform itself."""
        from quire.platforms import current_platform

        return current_platform(self.name)

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """What it claims."""
        return self.platform.capabilities()

    def claims(self, name: str) -> Any:
        """The value of a capability. Raises NotClaimed: it is empty or `none`, with its reason."""
        claim = getattr(self.capabilities, name)
        if not claim.value or claim.value == "none":
            raise NotClaimed(f"{name}: {claim.why}")
        return claim.value

    @functools.cached_property
    def config(self) -> EngineConfig:
        """Of a tiny engine on this platform."""
        return self.config_with()

    def config_with(self, **settings: Any) -> EngineConfig:
        """The same with other settings. Raises ConfigError: the platform refuses them."""
        from quire.conformance.tiny_models import write_model
        from quire.engine.arg_utils import EngineArgs

        given = {**ENGINE_SETTINGS, "device": self.name, "dtype": self.dtype_name} | settings
        return EngineArgs(model=str(write_model("llama", self.folder)), **given).create_engine_config()

    def claims_settings(self, **settings: Any) -> None:
        """Raises NotClaimed: the platform refuses them."""
        try:
            self.config_with(**settings)
        except ConfigError as error:
            raise NotClaimed(str(error)) from error

    @property
    def dtype_name(self) -> str:
        """The most exact type that the platform computes with."""
        names = self.capabilities.dtypes.value
        return "float32" if "float32" in names else names[0]

    @property
    def page_size(self) -> int:
        """Tokens of a page in checks: the least multiple of the platform's alignment that has at least 16."""
        alignment = self.capabilities.page_alignment.value
        return -(-LEAST_PAGE // alignment) * alignment

    @functools.cached_property
    def runtime(self) -> DeviceRuntime:
        """A device runtime, as a worker makes it."""
        return self.platform.runtime(self.config)

    @property
    def device(self) -> torch.device:
        """The runtime's device."""
        return self.runtime.device()

    @contextlib.contextmanager
    def kernels(self) -> Generator[None, None, None]:
        """The platform's kernels are chosen."""
        assert self.device is not None  # kernels may need it
        with other_kernels(self.platform.select_kernels):
            yield


@contextlib.contextmanager
def other_kernels(choose: Callable[[], None] | None = None) -> Generator[None, None, None]:
    """The kernels that a function chooses, for a while; the references where there is none."""
    from quire.kernels import registry

    before = registry.choices()
    try:
        (choose or functools.partial(registry.use, {}))()
        yield
    finally:
        registry.use(before)


def with_refusals(seen: str, refusals: Sequence[str]) -> str:
    """What a check saw, and which backends would not have it, each with its reason and what it was asked for."""
    return "; ".join([*filter(None, [seen]), *(f"refused by {refusal}" for refusal in refusals)])


LEAST_PAGE = 16
ENGINE_SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 200,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 32 << 20,
    "disable_log_stats": True,
}
"""Of every engine of the suite, unless a check says otherwise."""
