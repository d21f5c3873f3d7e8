"""What Triton's interpreter needs here, to be called before a kernel runs in it.

- Its scalars are arrays of one element, which NumPy 2.4 no longer turns into an index: a loop over a range known at run time
  would fail.
- It holds bfloat16 as integers, which its matrix product multiplies as such.
- Its matrix product is NumPy's, in which a row's last bits may depend on the rows beside it: summed in float64 they do not.
- Its float8 loses a carry where rounding reaches the next power of two.
- It is slow without need: at every launch and every call of one function by another it looks through the whole language, it
  looks for overflows of which it then says nothing, and it makes the same types anew for every value.
"""

import dataclasses
import functools
import types
from typing import Any


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
    type_of_values = tl.core._type_for_tuple_values

    @functools.cache
    def type_of_shape(shape: tuple[int, ...]) -> Any:
        return type_of_values([tl.constexpr(size) for size in shape])

    def type_of(values: Any, fields: Any = None) -> Any:
        sizes = tuple(value.value if type(value) is tl.constexpr else value for value in values)
        if fields is None and all(type(size) is int for size in sizes):
            return type_of_shape(sizes)
        return type_of_values(values, fields)

    np_dtype = interpreter._get_np_dtype
    np_dtype_of_scalar = functools.cache(np_dtype)

    def np_dtype_of(dtype: Any) -> Any:
        return np_dtype_of_scalar(dtype) if type(dtype) is tl.dtype else np_dtype(dtype)

    tl.core._type_for_tuple_values = type_of
    interpreter._get_np_dtype = np_dtype_of
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"language": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
