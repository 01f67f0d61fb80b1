"""gRPC status: codes, the error a handler raises, and how both are written as HTTP/2 header fields.

Source of the encodings: the gRPC over HTTP/2 protocol document (grpc/doc/PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

import base64
import enum
import re
from collections.abc import Iterable

RawHeader = tuple[bytes, bytes]
RawHeaders = list[RawHeader]
MetadataPairs = Iterable[tuple[str, str | bytes]]

# C-core refuses more than 8 KiB of trailing metadata by default; a status message must leave room for the rest of it.
MAX_MESSAGE_CHARACTERS = 2048


class Code(enum.IntEnum):
    """The canonical gRPC status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class CancelReason(enum.Enum):
    """Why a call ended before its handler finished it."""

    CLIENT = "client reset the stream"
    CONNECTION = "connection lost"
    DEADLINE = "deadline exceeded"
    SHUTDOWN = "server shut down"


class GrpcError(Exception):
    """The status a handler wants its call to end with.

    ``details`` is a serialized ``google.rpc.Status`` (sent as grpc-status-details-bin); ``trailers`` is extra trailing
    metadata, with bytes values for names that end in "-bin".
    """

    refusal = False
    """Whether the handler did nothing for the call, so that it counts as refused."""

    def __init__(
        self, code: Code, message: str = "", details: bytes | None = None, trailers: MetadataPairs = ()
    ) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.details = details
        self.trailers = trailers

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


_UNSAFE = re.compile(rb"[^\x20-\x24\x26-\x7e]")


def percent_encode(message: str) -> bytes:
    """The grpc-message form of ``message``: UTF-8 with everything but printable ASCII, and "%", as %XX."""
    raw = message[:MAX_MESSAGE_CHARACTERS].encode("utf-8", "replace")
    return _UNSAFE.sub(lambda match: b"%%%02X" % match[0][0], raw)


_NAME = re.compile(r"[0-9a-z_.\-]+\Z")
_VALUE = re.compile(rb"[\x20-\x7e]*\Z")


def encode_metadata(pairs: MetadataPairs) -> RawHeaders:
    """Header fields for ``pairs``; a "-bin" name takes bytes and is sent as unpadded base64.

    Raises ValueError for a name that is not a lower-case gRPC header name or is reserved, and for a text value outside
    printable ASCII.
    """
    fields: RawHeaders = []
    for name, value in pairs:
        if not _NAME.match(name) or name.startswith("grpc-"):
            raise ValueError(f"metadata name {name!r} is not allowed")
        if name.endswith("-bin"):
            raw = value.encode() if isinstance(value, str) else value
            fields.append((name.encode(), base64.b64encode(raw).rstrip(b"=")))
            continue
        raw = value if isinstance(value, bytes) else value.encode("utf-8")
        if not _VALUE.match(raw):
            raise ValueError(f"metadata value of {name!r} is not printable ASCII")
        fields.append((name.encode(), raw.strip(b" ")))
    return fields


OK_FIELDS: RawHeaders = [(b"grpc-status", b"0")]


def status_fields(code: Code, message: str, trailers: MetadataPairs, details: bytes | None) -> RawHeaders:
    """The trailing header fields of a call that ends with ``code``."""
    fields: RawHeaders = [(b"grpc-status", b"%d" % code)]
    if message:
        fields.append((b"grpc-message", percent_encode(message)))
    if details is not None:
        fields.append((b"grpc-status-details-bin", base64.b64encode(details).rstrip(b"=")))
    fields.extend(encode_metadata(trailers))
    return fields
