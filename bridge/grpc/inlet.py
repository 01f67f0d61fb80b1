"""Received bytes on their way into HTTP/2: in slices, with turns for the loop, and not without bound.

A read of 256 KiB may hold ten thousand requests. A connection feeds what one turn allows; what is left waits, with its
transport held back, in one queue of the server, which gets one turn per loop iteration however many connections are in
it. So the engine's steps wait for one turn of each connection at most, and in a flood for one turn of all together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.grpc.connection import Connection
    from bridge.grpc.server import Server

# A turn ends after this many seconds of slices, or calls: a unary handler runs later and costs as much again.
TURN_S = 0.001
TURN_CALLS = 16
# A slice holds no more requests than these bytes can, and one frame whole; the next one is small after one that held many.
SLICE_BYTES = 4096
SMALL_SLICE_BYTES = 512
MANY_CALLS = 8
# What a client that does not read may still send: resets and window updates, but not many requests.
PAUSED_INPUT_BYTES = 1 << 16


class Turns:
    """The connections of one server whose input waits, and the turn they share."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._waiting: deque[Inlet] = deque()

    def wait(self, inlet: Inlet) -> None:
        """Give ``inlet`` a part of the next turn, or of a later one."""
        self._waiting.append(inlet)
        if len(self._waiting) == 1:
            self._server.loop.call_soon(self._turn)

    def _turn(self) -> None:
        waiting = self._waiting
        until = self._server.monotonic() + TURN_S
        for _ in range(len(waiting)):
            # Stays in the queue while it feeds: wait() schedules no second turn.
            if waiting[0].feed(until):
                waiting.rotate(-1)
            else:
                waiting.popleft()
            if self._server.monotonic() > until:
                break
        if waiting:
            self._server.loop.call_soon(self._turn)


class Inlet:
    """Feeds a connection what its transport received; holds the transport back when that takes long."""

    __slots__ = ("_connection", "_paused_input", "_slice", "_transport", "_unread")

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport
        self._slice = SLICE_BYTES
        self._unread = b""
        self._paused_input = 0

    def received(self, data: bytes) -> None:
        """Feed ``data``, or as much of it as one turn allows."""
        connection = self._connection
        if self._unread:
            self._unread += data
        elif len(data) <= self._slice:
            connection.feed(data)
            connection.fed()
        else:
            self._unread = data
            if self.feed(connection.server.monotonic() + TURN_S):
                self._transport.pause_reading()
                connection.server.turns.wait(self)
        if connection.paused:
            self._paused_input += len(data)
            if self._paused_input > PAUSED_INPUT_BYTES:
                self._transport.pause_reading()

    def writing_paused(self) -> None:
        """The client does not take its output."""
        self._paused_input = 0

    def resume(self) -> None:
        """Read on, unless something still holds the transport back."""
        if not self._unread and not self._connection.paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Drop what was not fed."""
        self._unread = b""

    def feed(self, until: float) -> bool:
        """Feed what waits, for one turn or to ``until``; whether more is left."""
        connection, stats, monotonic = (
            self._connection,
            self._connection.server.stats,
            self._connection.server.monotonic,
        )
        view, position, first = memoryview(self._unread), 0, stats.calls_total
        while position < len(view) and not connection.closing:
            before = stats.calls_total
            size = max(self._slice, connection.frame_left)
            connection.feed(view[position : position + size])
            position += size
            self._slice = SMALL_SLICE_BYTES if stats.calls_total - before > MANY_CALLS else SLICE_BYTES
            if stats.calls_total - first > TURN_CALLS or monotonic() > until:
                break
        self._unread = b"" if connection.closing else bytes(view[position:])
        connection.fed()
        if self._unread:
            return True
        self.resume()
        return False
