"""How many pieces a large protobuf message has, counted before it is parsed.

A parser makes something of every piece, and 64 MiB hold 30 million empty strings: protobuf 7 (upb) parsed them in 1.3 s
and 1 GiB, with the event loop waiting; 60 million packed numbers took 0.3 s. Bytes and strings are one piece whatever
their length, so that images pass.
"""

from __future__ import annotations

from typing import Any

# Smaller messages cannot hold enough pieces: 1 MiB of empty strings takes 20 ms.
COUNTED_FROM_BYTES = 1 << 20
MOST_FIELDS = 1 << 14
# Bytes of packed numbers: a prompt of a million token ids takes 3 MB. Parsed, a number of one byte takes up to eight.
MOST_PACKED_BYTES = 4 << 20

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
STRING, MESSAGE, BYTES = 9, 11, 12


def has_too_many_pieces(message: bytes, descriptor: Any) -> bool:
    """Whether a message of the type ``descriptor`` describes is more to parse than its size allows for.

    What is not protobuf is left for the parser to refuse: it stops at the first mistake.
    """
    fields = packed = 0
    parts = [(0, len(message), descriptor)]
    while parts:
        position, end, kind = parts.pop()
        by_number = kind.fields_by_number
        while position < end:
            fields += 1
            if fields > MOST_FIELDS:
                return True
            tag, position = _varint(message, position)
            wire_type = tag & 7
            if wire_type == VARINT:
                _, position = _varint(message, position)
            elif wire_type == FIXED64:
                position += 8
            elif wire_type == FIXED32:
                position += 4
            elif wire_type == DELIMITED:
                size, position = _varint(message, position)
                field = by_number.get(tag >> 3)
                if field is not None and field.type == MESSAGE:
                    parts.append((position, min(position + size, end), field.message_type))
                elif field is not None and field.type not in (STRING, BYTES):
                    packed += min(size, end - position)
                    if packed > MOST_PACKED_BYTES:
                        return True
                position += size
    return False


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at ``position`` and where it ends; past the end of ``data``, zero."""
    value = shift = 0
    for byte in data[position : position + 10]:
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    return 0, len(data)
