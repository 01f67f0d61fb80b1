"""Protobuf varints, cached: the pieces of byte templates for messages too frequent for protobuf objects."""

from __future__ import annotations


class Varints(dict[int, bytes]):
    """Maps an unsigned integer to its varint. Filled on first use; bounded by the token ids and counts that occur."""

    def __missing__(self, number: int) -> bytes:
        rest, out = number, bytearray()
        while rest > 0x7F:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)
        value = self[number] = bytes(out)
        return value


VARINT = Varints()
