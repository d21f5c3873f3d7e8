"""Typed messages between processes as bytes: msgpack, arrays as their own bytes. Nothing is ever unpickled.

Knows no pipes, no sockets and no message.
"""

from array import array
from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from quire.request import TokenIds

_ARRAY_TYPES = (np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_))
"""An array's type is the code of its msgpack extension, counted from 1."""


def _encode_other(value: Any) -> Any:
    """What msgpack does not know: token ids and arrays become their bytes, other numpy values lists and numbers."""
    if isinstance(value, array):
        return msgspec.msgpack.Ext(1, cast("TokenIds", value).tobytes())
    if isinstance(value, np.ndarray):
        values = cast("npt.NDArray[Any]", value)
        if values.dtype in _ARRAY_TYPES:
            return msgspec.msgpack.Ext(_ARRAY_TYPES.index(values.dtype) + 1, values.tobytes())
        return values.tolist()
    if isinstance(value, np.generic):
        return cast("Any", value).item()
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def _decode_array(code: int, data: memoryview) -> Any:
    if not 1 <= code <= len(_ARRAY_TYPES) or len(data) % _ARRAY_TYPES[code - 1].itemsize:
        raise msgspec.ValidationError(f"{len(data)} bytes of extension {code} are no array")
    return np.frombuffer(data, dtype=_ARRAY_TYPES[code - 1])


def _accept_array(expected: Any, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise ValueError(f"an array should have come, but {value!r} did")
    values = cast("npt.NDArray[Any]", value)
    return array("i", values.tobytes()) if expected == TokenIds else values


encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_encode_other).encode
"""Any message as bytes. Raises TypeError: it holds something that is not data."""


def convert(value: Any, kind: Any) -> Any:
    """Data that was read without a type, as that type. Raises msgspec.ValidationError: it is not of that type."""
    return msgspec.convert(value, kind, dec_hook=_accept_array)


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """A function that reads messages of a type, or of a union of types. Arrays are read-only views of the bytes.
    It raises msgspec.MsgspecError: the bytes are no such message."""
    return msgspec.msgpack.Decoder(kind, ext_hook=_decode_array, dec_hook=_accept_array).decode
