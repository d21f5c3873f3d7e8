"""What Triton's interpreter needs here, to be called before a kernel runs in it.

- Its scalars are arrays of one element, which NumPy 2.4 no longer turns into an index: a loop over a range known at run time
  would fail.
- It holds bfloat16 as integers, which its matrix product multiplies as such.
"""

import functools
from typing import Any


@functools.cache
def repair_interpreter() -> None:
    """Once in a process; again has no effect."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    create_dot = interpreter.InterpreterBuilder.create_dot

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widen(builder: Any, handle: Any) -> Any:
        return builder.create_fp_to_fp(handle, tl.float32, None) if handle.dtype.scalar == tl.bfloat16 else handle

    def create_dot_widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widen(self, a), widen(self, b), *rest)

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = create_dot_widened
