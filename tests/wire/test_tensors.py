"""Tensors of the wire, compared with numpy, and forms that are none."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.wire.errors import WireError
from bridge.wire.tensors import Tensor, read_tensor, tensor_of, write_tensor

NUMPY_DTYPES = [
    "<i4",
    "<i8",
    "|b1",
    "|i1",
    "|u1",
    "<i2",
    "<u2",
    "<u4",
    "<u8",
    "<f2",
    "<f4",
    "<f8",
    ">i4",
    ">f4",
    ">f8",
    ">f2",
]
TORCH_DTYPES = ["bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64"]


def form(dtype: str, shape: list[int], data: Any) -> list[Any]:
    return [dtype, shape, data]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES + TORCH_DTYPES)
@pytest.mark.parametrize("shape", [[], [0], [7], [2, 3], [2, 0, 3], [2, 1, 3]])
def test_values_are_those_of_numpy(dtype: str, shape: list[int]) -> None:
    array = (numpy.arange(numpy.prod(shape, dtype=int)) % 5).reshape(shape).astype(dtype)
    tensor = read_tensor(form(dtype, shape, array.tobytes()), [b"main"])
    assert tensor.values() == array.reshape(-1).tolist()
    assert tensor.shape == tuple(shape)
    assert tensor.count == array.size


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=20))
def test_a_bfloat16_is_the_upper_half_of_a_float32(values: list[float]) -> None:
    singles = numpy.array(values, dtype="<f4")
    halves = (singles.view("<u4") >> 16).astype("<u2")
    expected = (halves.astype("<u4") << 16).view("<f4")
    tensor = read_tensor(form("bfloat16", [len(values)], halves.tobytes()), [])
    assert tensor.values() == expected.tolist()


def test_rows_are_lists_in_order() -> None:
    tensor = tensor_of("int32", [3, 2], range(6))
    assert tensor.rows() == [[0, 1], [2, 3], [4, 5]]
    assert tensor_of("int32", [2, 0], []).rows() == [[], []]
    with pytest.raises(WireError, match="no rows"):
        tensor_of("int32", [6], range(6)).rows()


def test_bytes_are_not_copied() -> None:
    frame = bytearray(numpy.arange(4, dtype="<i4").tobytes())
    tensor = read_tensor(form("<i4", [4], 1), [b"main", frame])
    frame[0] = 9
    assert tensor.values() == [9, 1, 2, 3]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (None, "is .dtype, shape, data."),
        (["<i4", [1]], "is .dtype, shape, data."),
        ([4, [1], b"0000"], "dtype is a string"),
        (["<i3", [1], b"0000"], "dtype '<i3' is not known"),
        (["float8_e4m3fn", [4], b"0000"], "dtype 'float8_e4m3fn' is not known"),
        (["", [1], b"0000"], "dtype '' is not known"),
        (["<i4", 1, b"0000"], "shape is a list"),
        (["<i4", [-1], b"0000"], "shape is a list"),
        (["<i4", [1.0], b"0000"], "shape is a list"),
        (["<i4", [True], b"0000"], "shape is a list"),
        (["<i4", [1] * 9, b"0000"], "shape is a list"),
        (["<i4", [2], b"0000"], "is 8 bytes, but 4 came"),
        (["<i4", [2**62, 2**62], b"0000"], "but 4 came"),
        (["<i4", [1], 0], "frames 1 to 1"),
        (["<i4", [1], 2], "frames 1 to 1"),
        (["<i4", [1], -1], "frames 1 to 1"),
        (["<i4", [1], True], "bytes or a frame index"),
        (["<i4", [1], "0000"], "bytes or a frame index"),
        (["<i4", [1], None], "bytes or a frame index"),
        (["<i4", [1], {"sender_id": "a"}], "shared memory"),
    ],
)
def test_a_form_that_is_no_tensor_is_a_wire_error(bad: Any, text: str) -> None:
    with pytest.raises(WireError, match=text):
        read_tensor(bad, [b"main", b"0000"])


@pytest.mark.parametrize("count", [1, 63, 64, 200])
def test_what_is_written_reads_back_inline_or_in_a_frame(count: int) -> None:
    tensor = tensor_of("float32", [count], [i / 2 for i in range(count)])
    frames: list[Any] = [b"another tensor"]
    written = write_tensor(tensor, frames)
    assert len(frames) == (2 if count >= 64 else 1)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(written), ext_hook=lambda _, data: data)
    read = read_tensor(received, [b"main", *frames])
    assert (read.dtype, read.shape, read.values()) == ("float32", (count,), tensor.values())


@pytest.mark.parametrize(
    ("dtype", "shape", "values"),
    [
        ("int8", [1], [300]),
        ("int32", [1], [0.5]),
        ("int32", [2], [1]),
        ("bfloat16", [1], [1.0]),
        (">i4", [1], [1]),
        ("float16", [1], [1e9]),
        ("float32", [1], [1e300]),
    ],
)
def test_values_that_do_not_fit_a_tensor_are_refused(dtype: str, shape: list[int], values: list[float]) -> None:
    with pytest.raises(WireError):
        tensor_of(dtype, shape, values)


def test_a_tensor_can_be_made_of_any_buffer() -> None:
    assert Tensor("float16", (2,), memoryview(numpy.array([1.5, -2], dtype="<f2").tobytes())).values() == [1.5, -2.0]
