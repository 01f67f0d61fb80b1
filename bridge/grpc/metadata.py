"""Request metadata: the header fields of a call that belong to the application, decoded when they are read."""

from __future__ import annotations

import binascii
from collections.abc import Iterator

from bridge.grpc.status import RawHeader

# Fields of HTTP/2 and gRPC itself; they are not metadata.
PROTOCOL_FIELDS = frozenset(
    {
        b":method",
        b":scheme",
        b":path",
        b":authority",
        b"te",
        b"content-type",
        b"content-length",
        b"accept-encoding",
        b"grpc-timeout",
        b"grpc-encoding",
        b"grpc-accept-encoding",
        b"grpc-message-type",
        b"priority",
    }
)
# A call with no other fields than these shares its connection's metadata object.
PLAIN_FIELDS = PROTOCOL_FIELDS | {b"user-agent"}


class Metadata:
    """Application header fields in arrival order; names are lower case, "-bin" values are bytes, others are str."""

    __slots__ = ("_fields",)

    def __init__(self, fields: tuple[RawHeader, ...] = ()) -> None:
        self._fields = fields

    def get(self, name: str, default: str | bytes | None = None) -> str | bytes | None:
        """The first value of ``name``, or ``default``."""
        values = self.get_all(name)
        return values[0] if values else default

    def get_all(self, name: str) -> list[str | bytes]:
        """Every value of ``name`` in arrival order."""
        raw = name.lower().encode()
        return [value for field in self._fields if field[0] == raw for value in _decode(field)]

    def items(self) -> Iterator[tuple[str, str | bytes]]:
        """Every (name, value) in arrival order."""
        for field in self._fields:
            name = field[0].decode("ascii", "replace")
            for value in _decode(field):
                yield name, value

    def __iter__(self) -> Iterator[tuple[str, str | bytes]]:
        return self.items()

    def __contains__(self, name: str) -> bool:
        raw = name.lower().encode()
        return any(field[0] == raw for field in self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"Metadata({list(self.items())!r})"


def _decode(field: RawHeader) -> list[str | bytes]:
    """The values one header field carries: binary fields may hold several, joined by commas, padded or not."""
    if not field[0].endswith(b"-bin"):
        return [field[1].decode("utf-8", "replace")]
    values: list[str | bytes] = []
    for part in field[1].split(b","):
        part = part.strip()
        try:
            values.append(binascii.a2b_base64(part + b"=" * (-len(part) % 4)))
        except binascii.Error:
            values.append(part)
    return values
