"""Triton's CUDA driver without a C compiler: modules are loaded and kernels launched through the driver's own library.

Triton writes C code for each signature that it launches and has it compiled when a kernel first runs, which costs a fresh
process 0.2 s a signature and asks for a compiler on every machine. Here the driver is called with ctypes: arguments are
packed into one buffer whose layout follows from the signature. Knows the driver API and Triton's metadata; knows no kernel.
"""

import ctypes
import functools
import operator
import shutil
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from triton import knobs
from triton.backends.driver import GPUDriver
from triton.backends.nvidia import driver as stock

_INVALID_CONTEXT = 201
_COOPERATIVE, _CLUSTER_SHAPE, _CLUSTER_POLICY, _DEPENDENT_LAUNCH = 2, 4, 5, 6
_SPREAD = 1
_MAX_CLUSTER = 16
"""Clusters of this size have to be allowed for each function."""
_ANY_CLUSTER_SIZE = 14
_LARGE_SHARED = 48 << 10

_SCALARS = {
    "i1": "b",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u1": "B",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp16": "e",
    "fp32": "f",
    "f32": "f",
    "fp64": "d",
}
"""Triton's scalar types and how `struct` packs them. A bf16 scalar is left to Triton's own launcher."""
_TENSOR_MAP = "128s"
_TENSOR_MAP_ALIGNMENT = 64
_MAX_RANK = 5
_MAX_MAPS = 1024
"""Tensor maps that a kernel keeps: 28 layers and a few step sizes need a hundred."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"Triton Error [CUDA]: {(text.value or b'unknown error').decode()} ({code})")


def _enter_context(device: int) -> None:
    """Make the device's primary context this thread's, if it has none."""
    library, context = _library(), ctypes.c_void_p()
    _check(library.cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        _check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check(library.cuCtxSetCurrent(context))


class Layout:
    """Where a kernel's arguments lie in its parameter buffer: each on its own alignment, as C would place them.

    Args:
        formats: one `struct` code an argument; `128s` is a tensor map.
    """

    def __init__(self, formats: Sequence[str]) -> None:
        self.offsets: list[int] = []
        at, packed = 0, "<"
        for code in formats:
            size = struct.calcsize("<" + code)
            alignment = _TENSOR_MAP_ALIGNMENT if code == _TENSOR_MAP else size
            pad = -at % alignment
            packed += f"{pad}x{code}" if pad else code
            self.offsets.append(at + pad)
            at += pad + size
        self.packer = struct.Struct(packed)


class _Parameters:
    """A buffer for one launch at a time, and the array of pointers into it that the driver takes."""

    def __init__(self, layout: Layout) -> None:
        self._memory = ctypes.create_string_buffer(layout.packer.size + 2 * _TENSOR_MAP_ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.offset = -start % (2 * _TENSOR_MAP_ALIGNMENT)
        self.buffer = self._memory
        addresses = [start + self.offset + offset for offset in layout.offsets]
        self.pointers = (ctypes.c_void_p * len(addresses))(*addresses)


class Launcher:
    """Launches one compiled kernel; called as Triton calls its own launchers.

    Attributes:
        num_needed: how many of a kernel's first parameters `submit` must be given.

    Raises:
        NotImplementedError: the signature has something that only Triton's own launcher can pass.
    """

    def __init__(self, src: Any, metadata: Any) -> None:
        signature = list(src.signature.values())
        descriptors = list(getattr(metadata, "tensordesc_meta", None) or [])
        formats, self._pick, self._pointers, self.num_needed = _plan(signature, descriptors)
        layout = Layout([*formats, "Q", "Q"])
        self._pack = layout.packer.pack_into
        self._parameters = _Parameters(layout)
        self._lock = threading.Lock()
        self._scratch = (metadata.global_scratch_size, metadata.global_scratch_align)
        self._profile = (metadata.profile_scratch_size, metadata.profile_scratch_align)
        self._num_ctas = metadata.num_ctas
        self._config = _LaunchConfig()
        self._config.block_x, self._config.block_y, self._config.block_z = 32 * metadata.num_warps, 1, 1
        self._config.shared = metadata.shared
        attributes = _attributes(metadata)
        self._attributes = (_Attribute * max(1, len(attributes)))(*attributes)
        self._config.attributes = ctypes.cast(self._attributes, ctypes.POINTER(_Attribute))
        self._config.num_attributes = len(attributes)
        self._config_at = ctypes.byref(self._config)
        self._launch = _library().cuLaunchKernelEx
        self._needs_scratch = bool(self._scratch[0] or self._profile[0])
        self._function, self._function_at = 0, ctypes.c_void_p()

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        function: int,
        packed_metadata: Any,
        launch_metadata: Any,
        enter_hook: Any,
        exit_hook: Any,
        *args: Any,
    ) -> None:
        """Submit the kernel to the stream."""
        if grid_x * grid_y * grid_z <= 0:
            return
        if enter_hook is not None and getattr(enter_hook, "calls", True):
            enter_hook(launch_metadata)
        values = list(args)
        for at in self._pointers:
            value = values[at]
            if value is None:
                values[at] = 0
            elif type(value) is not int:
                values[at] = value.data_ptr()
        self.submit(grid_x, grid_y, grid_z, stream, function, values)
        if exit_hook is not None and getattr(exit_hook, "calls", True):
            exit_hook(launch_metadata)

    def submit(self, grid_x: int, grid_y: int, grid_z: int, stream: int, function: int, values: Sequence[Any]) -> None:
        """As a call, for a kernel's parameters from the first on, with addresses in place of tensors and without hooks."""
        programs = grid_x * grid_y * grid_z
        if programs <= 0:
            return
        values = self._pick(values)
        scratch = profile = None
        if self._needs_scratch:
            scratch = self._allocate(self._scratch, programs, stream, "_allocator")
            profile = self._allocate(self._profile, programs, stream, "_profile_allocator")
        parameters, config = self._parameters, self._config
        with self._lock:
            if function != self._function:
                self._function, self._function_at = function, ctypes.c_void_p(function)
                if self._num_ctas == _MAX_CLUSTER:
                    _check(_library().cuFuncSetAttribute(self._function_at, _ANY_CLUSTER_SIZE, 1))
            self._pack(parameters.buffer, parameters.offset, *values, _address(scratch), _address(profile))
            config.grid_x, config.grid_y, config.grid_z = grid_x * self._num_ctas, grid_y, grid_z
            config.stream = stream
            code = self._launch(self._config_at, self._function_at, parameters.pointers, None)
            if code == _INVALID_CONTEXT:  # a thread that has not touched the device yet
                _enter_context(_current_device())
                code = self._launch(self._config_at, self._function_at, parameters.pointers, None)
        if code:
            _check(code)

    def _allocate(self, need: tuple[int, int], programs: int, stream: int, which: str) -> Any:
        """Scratch memory of the kernel's own, from the allocator that Triton was given."""
        size, align = need
        if not size:
            return None
        from triton.runtime import _allocation

        allocator = getattr(_allocation, which)
        allocator = allocator.get() if hasattr(allocator, "get") else allocator
        return allocator(programs * self._num_ctas * size, align, stream)


def _address(memory: Any) -> int:
    return 0 if memory is None else memory if type(memory) is int else memory.data_ptr()


def _current_device() -> int:
    """The device that this thread submits to."""
    import torch

    return torch.cuda.current_device()


def _attributes(metadata: Any) -> list[_Attribute]:
    attributes: list[_Attribute] = []

    def add(kind: int, *values: int) -> None:
        attribute = _Attribute()
        attribute.id = kind
        attribute.value[: len(values)] = values
        attributes.append(attribute)

    if metadata.launch_pdl:
        add(_DEPENDENT_LAUNCH, 1)
    if metadata.launch_cooperative_grid:
        add(_COOPERATIVE, 1)
    if metadata.num_ctas != 1:
        add(_CLUSTER_SHAPE, metadata.num_ctas, 1, 1)
        add(_CLUSTER_POLICY, _SPREAD)
    return attributes


Picker = Callable[[Sequence[Any]], Sequence[Any]]


def _plan(signature: list[Any], descriptors: list[Any]) -> tuple[list[str], Picker, list[int], int]:
    """(format of each packed value, function from a kernel's parameters to those, parameters that are pointers, how many
    parameters it takes from the first on)."""
    formats: list[str] = []
    sources: list[tuple[int, Any]] = []
    pointers: list[int] = []
    waiting = iter(descriptors)
    for index, kind in enumerate(signature):
        if not isinstance(kind, str) or kind == "nvTmaDesc":
            raise NotImplementedError(f"a parameter of type {kind}")
        if kind == "constexpr":
            continue
        meta = None
        if kind.startswith("tensordesc"):
            meta = next(waiting, None)
            if meta is None:
                raise NotImplementedError("a tensor descriptor without a tensor map")
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            formats += [_TENSOR_MAP, *["i"] * rank, *["q"] * rank]
        elif kind.startswith("*"):
            pointers.append(index)
            formats.append("Q")
        elif kind in _SCALARS:
            formats.append(_SCALARS[kind])
        else:
            raise NotImplementedError(f"a parameter of type {kind}")
        sources.append((index, meta))
    num_needed = sources[-1][0] + 1 if sources else 0
    if any(meta is not None for _, meta in sources):
        return formats, _PickWithMaps(sources), pointers, num_needed
    indices = [index for index, _ in sources]
    if len(indices) > 1:
        return formats, operator.itemgetter(*indices), pointers, num_needed
    return formats, lambda values: [values[index] for index in indices], pointers, num_needed


class _PickWithMaps:
    """Puts a tensor map, sizes and strides in place of each descriptor. Maps are kept: layers describe the same memory in
    every step, and the driver takes longer to encode it than to launch."""

    def __init__(self, sources: list[tuple[int, Any]]) -> None:
        self._sources = sources
        self._maps: dict[tuple[Any, ...], bytes] = {}

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        picked: list[Any] = []
        for index, meta in self._sources:
            value = values[index]
            if meta is None:
                picked.append(value)
                continue
            shape, strides = value.shape, value.strides
            key = (index, value.base.data_ptr(), *shape, *strides, value.padding)
            tensor_map = self._maps.get(key)
            if tensor_map is None:
                if len(self._maps) >= _MAX_MAPS:
                    self._maps.clear()
                tensor_map = self._maps[key] = encode_tensor_map(value, meta)
            picked += [tensor_map, *shape, *strides]
        return picked


def encode_tensor_map(descriptor: Any, meta: dict[str, Any]) -> bytes:
    """The 128 bytes by which the copy engine knows a tensor (cuTensorMapEncodeTiled).

    Args:
        descriptor: Triton's `TensorDescriptor`.
        meta: what the compiler chose for it: swizzle, type and size of an element, block.
    """
    shape, strides, block = list(descriptor.shape), list(descriptor.strides), list(meta["block_size"])
    if meta["fp4_padded"]:
        shape[-1] *= 2
    rank, size = len(shape), meta["elem_size"]
    dims = (ctypes.c_uint64 * _MAX_RANK)(*reversed(shape))
    steps = (ctypes.c_uint64 * _MAX_RANK)(*(size * stride for stride in reversed(strides[:-1])))
    box = (ctypes.c_uint32 * _MAX_RANK)(*reversed(block))
    ones = (ctypes.c_uint32 * _MAX_RANK)(*[1] * _MAX_RANK)
    memory = ctypes.create_string_buffer(256)
    start = ctypes.addressof(memory)
    offset = -start % 128
    _check(
        _library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(start + offset),
            stock.TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]],
            rank,
            ctypes.c_void_p(descriptor.base.data_ptr()),
            dims,
            steps,
            box,
            ones,
            0,  # not interleaved
            meta["swizzle"],
            2,  # L2 lines of 128 bytes
            1 if descriptor.padding == "nan" else 0,
        )
    )
    return memory.raw[offset : offset + 128]


def make_launcher(src: Any, metadata: Any) -> Any:
    """A launcher for a compiled kernel; Triton's own (which needs a C compiler) where ours cannot pass its arguments."""
    try:
        return Launcher(src, metadata)
    except NotImplementedError as error:
        if _c_compiler() is None:
            raise RuntimeError(
                f"the kernel {src.fn.__name__} has {error}, which needs Triton's own launcher and so a C compiler, and there is "
                f"none: install gcc, or name one in CC"
            ) from error
        stock.CudaUtils()  # the launcher's C code looks for what this defines
        return stock.CudaLauncher(src, metadata)


def _c_compiler() -> str | None:
    """The compiler that Triton would call."""
    return knobs.build.cc or shutil.which("gcc") or shutil.which("clang")


class Utils:
    """What Triton asks of its helper module."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spilled registers, threads that a block may have)."""
        library = _library()
        _enter_context(device)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(library.cuModuleLoadData(ctypes.byref(module), binary))
        _check(library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))

        def ask(attribute: int) -> int:
            value = ctypes.c_int()
            _check(library.cuFuncGetAttribute(ctypes.byref(value), attribute, function))
            return value.value

        optin = self._ask_device(device, 97)
        if shared > _LARGE_SHARED and optin > _LARGE_SHARED:
            _check(library.cuFuncSetCacheConfig(function, 1))
            _check(library.cuFuncSetAttribute(function, 8, optin - ask(1)))
        return module.value or 0, function.value or 0, ask(4), ask(3) // 4, ask(0)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Sizes and clocks, under Triton's names."""
        asked = {
            "max_shared_mem": 97,
            "max_num_regs": 12,
            "multiprocessor_count": 16,
            "warpSize": 10,
            "sm_clock_rate": 13,
            "mem_clock_rate": 36,
            "mem_bus_width": 37,
        }
        return {name: self._ask_device(device, attribute) for name, attribute in asked.items()}

    def _ask_device(self, device: int, attribute: int) -> int:
        value = ctypes.c_int()
        _check(_library().cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        return value.value

    def __getattr__(self, name: str) -> Any:
        """Everything else from Triton's own module, which is compiled now."""
        return getattr(stock.CudaUtils(), name)


class Driver(stock.CudaDriver):
    """Triton's driver with our launcher and helpers."""

    def __init__(self) -> None:
        self.utils = Utils()
        self.launcher_cls = make_launcher
        GPUDriver.__init__(self)
