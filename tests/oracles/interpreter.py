"""What Triton's interpreter needs here, to be called before a kernel runs in it.

- Its scalars are arrays of one element, which NumPy 2.4 no longer turns into an index: a loop over a range known at run time
  would fail.
- It holds bfloat16 as integers, which its matrix product multiplies as such.
- Its matrix product is NumPy's, in which a row's last bits may depend on the rows beside it: summed in float64 they do not.
- Its float8 loses a carry where rounding reaches the next power of two.
- It is slow without need: at every launch and every call of one function by another it looks through the whole language, it
  looks for overflows of which it then says nothing, and it makes the same types anew for every value.
"""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """Within this, operations call the kernels of the cuda platform."""
    from quire.kernels import ops, registry, triton

    before = registry.choices()
    triton.register()
    ops.select("cuda")
    try:
        yield
    finally:
        registry.use(before)


@functools.cache
def repair_interpreter() -> None:
    """Once in a process; again has no effect."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    create_dot = interpreter.InterpreterBuilder.create_dot
    convert_float = interpreter._convert_float

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widen(builder: Any, handle: Any) -> Any:
        if handle.dtype.primitive_bitwidth == 8 and handle.dtype.is_floating():
            data = convert_float(handle.data, handle.dtype, tl.float16, None).view(np.float16)
            return interpreter.TensorHandle(data, tl.float16)
        return builder.create_fp_to_fp(handle, tl.float32, None) if handle.dtype.scalar == tl.bfloat16 else handle

    def create_dot_widened(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if d.data.dtype != np.float32:
            return create_dot(self, widen(self, a), widen(self, b), d, *rest)
        product = np.matmul(widen(self, a).data, widen(self, b).data, dtype=np.float64)
        return interpreter.TensorHandle((product + d.data).astype(np.float32), d.dtype.scalar)

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target != tl.float8e4nv or source != tl.float32:
            return convert_float(values, source, target, rounding)
        return torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert
    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = create_dot_widened
    _make_it_fast(interpreter, tl)


def _make_it_fast(interpreter: Any, tl: Any) -> None:
    """Do once in a process what it does at every operation. Nothing can be compiled in the process then."""
    core, np_dtype = tl.core, interpreter._get_np_dtype
    np_dtype_of_scalar = functools.cache(np_dtype)

    def np_dtype_of(dtype: Any) -> Any:
        return np_dtype_of_scalar(dtype) if type(dtype) is tl.dtype else np_dtype(dtype)

    interpreter._get_np_dtype = np_dtype_of
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    _keep_types(core)
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"language": tl, "core": core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


def _keep_types(core: Any) -> None:
    """One object for all equal shapes and sizes; a type's name is made where it is asked for."""
    constexpr, unwrap, type_of_values = core.constexpr, core._unwrap_if_constexpr, core._type_for_tuple_values

    def unwrap_value(value: Any) -> Any:
        kind = type(value)
        return value if kind is int or kind is core.tensor else value.value if kind is constexpr else unwrap(value)

    def sizes_of(shape: Any) -> tuple[Any, ...]:
        sizes = shape.value if type(shape) is constexpr else shape
        return tuple([size.value if type(size) is constexpr else size for size in sizes])

    type_of_sizes = functools.cache(lambda sizes: type_of_values([constexpr(size) for size in sizes]))

    def type_of(values: Any, fields: Any = None) -> Any:
        sizes = sizes_of(values)
        if fields is None and all(type(size) is int for size in sizes):
            return type_of_sizes(sizes)
        return type_of_values(values, fields)

    @functools.cache
    def shapes_of(sizes: tuple[int, ...]) -> tuple[Any, ...]:
        """A type's shape and number of elements, and the same as its tensors have them."""
        number = core.validate_block_shape(sizes)
        return core.tuple(sizes), number, core.tuple([constexpr(size) for size in sizes]), constexpr(number)

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = sizes_of(shape)
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel, self.tensors_shape, self.tensors_numel = shapes_of(sizes)

    scalar = core.tuple([]), constexpr(1)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = (type.tensors_shape, type.tensors_numel) if type.is_block() else scalar

    no_and_yes = constexpr(False), constexpr(True)

    def equals(self: Any, other: Any) -> Any:
        return no_and_yes[self.values == list(other)]

    core._unwrap_if_constexpr = unwrap_value
    core.tuple.__eq__ = equals
    core._type_for_tuple_values = type_of
    core.block_type.__init__ = make_block_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = make_tensor
