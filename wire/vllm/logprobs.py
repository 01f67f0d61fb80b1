"""LogprobsLists and LogprobsTensors: rows of log-probabilities as vLLM sends them (0.27 to 0.33).

Both are positional arrays of tensors: ids [rows, width], values [rows, width], ranks [rows].
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from bridge.wire.codec import Logprobs
from bridge.wire.errors import WireError
from bridge.wire.tensors import INLINE_BELOW, RAW_VIEW, Tensor, packed_floats, raw_view, read_tensor

FORMS = 64
"""Forms of one row that a reader remembers: one for each width that travels inside the main frame, and some."""

NIL = b"\xc0"


class LogprobsReader:
    """Reads one of the two structs. `positions` are those of its ids, its values and its ranks.

    One row of a known width is read without a msgpack decoder: all that differs between two of them is the numbers.
    """

    __slots__ = ("_decode", "_forms", "_name", "_positions")

    def __init__(self, name: str, positions: tuple[int, ...]) -> None:
        self._name = name
        self._positions = positions
        self._decode = msgspec.msgpack.Decoder(ext_hook=raw_view).decode
        self._forms: dict[int, RowForm] = {}
        """By the size of the msgpack."""

    def read(self, raw: msgspec.Raw | None, frames: Sequence[Any]) -> Logprobs | None:
        """The rows in a field that was left as msgpack; None for nil. Raises `WireError` for what does not fit."""
        if raw is None:
            return None
        data = bytes(raw)
        form = self._forms.get(len(data))
        if form is not None:
            found = form.read(data)
            if found is not None:
                return found
        elif data == NIL:
            return None
        return self._read(data, frames)

    def _read(self, raw: bytes, frames: Sequence[Any]) -> Logprobs:
        try:
            given = self._decode(raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise WireError(f"{self._name} cannot be decoded: {error}") from None
        positions = self._positions
        if not isinstance(given, list) or len(given) <= max(positions):
            raise WireError(f"{self._name} is an array with at least {max(positions) + 1} elements")
        token_ids, values, ranks = (read_tensor(given[position], frames) for position in positions)
        if len(token_ids.shape) != 2 or values.shape != token_ids.shape or ranks.shape != token_ids.shape[:1]:
            shapes = f"{list(token_ids.shape)}, {list(values.shape)} and {list(ranks.shape)}"
            raise WireError(f"{self._name} has tensors of the shapes {shapes}, which do not fit each other")
        form = row_form(raw, given, positions)
        if form is not None and len(self._forms) < FORMS:
            self._forms[len(raw)] = form
        return Logprobs(token_ids.shape[1], token_ids.values(), _floats(values), ranks.values())


class RowForm:
    """Where the numbers of one row stand in its msgpack, when ids are int32, values float32 and ranks int64."""

    __slots__ = ("_around", "_ids", "_rank", "_unpack", "_values", "_width")

    def __init__(self, width: int, around: tuple[bytes, bytes, bytes, bytes]) -> None:
        a, b, c, d = (f"{len(part)}s" for part in around)
        self._width = width
        self._around = around
        self._ids = slice(1, width + 1)
        self._values = width + 2
        self._rank = slice(width + 4, width + 5)
        self._unpack = struct.Struct(f"<{a}{width}i{b}{width * 4}s{c}q{d}").unpack

    def read(self, raw: bytes) -> Logprobs | None:
        """The row; None when what is around the numbers is not what it was in the row that made this form."""
        cells = self._unpack(raw)
        at = self._values
        if (cells[0], cells[at - 1], cells[at + 1], cells[at + 3]) != self._around:
            return None
        return Logprobs(self._width, cells[self._ids], cells[at], cells[self._rank])


def row_form(raw: bytes, given: list[Any], positions: tuple[int, ...]) -> RowForm | None:
    """The form of the row that `given` is decoded from; None when it has other types, more rows, or frames of its own."""
    ids, values, ranks = (given[position] for position in positions)
    width = ids[1][-1]
    expected = [["<i4", [1, width]], ["<f4", [1, width]], ["<i8", [1]]]
    if [ids[:2], values[:2], ranks[:2]] != expected or not 0 < width * 4 < INLINE_BELOW:
        return None
    if tuple(sorted(positions)) != positions:
        return None
    parts: list[bytes] = []
    rest = raw
    for _, _, data in (ids, values, ranks):
        if not isinstance(data, memoryview):
            return None
        # What comes before a tensor's bytes is found by encoding a tensor of as many zeros: its header ends the same way.
        header = msgspec.msgpack.encode(msgspec.msgpack.Ext(RAW_VIEW, bytes(len(data))))[: -len(data)]
        start = rest.find(header + bytes(data))
        if start < 0:
            return None
        parts.append(rest[: start + len(header)])
        rest = rest[start + len(header) + len(data) :]
    return RowForm(width, (parts[0], parts[1], parts[2], rest))


def _floats(values: Tensor) -> bytes:
    if values.dtype in ("<f4", "float32") and sys.byteorder == "little":
        return bytes(values.data)
    return packed_floats(values.values())
