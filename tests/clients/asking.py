"""What the tests ask of every client, whatever library it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

Pairs = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True)
class Certificates:
    """PEM files: the authority, and the client's own certificate and key when it shows one."""

    authority: Path
    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True)
class Connect:
    """Where a client connects and how. `address` is `HOST:PORT`, `[IPV6]:PORT` or `unix:PATH`."""

    address: str
    tls: Certificates | None = None
    gzip: bool = False
    ping_every_s: float | None = None
    """A keep-alive PING for each such time without traffic."""


@dataclass(frozen=True)
class How:
    """How one call is made."""

    metadata: Pairs = ()
    timeout_s: float | None = 30.0
    wait_for_ready: bool = False


PLAIN = How()


class CallError(Exception):
    """A call that did not end with OK; `code` is the status code's name."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Stream(Protocol):
    """A server-streaming call. Iterating gives its messages and raises `CallError` unless it ends with OK."""

    def __iter__(self) -> Iterator[bytes]: ...

    def cancel(self) -> None: ...


class Client(Protocol):
    """A gRPC client that moves serialized messages, over one connection."""

    def __init__(self, where: Connect) -> None: ...

    def unary(self, path: str, request: bytes, how: How = PLAIN) -> bytes:
        """The reply; raises `CallError`."""
        ...

    def stream(self, path: str, request: bytes, how: How = PLAIN) -> Stream: ...

    def close(self) -> None: ...


CODES = [code.name for code in sorted(grpc.StatusCode, key=lambda code: int(code.value[0]))]
"""Names of the status codes, by number."""
