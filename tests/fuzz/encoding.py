"""Protobuf bytes by hand: what a generated class refuses to say (duplicate fields, huge varints, wrong wire types)."""

from __future__ import annotations

import struct

VARINT, FIXED64, BYTES, GROUP, END_GROUP, FIXED32 = range(6)


def varint(value: int, length: int = 0) -> bytes:
    """`value` as a varint; a negative one as the ten bytes of its 64-bit two's complement, as protobuf does.

    `length` pads it to that many bytes, which is legal up to ten and never canonical.
    """
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    while len(out) < length:
        out[-1] |= 0x80
        out.append(0)
    return bytes(out)


def tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


def integer(number: int, value: int, length: int = 0) -> bytes:
    """An integer, bool or enum field."""
    return tag(number, VARINT) + varint(value, length)


def float32(number: int, value: float) -> bytes:
    """A float field. Values beyond its range are an error of the caller."""
    return tag(number, FIXED32) + struct.pack("<f", value)


def float64(number: int, value: float) -> bytes:
    """A double field."""
    return tag(number, FIXED64) + struct.pack("<d", value)


def data(number: int, value: bytes) -> bytes:
    """A string, bytes or message field, or packed numbers."""
    return tag(number, BYTES) + varint(len(value)) + value


def packed(number: int, values: list[int]) -> bytes:
    """A repeated integer field."""
    return data(number, b"".join(map(varint, values)))


def group(number: int, content: bytes) -> bytes:
    """A group: obsolete, and unknown to every message of the contract."""
    return tag(number, GROUP) + content + tag(number, END_GROUP)
