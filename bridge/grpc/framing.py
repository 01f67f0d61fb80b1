"""Length-prefixed gRPC messages: prefixes, message encodings, and the grpc-timeout header."""

from __future__ import annotations

import re
import zlib

PREFIX_BYTES = 5
# Prefixes of the sizes token chunks have; a larger message pays for its own.
PREFIXED = 4096
PREFIXES = [b"\0" + size.to_bytes(4, "big") for size in range(PREFIXED)]

# zlib window bits per grpc-encoding ("deflate" is the zlib format); None is no compression.
REQUEST_ENCODINGS: dict[bytes, int | None] = {b"identity": None, b"gzip": 31, b"deflate": 15}
ACCEPT_ENCODING = b"identity,deflate,gzip"

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])\Z")
_TIMEOUT_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class MessageTooLarge(Exception):
    """A message inflates past the limit."""


def prefix(size: int) -> bytes:
    """What goes before an uncompressed message of ``size`` bytes."""
    return PREFIXES[size] if size < PREFIXED else b"\0" + size.to_bytes(4, "big")


def frame(message: bytes) -> bytes:
    """``message`` with its prefix, uncompressed."""
    return prefix(len(message)) + message


def frame_gzip(message: bytes) -> bytes:
    """``message`` compressed with gzip, with its prefix."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, 31)
    packed = compressor.compress(message) + compressor.flush()
    return b"\1" + len(packed).to_bytes(4, "big") + packed


def inflate(data: bytes | memoryview, window_bits: int, limit: int) -> bytes:
    """Decompress one message of at most ``limit`` bytes.

    Raises MessageTooLarge before more than ``limit`` bytes are produced, and ValueError for data that is corrupt,
    truncated or followed by more.
    """
    inflater = zlib.decompressobj(window_bits)
    try:
        message = inflater.decompress(data, limit + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(message) > limit:
        raise MessageTooLarge
    if not inflater.eof or inflater.unused_data:
        raise ValueError("compressed message is truncated or has trailing bytes")
    return message


def parse_timeout(value: bytes) -> float:
    """Seconds of a grpc-timeout value; ValueError if it is malformed."""
    match = _TIMEOUT.match(value)
    if match is None:
        raise ValueError(f"malformed grpc-timeout {value[:32].decode('ascii', 'replace')!r}")
    return int(match[1]) * _TIMEOUT_UNITS[match[2]]
