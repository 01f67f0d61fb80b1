"""ZMTP, the protocol of ZeroMQ, sans-IO: bytes in, messages out, and back.

ZMTP 3.0 with the NULL mechanism (rfc.zeromq.org/spec/23), which libzmq 4.x speaks with such a peer; checked against libzmq
4.3.5: greetings cross, then a READY command each way, then messages. A peer may send PING (ZMQ_HEARTBEAT_IVL).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

GREETING_SIZE = 64
GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)

MORE, LONG, COMMAND = 1, 2, 4
MAX_FRAME = 1 << 30
"""Bytes of a frame; a step with the log-probabilities of a batch has a few million."""
FIRST_CAPACITY = 1 << 18
SHORT_HEADS = [(bytes((0, size)), bytes((MORE, size))) for size in range(256)]

_long = struct.Struct(">BQ")


class ZmtpError(Exception):
    """The peer is not the socket it should be, or sends what ZMTP does not allow."""


def ready(socket_type: bytes, identity: bytes | None = None) -> bytes:
    """The READY command of a socket."""
    body = b"\5READY" + _property(b"Socket-Type", socket_type)
    if identity is not None:
        body += _property(b"Identity", identity)
    return bytes((COMMAND, len(body))) + body


def encode(frames: Sequence[bytes]) -> list[bytes]:
    """A message as pieces to write one after the other; the frames are among them, uncopied."""
    pieces = []
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        size = len(frame)
        more = number < last
        pieces.append(SHORT_HEADS[size][more] if size < 256 else _long.pack(LONG | more, size))
        pieces.append(frame)
    return pieces


class Peer:
    """A peer that connected to a bound socket of `own` type, and must be one of `others`.

    Fill `room()` from the connection and tell `took(count)`; `on_message(peer, frames)` gets each message, in order.
    `replies` is what to write to the peer, the first of it before anything came.
    """

    def __init__(self, own: bytes, others: Sequence[bytes], on_message: Callable[[Peer, list[bytes]], None]) -> None:
        self.replies = bytearray(GREETING + ready(own))
        self.identity = b""
        """What the peer calls itself, once it said READY."""
        self.ready = False
        self._others = others
        self._on_message = on_message
        self._buffer = bytearray(FIRST_CAPACITY)
        self._end = 0
        self._greeted = False
        self._frames: list[bytes] = []

    def room(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return memoryview(self._buffer)[self._end :]

    def took(self, count: int) -> None:
        """`count` bytes are in what `room` returned. Raises `ZmtpError`: then the connection is of no use."""
        self._end += count
        start = 0
        if not self._greeted:
            if self._end < GREETING_SIZE:
                return
            self._greet(bytes(self._buffer[:GREETING_SIZE]))
            start = GREETING_SIZE
        self._keep(*self._read(start))

    def _greet(self, greeting: bytes) -> None:
        if greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3:
            raise ZmtpError("it does not speak ZMTP 3")
        mechanism = greeting[12:32]
        if mechanism != GREETING[12:32]:
            raise ZmtpError(f"it wants the mechanism {mechanism.rstrip(bytes(1))!r}; only NULL is spoken")
        self._greeted = True

    def _read(self, position: int) -> tuple[int, int]:
        """Take every complete frame; returns where the first incomplete one starts and how many bytes it has."""
        buffer, end = self._buffer, self._end
        view = memoryview(buffer)
        while end - position >= 2:
            flags = buffer[position]
            if flags & LONG:
                if end - position < 9:
                    break
                size, body = _long.unpack_from(buffer, position)[1], position + 9
            else:
                size, body = buffer[position + 1], position + 2
            if size > MAX_FRAME or flags > (COMMAND | LONG | MORE):
                raise ZmtpError(f"a frame has the flags {flags} and the size {size}")
            after = body + size
            if after > end:
                return position, after - position
            frame = bytes(view[body:after])
            position = after
            if flags & COMMAND:
                self._command(frame)
            elif not self.ready:
                raise ZmtpError("a message came before READY")
            elif flags & MORE:
                self._frames.append(frame)
            elif self._frames:
                frames, self._frames = [*self._frames, frame], []
                self._on_message(self, frames)
            else:
                self._on_message(self, [frame])
        return position, 0

    def _keep(self, start: int, needed: int) -> None:
        """Move an incomplete frame to the front, into a buffer that can hold it."""
        rest = self._buffer[start : self._end]
        self._end = len(rest)
        if needed > len(self._buffer):
            self._buffer = bytearray(needed)
        elif len(self._buffer) > FIRST_CAPACITY and needed <= FIRST_CAPACITY:
            self._buffer = bytearray(FIRST_CAPACITY)
        self._buffer[: len(rest)] = rest

    def _command(self, command: bytes) -> None:
        size = command[0] if command else 0
        name, body = command[1 : 1 + size], command[1 + size :]
        if name == b"READY":
            properties = _properties(body)
            kind = properties.get(b"socket-type", b"")
            if kind not in self._others:
                raise ZmtpError(f"it is a {kind.decode(errors='replace') or 'nameless'} socket")
            self.identity = properties.get(b"identity", b"")
            self.ready = True
        elif name == b"PING":
            # Two bytes of time to live, then a context to send back.
            context = body[2:]
            self.replies += bytes((COMMAND, 5 + len(context))) + b"\4PONG" + context
        elif name == b"ERROR":
            raise ZmtpError(f"it refused us: {body[1:].decode(errors='replace')}")


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _properties(body: bytes) -> dict[bytes, bytes]:
    """Names in lower case → values; raises `ZmtpError` when they do not fill the body."""
    found = {}
    position = 0
    while position < len(body):
        name_end = position + 1 + body[position]
        value_start = name_end + 4
        value_end = value_start + int.from_bytes(body[name_end:value_start], "big")
        if value_end > len(body):
            raise ZmtpError("its READY is cut short")
        found[body[position + 1 : name_end].lower()] = body[value_start:value_end]
        position = value_end
    return found
