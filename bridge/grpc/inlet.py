"""Received bytes on their way into HTTP/2: in slices, with turns for the loop, and not without bound."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.grpc.connection import Connection

# One slice holds no more events than this many bytes can, and the loop gets a turn after TURN_S of slices: a read of
# 256 KiB may hold thousands of requests.
SLICE_BYTES = 4096
TURN_S = 0.001
# What a client that does not read may still send.
PAUSED_INPUT_BYTES = 1 << 20


class Inlet:
    """Feeds a connection what its transport received; holds the transport back when that takes long."""

    __slots__ = ("_connection", "_paused_input", "_transport", "_unread")

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport
        self._unread = b""
        self._paused_input = 0

    def received(self, data: bytes) -> None:
        """Feed ``data``, or as much of it as one turn allows."""
        if self._unread:
            self._unread += data
        elif len(data) <= SLICE_BYTES:
            self._connection.feed(data)
            self._connection.fed()
        else:
            self._unread = data
            self._feed_unread()
        if self._connection.paused:
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

    def _feed_unread(self) -> None:
        connection = self._connection
        view, position, until = memoryview(self._unread), 0, connection.server.monotonic() + TURN_S
        while position < len(view) and not connection.closing:
            connection.feed(view[position : position + SLICE_BYTES])
            position += SLICE_BYTES
            if connection.server.monotonic() > until:
                break
        self._unread = b"" if connection.closing else bytes(view[position:])
        connection.fed()
        if self._unread:
            self._transport.pause_reading()
            connection.server.loop.call_soon(self._feed_unread)
        else:
            self.resume()
