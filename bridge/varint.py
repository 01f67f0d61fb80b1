"""Protobuf varints, cached: the pieces of byte templates for messages too frequent for protobuf objects."""

from __future__ import annotations

from typing import Any

COMMON: list[Any] = [None] * (1 << 18)
"""The varints of token ids and counts, by number; None for a number that `VARINT` was not asked for yet.

For the hottest path: looking up a list takes 10 ns, a dict with `__missing__` 35 (CPython 3.11).
"""


class Varints(dict[int, bytes]):
    """Maps an unsigned integer to its varint. Filled on first use; bounded by the token ids and counts that occur."""

    def __missing__(self, number: int) -> bytes:
        rest, out = number, bytearray()
        while rest > 0x7F:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)
        value = self[number] = bytes(out)
        if number < len(COMMON):
            COMMON[number] = value
        return value


VARINT = Varints()
