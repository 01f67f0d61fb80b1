"""One call: what a handler reads of a request and how it answers.

Messages go to the connection's ``outflow``, headers and trailers to nghttp2.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from bridge.grpc.framing import frame, frame_gzip
from bridge.grpc.metadata import Metadata
from bridge.grpc.outflow import NOTHING, Outflow
from bridge.grpc.status import (
    OK_FIELDS,
    CancelReason,
    Code,
    GrpcError,
    MetadataPairs,
    RawHeaders,
    encode_metadata,
    status_fields,
)

if TYPE_CHECKING:
    from bridge.grpc.connection import Connection
    from bridge.grpc.dispatch import RequestStream
    from bridge.grpc.service import Method

log = logging.getLogger(__name__)

RESPONSE_FIELDS: RawHeaders = [(b":status", b"200"), (b"content-type", b"application/grpc")]
# Smaller messages do not get smaller by compression.
COMPRESS_FROM_BYTES = 1024


class Call:
    """A request stream and its response. Not thread-safe: use it on the event loop's thread."""

    __slots__ = (
        "_open",
        "_trailers",
        "_waiter",
        "blocked",
        "body",
        "connection",
        "credit",
        "deadline",
        "ended",
        "framed",
        "half_closed",
        "headers_sent",
        "lingers",
        "metadata",
        "metadata_bytes",
        "on_blocked",
        "on_cancel",
        "on_writable",
        "receiving_since",
        "reply_gzip",
        "request_encoding",
        "request_id",
        "requests",
        "spec",
        "stream_id",
        "task",
        "unsent",
    )

    connection: Connection
    spec: Method
    stream_id: int
    metadata: Metadata
    # Loop time, from grpc-timeout.
    deadline: float | None
    # No window on the stream or the connection, or an unsent backlog on the transport: keep tokens instead of sending.
    blocked: bool
    # Called when ``blocked`` turns true.
    on_blocked: Callable[[], None] | None
    # Called when ``blocked`` turns false.
    on_writable: Callable[[], None] | None
    # Called once if the call ends before finish(); nothing can be sent from then on.
    on_cancel: Callable[[CancelReason], None] | None
    # finish() was called or the call was cancelled.
    ended: bool
    # What the client calls its request, for log lines; set by the handler.
    request_id: str

    def __init__(self, connection: Connection, spec: Method, stream_id: int, metadata: Metadata, credit: int) -> None:
        """``credit`` is the client's window for the stream."""
        self.connection = connection
        self.spec = spec
        self.stream_id = stream_id
        self.metadata = metadata
        # What the metadata takes of the memory for requests.
        self.metadata_bytes = 0
        self.deadline = None
        self.blocked = credit <= 0 or connection.blocked
        self.on_blocked = None
        self.on_writable = None
        self.on_cancel = None
        self.ended = False
        self.request_id = ""
        # The request: what arrived of it, since when (None once complete), and how it is compressed (zlib window bits).
        self.body: bytes | bytearray | None = None
        self.receiving_since: float | None = None
        self.half_closed = False
        self.request_encoding: int | None = None
        self.requests: RequestStream | None = None
        # The response. _open: headers are with nghttp2 and the call has not ended; framed: they are out.
        self.headers_sent = False
        self.framed = False
        # What the client's window for the stream has room for. Less than nothing after it took some back.
        self.credit = credit
        # Bytes of messages that wait for headers or windows, and the trailers behind them.
        self.unsent = NOTHING
        self._trailers: RawHeaders | None = None
        # It has ended, its stream has not.
        self.lingers = False
        self.reply_gzip = False
        self.task: asyncio.Task[None] | None = None
        self._open = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def method(self) -> str:
        """The method's path, "/package.Service/Method"."""
        return self.spec.path

    @property
    def peer(self) -> str:
        """The client's address as gRPC writes it: "ipv4:127.0.0.1:1234", "ipv6:[::1]:1234" or "unix:"."""
        return self.connection.peer

    def send(self, message: bytes, /) -> None:
        """Queue one serialized message for the next flush; a no-op once the call has ended."""
        self.send_framed(frame(message))

    def send_framed(self, framed: bytes, /) -> None:
        """As send(), for a message that already has its prefix."""
        if self._open or self._begin():
            self.connection.outflow.send(self, framed)

    @property
    def outflow(self) -> Outflow:
        """The sending half of its connection."""
        return self.connection.outflow

    def send_compressed(self, message: bytes, /) -> None:
        """As send(), with gzip when the method compresses, the client accepts it and the message is worth it."""
        if not self.reply_gzip or len(message) < COMPRESS_FROM_BYTES:
            self.send(message)
            return
        self.send_framed(frame_gzip(message))

    def send_initial_metadata(self, metadata: MetadataPairs = ()) -> None:
        """Queue the response headers now; a no-op if they are out or the call has ended."""
        if self.headers_sent or self.ended:
            return
        fields = RESPONSE_FIELDS
        if self.reply_gzip:
            fields = [*fields, (b"grpc-encoding", b"gzip")]
        if metadata:
            fields = [*fields, *encode_metadata(metadata)]
        self.headers_sent = True
        self._open = self.connection.open_response(self, fields)

    def finish(
        self, code: Code = Code.OK, message: str = "", trailers: MetadataPairs = (), details: bytes | None = None
    ) -> None:
        """End the call with a status, after what was sent; later calls are no-ops.

        ``details`` is a serialized google.rpc.Status. Without response headers so far, the status is one trailers-only
        header block.
        """
        if self.ended:
            return
        fields = OK_FIELDS if code == 0 and not message and not trailers else None
        if fields is None or details is not None:
            fields = status_fields(code, message, trailers, details)
        self._end(fields, code)

    def fail(self, error: GrpcError) -> None:
        """finish() with the status of ``error``."""
        if not self.ended:
            self.connection.server.call_failed(self, error)
        self.finish(error.code, error.message, error.trailers, error.details)

    async def writable(self) -> None:
        """Wait until the call is not blocked."""
        while self.blocked and not self.ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def expire(self) -> None:
        """The deadline passed: cancel, then DEADLINE_EXCEEDED."""
        if not self.ended:
            self.abort(CancelReason.DEADLINE, Code.DEADLINE_EXCEEDED, "deadline exceeded")

    def abort(self, reason: CancelReason, code: Code, message: str) -> None:
        """Cancel the call from the server's side and tell the client ``code``."""
        if self.cancel(reason):
            self._end(status_fields(code, message, (), None), code)

    def cancel(self, reason: CancelReason) -> bool:
        """End the call without a status and tell its handler; False if it had ended."""
        if self.ended:
            return False
        self.ended = True
        self._open = False
        on_cancel, task = self.on_cancel, self.task
        self.connection.call_ended(self, reason)
        self._release()
        if task is not None:
            task.cancel()
        if on_cancel is not None:
            try:
                on_cancel(reason)
            except Exception:
                log.exception("%s: on_cancel failed", self.spec.path)
        return True

    def refresh(self) -> None:
        """Compute ``blocked`` from the windows; tell the handler if it turned false."""
        if self.credit <= len(self.unsent) or self.connection.blocked:
            self.block()
            return
        was_blocked = self.blocked
        self.blocked = False
        if was_blocked and not self.ended:
            if self._waiter is not None:
                if not self._waiter.done():
                    self._waiter.set_result(None)
                self._waiter = None
            if self.on_writable is not None:
                try:
                    self.on_writable()
                except Exception:
                    log.exception("%s: on_writable failed", self.spec.path)

    def block(self) -> None:
        """Set ``blocked`` and tell the handler."""
        if not self.blocked:
            self.blocked = True
            if self.on_blocked is not None:
                self.on_blocked()

    def _begin(self) -> bool:
        """Queue the response headers if they are not out; whether messages can follow."""
        self.send_initial_metadata()
        return self._open

    def emptied(self) -> bool:
        """All that waited is sent; True if the trailers follow, which are with nghttp2 then."""
        fields, self._trailers = self._trailers, None
        return fields is not None and self.connection.send_trailers(self.stream_id, fields)

    def _end(self, fields: RawHeaders, code: Code) -> None:
        """Queue the trailers (or the trailers-only response) and settle the accounts."""
        connection = self.connection
        connection.server.stats.codes[self.spec.path, code.name] += 1
        if self.headers_sent and self.unsent:
            self._trailers = fields
        elif self.headers_sent:
            connection.send_trailers(self.stream_id, fields)
        else:
            self.headers_sent = True
            connection.send_headers(self.stream_id, RESPONSE_FIELDS + fields, end_stream=True)
        self._open = False
        if not self.ended:
            self.ended = True
            connection.call_ended(self, None)
            self._release()
        connection.mark_dirty()

    def _release(self) -> None:
        """Drop what an ended call no longer needs: it may stay known until its last bytes are taken."""
        self.on_blocked = None
        self.on_writable = None
        self.on_cancel = None
        self.task = None
        self._waiter = None
