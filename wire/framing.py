"""Messages on a byte stream: each is a 4-byte big-endian length and a body. Sans-IO."""

from __future__ import annotations

import struct

import msgspec

_LENGTH = struct.Struct(">I")


class FramingError(Exception):
    """A length over the limit; what follows it on the stream cannot be read."""


class Framing:
    """Cuts a byte stream into message bodies. `limit` is the most bytes of one body."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes; raises `FramingError`."""
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self._limit:
                raise FramingError(f"a message of {length} bytes is over the limit of {self._limit}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


def framed(message: msgspec.Struct) -> bytes:
    """A message as msgpack behind its length."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body
