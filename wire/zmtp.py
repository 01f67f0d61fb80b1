"""The receiving end of a ZMQ pipeline (PULL) without libzmq: bytes in, messages out.

libzmq reads in a thread of its own and wakes ours through an eventfd: fourteen system calls and two threads for a step
of one token. Read on the loop's thread it is three calls, and that thread is woken once.

ZMTP 3.0 with the NULL mechanism (rfc.zeromq.org/spec/23), which libzmq 4.x speaks with such a peer; checked against libzmq
4.3.5: greetings cross, then a READY command each way, then messages. A peer may send PING (ZMQ_HEARTBEAT_IVL).
"""

from __future__ import annotations

import struct
from collections import deque

GREETING_SIZE = 64
GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)
SOCKET_TYPE = b"\x0bSocket-Type\0\0\0"
READY = b"\4\x1a\5READY" + SOCKET_TYPE + b"\4PULL"

MORE, LONG, COMMAND = 1, 2, 4
MAX_FRAME = 1 << 30
"""Bytes of a frame; a step with the log-probabilities of a batch has a few million."""
FIRST_CAPACITY = 1 << 18

_long_size = struct.Struct(">Q")


class ZmtpError(Exception):
    """The peer is no PUSH socket, or sends what ZMTP does not allow."""


class PullPeer:
    """One connected PUSH peer.

    Fill `room()` from the socket and tell `took(count)`; complete messages appear in `messages`, oldest first, each a list
    of frames. `replies` is what to write to the peer, the first of it before anything came.
    """

    def __init__(self, messages: deque[list[bytes]]) -> None:
        self.messages = messages
        self.replies = bytearray(GREETING + READY)
        self._buffer = bytearray(FIRST_CAPACITY)
        self._end = 0
        self._greeted = False
        self._ready = False
        self._frames: list[bytes] = []

    def room(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return memoryview(self._buffer)[self._end :]

    def took(self, count: int) -> None:
        """`count` bytes are in what `room` returned. Raises `ZmtpError`: then the connection is of no use."""
        end = self._end = self._end + count
        if self._ready and not self._frames and len(self._buffer) == FIRST_CAPACITY:
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
            elif not self._ready:
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
        name = command[1 : 1 + command[0]] if command else b""
        if name == b"READY":
            if SOCKET_TYPE + b"\4PUSH" not in command:
                raise ZmtpError("it is no PUSH socket")
            self._ready = True
        elif name == b"PING":
            # PING, two bytes of time to live, then a context to send back.
            context = command[7:]
            self.replies += bytes((COMMAND, 5 + len(context))) + b"\4PONG" + context
        elif name == b"ERROR":
            raise ZmtpError(f"it refused us: {command[7:].decode(errors='replace')}")
