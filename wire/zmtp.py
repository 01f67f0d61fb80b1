"""Our end of a ZMQ connection (PULL, ROUTER) without libzmq: bytes in, messages out, and messages as bytes.

libzmq reads in a thread of its own and wakes ours through an eventfd: fourteen system calls and two threads for a step
of one token. Read on the loop's thread it is three calls, and that thread is woken once. Sent by libzmq, a request costs
20 us of CPU in two threads; written on the loop's thread, 3.

ZMTP 3.0 with the NULL mechanism (rfc.zeromq.org/spec/23), which libzmq 4.x speaks with such a peer; checked against libzmq
4.3.5: greetings cross, then a READY command each way, then messages. A peer may send PING (ZMQ_HEARTBEAT_IVL).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence

GREETING_SIZE = 64
GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)

MORE, LONG, COMMAND = 1, 2, 4
MAX_FRAME = 1 << 30
"""Bytes of a frame; a step with the log-probabilities of a batch has a few million."""
FIRST_CAPACITY = 1 << 18

SHORT_HEADS = [(bytes((0, size)), bytes((MORE, size))) for size in range(256)]

_long_size = struct.Struct(">Q")
_long_head = struct.Struct(">BQ")


class ZmtpError(Exception):
    """The peer is not the kind of socket it should be, or sends what ZMTP does not allow."""


def ready(socket_type: bytes) -> bytes:
    """The READY command of a socket."""
    body = b"\5READY\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    return bytes((COMMAND, len(body))) + body


def encode(frames: Sequence[bytes]) -> list[bytes]:
    """A message as pieces to write one after the other; the frames are among them, uncopied."""
    pieces = []
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        size = len(frame)
        more = number < last
        pieces.append(SHORT_HEADS[size][more] if size < 256 else _long_head.pack(LONG | more, size))
        pieces.append(frame)
    return pieces


class Peer:
    """A connected peer of a socket of type `own`; it must be a socket of type `other`.

    Fill `room()` from the socket and tell `took(count)`; complete messages appear in `messages`, oldest first, each a list
    of frames. `replies` is what to write to the peer, the first of it before anything came.
    """

    def __init__(self, messages: deque[list[bytes]], own: bytes, other: bytes) -> None:
        self.messages = messages
        self.replies = bytearray(GREETING + ready(own))
        self.identity = b""
        """What the peer calls itself, once it is ready."""
        self.ready = False
        self._other = other
        self._buffer = bytearray(FIRST_CAPACITY)
        self._end = 0
        self._greeted = False
        self._frames: list[bytes] = []

    def room(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return memoryview(self._buffer)[self._end :]

    def took(self, count: int) -> None:
        """`count` bytes are in what `room` returned. Raises `ZmtpError`: then the connection is of no use."""
        end = self._end = self._end + count
        if self.ready and not self._frames and len(self._buffer) == FIRST_CAPACITY:
            # A step as it mostly comes: one whole message of one frame.
            buffer = self._buffer
            flags = buffer[0]
            body = 2 if not flags else 9
            if end == body + (_long_size.unpack_from(buffer, 1)[0] if flags else buffer[1]) and flags in (0, LONG):
                self.messages.append([bytes(memoryview(buffer)[body:end])])
                self._end = 0
                return
        start = self._greeting() if not self._greeted else 0
        if self._greeted:
            self._keep(*self._read(start))

    def _greeting(self) -> int:
        if self._end < GREETING_SIZE:
            return 0
        greeting = self._buffer
        if greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3:
            raise ZmtpError("it does not speak ZMTP 3")
        if bytes(greeting[12:32]) != GREETING[12:32]:
            raise ZmtpError(f"it wants the mechanism {bytes(greeting[12:32]).rstrip(bytes(1))!r}; only NULL is spoken")
        self._greeted = True
        return GREETING_SIZE

    def _read(self, position: int) -> tuple[int, int]:
        """Take every complete frame; returns where the first incomplete one starts and how many bytes it has."""
        buffer, end = self._buffer, self._end
        view = memoryview(buffer)
        while end - position >= 2:
            flags = buffer[position]
            if flags & LONG:
                if end - position < 9:
                    break
                size, body = _long_size.unpack_from(buffer, position + 1)[0], position + 9
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
                self.messages.append([*self._frames, frame])
                self._frames = []
            else:
                self.messages.append([frame])
        return position, 0

    def _keep(self, start: int, needed: int) -> None:
        """Move an incomplete frame to the front, into a buffer that can hold it."""
        if start == self._end and len(self._buffer) == FIRST_CAPACITY:
            self._end = 0
            return
        rest = self._buffer[start : self._end]
        self._end = len(rest)
        if max(needed, 1) > len(self._buffer):
            self._buffer = bytearray(needed)
        elif len(self._buffer) > FIRST_CAPACITY and needed <= FIRST_CAPACITY:
            self._buffer = bytearray(FIRST_CAPACITY)
        self._buffer[: len(rest)] = rest

    def _command(self, command: bytes) -> None:
        size = command[0] if command else 0
        name, body = command[1 : 1 + size], command[1 + size :]
        if name == b"READY":
            properties = _properties(body)
            if properties.get(b"socket-type") != self._other:
                raise ZmtpError(f"it is no {self._other.decode()} socket")
            self.identity = properties.get(b"identity", b"")
            self.ready = True
        elif name == b"PING":
            # Two bytes of time to live, then a context to send back.
            context = body[2:]
            self.replies += bytes((COMMAND, 5 + len(context))) + b"\4PONG" + context
        elif name == b"ERROR":
            raise ZmtpError(f"it refused us: {body[1:].decode(errors='replace')}")


def _properties(body: bytes) -> dict[bytes, bytes]:
    """Names in lower case → values; raises `ZmtpError` when they do not fill the body."""
    found = {}
    position = 0
    while position < len(body):
        name_end = position + 1 + body[position]
        start = name_end + 4
        end = start + int.from_bytes(body[name_end:start], "big")
        if end > len(body):
            raise ZmtpError("its READY is cut short")
        found[body[position + 1 : name_end].lower()] = body[start:end]
        position = end
    return found
