"""What Triton's interpreter needs here, to be called before a kernel runs in it.

- Its scalars are arrays of one element, which NumPy 2.4 no longer turns into an index: a loop over a range known at run time
  would fail.
- It holds bfloat16 as integers, which its matrix product multiplies as such.
- Its matrix product is NumPy's, in which a row's last bits may depend on the rows beside it: summed in float64 they do not.
- Its float8 loses a carry where rounding reaches the next power of two.
"""

import functools
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
