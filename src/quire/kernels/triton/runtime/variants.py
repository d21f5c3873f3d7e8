"""Which compiled forms of which kernels a process used, as plain data that another process can compile from.

A variant is a kernel with the types of its arguments, its constants and its options. `Recorder` notes those that a process
launches; `compile_variant` makes one without a GPU. Knows Triton's compiler; knows no model.
"""

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from quire.kernels.triton.runtime import direct_launch, places
from quire.kernels.triton.runtime.places import Variant, identity, merge

_DERIVED_OPTIONS = ("extern_libs", "arch", "supported_fp8_dtypes", "backend_name", "warp_size", "instrumentation_mode")
"""Options that follow from the installation and the target."""
_NAMED = object()
"""Stands for a compiled kernel that was only named."""
_ALIGNED = [["tt.divisibility", 16]]
"""What Triton notes of an argument that is a multiple of 16."""


class StaleVariant(LookupError):
    """A list names a kernel as it was once."""


def _unknown(argument: Any) -> Any:
    raise TypeError(f"{type(argument).__name__} is neither a tensor nor a number")


class Recorder:
    """Notes every variant that this process compiles or loads, once.

    Attributes:
        before: called with each variant before Triton looks for it.
        owner: whose kernels these are.
    """

    def __init__(self) -> None:
        self.owner = ""
        self.before: Callable[[Variant], None] = lambda variant: None
        self._variants: dict[str, Variant] = {}
        self._collected: list[Variant] | None = None
        self._named: list[Any] = []
        self._lock = threading.Lock()
        self._compile = triton.compiler.compile

    def compile(self, src: Any, target: Any = None, options: Any = None, **others: Any) -> Any:
        """Triton's `compile`, which launches call once for each variant; a mere mark while variants are only collected."""
        variant = describe(src, target, options or {})
        if variant is not None:
            collected = self._collected
            if collected is not None:
                collected.append(variant)
                self._named.append(src.fn)
                return _NAMED
            self.before(variant)
            with self._lock:
                self._variants.setdefault(identity(variant), variant)
        return self._compile(src, target=target, options=options, **others)

    @contextlib.contextmanager
    def collecting(self) -> Generator[list[Variant]]:
        """Within this, no kernel of this process is launched; those that would have to be compiled are listed instead."""
        run, seen = JITFunction.run, set[tuple[Any, ...]]()

        def run_nothing(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            classes: list[Any] = [id(kernel), *options.items()]
            try:  # layers are alike: Triton's own bookkeeping would be most of the time
                direct_launch.classify(args, classes, _unknown)
                key = tuple(classes)
                is_known = key in seen
                seen.add(key)
            except (TypeError, OverflowError, RuntimeError):
                is_known = False
            return None if is_known else run(kernel, *args, grid=grid, warmup=True, **options)

        collected: list[Variant] = []
        self._collected = collected
        JITFunction.run = run_nothing
        try:
            yield collected
        finally:
            JITFunction.run = run
            self._collected = None
            collected[:] = merge(collected)
            self._forget_named()

    def _forget_named(self) -> None:
        """Triton keeps what it was given in place of a compiled kernel; the next launch must compile."""
        for kernel in self._named:
            for caches in kernel.device_caches.values():
                compiled = caches[0]
                for key in [key for key, value in compiled.items() if value is _NAMED]:
                    del compiled[key]
        self._named.clear()

    def variants(self) -> list[Variant]:
        """What was noted, in the order of first use."""
        with self._lock:
            return list(self._variants.values())


@functools.cache
def _installed() -> Recorder:
    recorder = Recorder()
    # Launches look the compiler up here, by name.
    triton.compiler.compile = recorder.compile
    return recorder


def recorder(before: Callable[[Variant], None]) -> Recorder:
    """This process's recorder; kernels that were launched before the first call are not noted."""
    recorder = _installed()
    recorder.before = before
    return recorder


def describe(src: Any, target: Any, options: Mapping[str, Any]) -> Variant | None:
    """The variant that Triton compiles from a source with these options; None for one that data cannot name."""
    if target is None or not isinstance(src, ASTSource) or not isinstance(src.fn, JITFunction):
        return None
    kernel = f"{src.fn.__module__}:{src.fn.__qualname__}"
    nested = any(not isinstance(kind, str) for kind in src.signature.values()) or any(
        len(path) != 1 for path in [*src.constants, *src.attrs]
    )
    if nested or not kernel.startswith(places.PACKAGES) or "<locals>" in kernel:
        return None
    names = src.fn.arg_names
    try:
        constants = {names[path[0]]: _encode(value) for path, value in src.constants.items()}
        plain = _plain_options(target)
        chosen = {
            name: _encode(value)
            for name, value in options.items()
            if name not in _DERIVED_OPTIONS and name in plain and value is not None and value != plain[name]
        }
    except TypeError:
        return None
    if any([list(pair) for pair in value] not in (_ALIGNED, []) for value in src.attrs.values()):
        return None
    return {
        "kernel": kernel,
        "types": {name: kind for name, kind in src.signature.items() if kind != "constexpr"},
        "constants": constants,
        "aligned": {names[path[0]]: bool(value) for path, value in src.attrs.items()},
        "options": chosen,
    }


@functools.cache
def _plain_options(target: GPUTarget) -> dict[str, Any]:
    """Triton's options where a launch names none."""
    return dict(make_backend(target).parse_options({}).__dict__)


def _encode(value: Any) -> Any:
    """A constant as JSON.

    Raises:
        TypeError: JSON cannot say it.
    """
    if isinstance(value, tl.constexpr):
        return {"constexpr": _encode(value.value)}
    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if isinstance(value, JITFunction):
        return {"kernel": f"{value.__module__}:{value.__qualname__}"}
    if isinstance(value, tuple):
        return {"tuple": [_encode(item) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a constant of type {type(value).__name__}")


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "constexpr" in value:
        return tl.constexpr(_decode(value["constexpr"]))
    if "dtype" in value:
        return tl.dtype(value["dtype"])
    if "kernel" in value:
        return find_kernel(value["kernel"])
    return tuple(_decode(item) for item in value["tuple"])


@functools.cache
def find_kernel(name: str) -> JITFunction:
    """The kernel behind `module:name`.

    Raises:
        StaleVariant: there is none of that name.
        LookupError: it is not in a package whose kernels a list may name.
    """
    module, _, attribute = name.partition(":")
    if not name.startswith(places.PACKAGES):
        raise LookupError(f"{name} is in none of the packages {', '.join(places.PACKAGES)}")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise StaleVariant(f"there is no kernel {name}: {error}") from error
    try:
        kernel = functools.reduce(getattr, attribute.split("."), found)
    except AttributeError as error:
        raise StaleVariant(f"there is no kernel {name}: {error}") from error
    while not isinstance(kernel, JITFunction) and hasattr(kernel, "fn"):  # an autotuner around it
        kernel = kernel.fn
    if not isinstance(kernel, JITFunction):
        raise StaleVariant(f"{name} is not a kernel")
    return kernel


def source_of(variant: Variant) -> ASTSource:
    """What Triton compiles for a variant.

    Raises:
        StaleVariant: its kernel is not there any more, or has other parameters now.
    """
    kernel = find_kernel(variant["kernel"])
    types, constants, aligned, names = variant["types"], variant["constants"], variant["aligned"], kernel.arg_names
    if {*types, *constants} != set(names):
        raise StaleVariant(f"{variant['kernel']} has other parameters now")
    make_source = GluonASTSource if kernel.is_gluon() else ASTSource
    return make_source(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(index,): _decode(constants[name]) for index, name in enumerate(names) if name in constants},
        {
            (index,): [list(pair) for pair in _ALIGNED] if aligned[name] else []
            for index, name in enumerate(names)
            if name in aligned
        },
    )


def compile_variant(variant: Variant, capability: int) -> Any:
    """Compile for a compute capability (90 for 9.0) into the cache, or find it there; no GPU is needed.

    Raises:
        StaleVariant: its kernel is not there any more.
    """
    options = {name: _decode(value) for name, value in variant["options"].items()}
    return triton.compile(source_of(variant), target=GPUTarget("cuda", capability, 32), options=options)
