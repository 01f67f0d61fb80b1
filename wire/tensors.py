"""Tensors on the wire: `[dtype, shape, data]`, without numpy.

`dtype` is numpy's array-protocol string (`<f4`) or torch's name (`float32`). `data` is the bytes themselves (msgpack
ext type 3) or the index of the frame that holds them, counted with the main msgpack frame as 0. Engines put tensors of
256 bytes or more in frames of their own (vLLM 0.27 to 0.33, VLLM_MSGPACK_ZERO_COPY_THRESHOLD).
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from bridge.wire.errors import WireError

RAW_VIEW = 3
"""Msgpack ext type of bytes that belong to a tensor. The types 1 and 2 are pickles and never read."""

INLINE_BELOW = 256
"""Tensors of fewer bytes travel inside the main frame."""

_MAX_DIMENSIONS = 8

_CODES = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float16": "e",
    "bfloat16": "bf",
    "float32": "f",
    "float64": "d",
}
"""Name → format of the `struct` module, but for bfloat16, which it does not have."""

_NUMPY = {
    "b1": "bool",
    "i1": "int8",
    "u1": "uint8",
    "i2": "int16",
    "u2": "uint16",
    "i4": "int32",
    "u4": "uint32",
    "i8": "int64",
    "u8": "uint64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
}

_SIZES = {code: 2 if code == "bf" else struct.calcsize(f"={code}") for code in _CODES.values()}


_NATIVE = {"<i4": "i", "<i8": "q", "<f4": "f", "int32": "i", "int64": "q", "float32": "f"}
"""dtype → format of a memoryview with the same bytes, for the common ones."""
if sys.byteorder != "little":
    _NATIVE = {}


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor as it came: `dtype` in the wire's own spelling, `shape`, and its bytes (C order), not copied."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def values(self) -> list[Any]:
        """Every element in C order: ints, floats or bools. bfloat16 and float16 become floats without loss."""
        native = _NATIVE.get(self.dtype)
        if native is not None:
            flat: Any = self.data.cast("B")
            return list(flat.cast(native))
        code, swapped = _format(self.dtype)
        if code == "bf":
            return _bfloat16(self.data, swapped)
        order = {"little": "<>", "big": "><"}[sys.byteorder][swapped]
        return list(struct.unpack(f"{order}{self.count}{code}", self.data))

    def rows(self) -> list[list[Any]]:
        """The elements of a two-dimensional tensor, one list a row; raises `WireError` for any other shape."""
        if len(self.shape) != 2:
            raise WireError(f"a tensor of shape {list(self.shape)} has no rows")
        count, width = self.shape
        flat = self.values()
        return [flat[index * width : (index + 1) * width] for index in range(count)]


def read_tensor(form: Any, frames: Sequence[Any]) -> Tensor:
    """The tensor a `[dtype, shape, data]` form stands for; `frames` is the whole message, main frame first.

    Raises `WireError` for a form of another shape, an unknown dtype, an index that is not one of the auxiliary frames,
    a tensor left in the engine's shared memory, and bytes that do not fill the shape exactly.
    """
    if not isinstance(form, (list, tuple)) or len(form) != 3:
        raise WireError(f"a tensor is [dtype, shape, data], not {_brief(form)}")
    dtype, shape, data = form
    if not isinstance(dtype, str):
        raise WireError(f"a tensor's dtype is a string, not {_brief(dtype)}")
    code, _ = _format(dtype)
    if not isinstance(shape, (list, tuple)) or len(shape) > _MAX_DIMENSIONS or not all(_is_size(n) for n in shape):
        raise WireError(f"a tensor's shape is a list of at most {_MAX_DIMENSIONS} sizes, not {_brief(shape)}")
    view = _bytes_of(data, frames)
    expected = math.prod(shape) * _SIZES[code]
    if view.nbytes != expected:
        raise WireError(f"a tensor {dtype}{list(shape)} is {expected} bytes, but {view.nbytes} came")
    return Tensor(dtype, tuple(shape), view)


def raw_view(code: int, data: memoryview) -> memoryview:
    """Ext hook: tensor bytes are a view into the message; any other ext type is refused, pickles above all."""
    if code != RAW_VIEW:
        raise WireError(f"an engine message has msgpack ext type {code}; only {RAW_VIEW} (raw bytes) is read")
    return data


def write_tensor(tensor: Tensor, frames: list[Any], *, inline_below: int = INLINE_BELOW) -> list[Any]:
    """The wire form of `tensor`, ready for a msgpack encoder.

    `frames` are the auxiliary frames of the message so far, without its main frame; a tensor of `inline_below` bytes or
    more is appended to them.
    """
    if tensor.data.nbytes < inline_below:
        return [tensor.dtype, tensor.shape, msgspec.msgpack.Ext(RAW_VIEW, tensor.data)]
    frames.append(tensor.data)
    return [tensor.dtype, tensor.shape, len(frames)]


def tensor_of(dtype: str, shape: Sequence[int], values: Sequence[int | float]) -> Tensor:
    """A tensor made of Python numbers, in this machine's byte order; not for bfloat16. Raises `WireError`."""
    code, swapped = _format(dtype)
    if code == "bf" or swapped or math.prod(shape) != len(values):
        raise WireError(f"cannot make a tensor {dtype}{list(shape)} of {len(values)} values")
    try:
        packed = struct.pack(f"={len(values)}{code}", *values)
    except (struct.error, OverflowError) as error:
        raise WireError(f"a value does not fit a tensor {dtype}: {error}") from None
    return Tensor(dtype, tuple(shape), memoryview(packed))


def packed_floats(values: Sequence[float]) -> bytes:
    """Numbers as float32 in little-endian order; raises `WireError` for one that does not fit."""
    try:
        return struct.pack(f"<{len(values)}f", *values)
    except (struct.error, OverflowError) as error:
        raise WireError(f"a value does not fit a float32: {error}") from None


def _format(dtype: str) -> tuple[str, bool]:
    """(format code, whether the bytes are in the other byte order) of a dtype; raises `WireError` when unknown."""
    code = _CODES.get(dtype)
    if code is not None:
        return code, False
    name = _NUMPY.get(dtype[1:]) if dtype[:1] in ("<", ">", "|", "=") else None
    if name is None:
        raise WireError(f"the tensor dtype {dtype[:32]!r} is not known")
    foreign = ">" if sys.byteorder == "little" else "<"
    return _CODES[name], dtype[0] == foreign


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _bytes_of(data: Any, frames: Sequence[Any]) -> memoryview:
    if type(data) is int:
        if not 0 < data < len(frames):
            raise WireError(f"a tensor is in frame {data}, but the message has frames 1 to {len(frames) - 1}")
        return memoryview(frames[data]).cast("B")
    if isinstance(data, (bytes, bytearray, memoryview)):
        return memoryview(data).cast("B")
    if isinstance(data, dict):
        raise WireError("a tensor was left in the engine's shared memory, which this end cannot read")
    raise WireError(f"a tensor's data is bytes or a frame index, not {_brief(data)}")


def _bfloat16(data: memoryview, swapped: bool) -> list[float]:
    """A bfloat16 is the upper half of a float32."""
    half = data.tobytes()
    wide = bytearray(2 * len(half))
    little = (sys.byteorder == "little") is not swapped
    first, second = (half[0::2], half[1::2]) if little else (half[1::2], half[0::2])
    wide[2::4], wide[3::4] = first, second
    return list(struct.unpack(f"<{len(half) // 2}f", wide))


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
