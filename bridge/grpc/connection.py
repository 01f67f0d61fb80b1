"""One HTTP/2 connection: bytes from the transport into nghttp2, its events into calls, all output into one write.

The only module that knows ngh2, which does everything but send messages (`outflow`) and count the windows for them
(`sieve`). Facts of ngh2 0.3.0 it rests on:
- trailers without a body before them are one HEADERS frame;
- events also appear while sending (a stream closes when its trailers are framed);
- a resource limit that the peer exceeds raises from ``receive_data`` and leaves an object that can say nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from ngh2 import Configuration, DenialOfServiceError, NGH2Error, Role, Setting
from ngh2 import Connection as Http2
from ngh2.enums import ErrorCode
from ngh2.events import (
    ConnectionClosed,
    DataReceived,
    Event,
    PingAcknowledged,
    PingReceived,
    RequestReceived,
    SettingsReceived,
    StreamClosed,
    StreamReset,
    TrailersReceived,
)

from bridge.grpc.call import Call
from bridge.grpc.floods import Floods
from bridge.grpc.inlet import Inlet
from bridge.grpc.intake import Intake, Refusal
from bridge.grpc.limits import Limits
from bridge.grpc.metadata import Metadata
from bridge.grpc.outflow import Outflow
from bridge.grpc.patience import Patience
from bridge.grpc.service import Method
from bridge.grpc.sieve import DEFAULT_WINDOW, MAX_WINDOW, Sieve, Update
from bridge.grpc.status import CancelReason, Code, RawHeaders

if TYPE_CHECKING:
    from bridge.grpc.server import Server

log = logging.getLogger(__name__)

# A DATA frame with a message is at least 14 bytes, and a client may answer it with a stream and a connection update.
UPDATE_PER_BYTES = 7
# A header block with all its CONTINUATION frames makes no event before its end.
EVENTLESS_BYTES = 1 << 18
# Requests come in frames as large as they can be; a client that sends many smaller ones wants to cost CPU.
TINY_DATA_BYTES = 16
# How long a connection waits for the answer to the PING between its two GOAWAYs.
GOAWAY_ROUND_TRIP_S = 1.0
# How long a connection that we close may take to accept its last bytes, and how much it may still send.
LINGER_S = 1.0
LINGER_BYTES = 1 << 20
# Of a connection that ends: 4,096 calls at once would stall everybody else's for 0.2 s.
CANCELLED_AT_ONCE = 32
# The session of connections that are lost; it knows no stream. Their own, with all it holds of their streams, goes at
# once: until the garbage collector comes by it would be tens of megabytes in a flood.
GONE = Http2(Role.SERVER)
DRAIN_PING = b"draining"
KEEPALIVE_PING = b"stillup?"


def http2_configuration(limits: Limits) -> Configuration:
    """nghttp2's own limits. Ours, which count and explain, are met first where both exist."""
    return Configuration(
        peer_max_concurrent_streams=limits.max_streams_per_connection,
        max_continuations=limits.max_continuations,
        max_inbound_header_list_size=4 * limits.max_header_list_bytes,
        max_inbound_header_count=4 * limits.max_header_fields,
        stream_reset_rate_limit=(2 * limits.resets.burst, 2 * int(limits.resets.per_second) + 1),
    )


class Connection(asyncio.Protocol):
    """The server's end of one client connection."""

    def __init__(self, server: Server) -> None:
        now = server.loop.time()
        self.server = server
        self.limits = server.limits
        self.calls: dict[int, Call] = {}
        # Ended calls whose last bytes the client has not taken.
        self.lingering = 0
        self.peer = ""
        # Output is queued and waits for a flush.
        self.dirty = False
        # No call may send: the connection's window is spent or the transport holds unsent bytes.
        self.blocked = False
        self.paused = False
        self.heard_at = now
        # The client's preface and SETTINGS are here.
        self.settled = False
        # Since when, and for how many bytes, input has made no event: half a frame, or frames that HTTP/2 ignores.
        self._eventless = 0
        self.partial_since: float | None = None
        self.intake = Intake(self)
        self._patience = Patience(self, now)
        self._floods = Floods(server.limits, now)
        self._loop = server.loop
        self._transport: asyncio.Transport | None = None
        self._h2 = Http2(Role.SERVER, server.http2_configuration)
        # nghttp2 may have something to send.
        self._control = True
        self._sieve = Sieve()
        self.outflow = Outflow(self.mark_dirty)
        self._initial_window = DEFAULT_WINDOW
        self._window_spent = False
        # Calls whose response headers are with nghttp2.
        self._opening: list[Call] = []
        # What nghttp2 told about its output, until that is written.
        self._told: list[Event] = []
        self._inlet: Inlet | None = None
        self._last_call_at = now
        self._last_stream = 0
        # Answered streams whose client still sends.
        self._early: set[int] = set()
        self._goaways = 0
        # Bytes that came after the end.
        self._unheard = 0
        self._timer: asyncio.TimerHandle | None = None
        # Nothing is read or written any more.
        self.closing = False
        self._cancelling = False

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._inlet = Inlet(self, self._transport)
        self.server.connection_opened(self)
        self.peer = _peer_name(transport.get_extra_info("peername"))
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self.drop("alpn")
            return
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limits = self.limits
        self._transport.set_write_buffer_limits(high=limits.write_buffer_bytes)
        self._h2.initiate_connection(
            {
                Setting.MAX_CONCURRENT_STREAMS: limits.max_streams_per_connection,
                Setting.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                Setting.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
                Setting.NO_RFC7540_PRIORITIES: 1,
            }
        )
        self._h2.set_local_window_size(limits.connection_window_bytes)
        self.flush()
        if self.server.stats.connections > limits.max_connections and not self.server.make_room(self):
            self.refuse("connections")
        elif self.server.draining:
            self.shut_down()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._inlet is not None:
            self._inlet.close()
            self._inlet = None
        self._cancel_calls()

    def _cancel_calls(self) -> None:
        if not self._cancelling:
            self._cancelling = True
            self._cancel_some()

    def _cancel_some(self) -> None:
        """Cancel the calls of a connection that ends, a few in each loop iteration, and let go of a lost one."""
        for call in list(islice(self.calls.values(), CANCELLED_AT_ONCE)):
            del self.calls[call.stream_id]
            call.cancel(CancelReason.CONNECTION)
            self.outflow.drop(call)
        if self.calls:
            self._loop.call_soon(self._cancel_some)
            return
        self._cancelling = False
        if self._transport is None:
            self.intake.close()
            self._h2 = GONE
            self._opening.clear()
            self.outflow.take()
            self.server.stats.calls_lingering -= self.lingering
            self.lingering = 0
            self.server.connection_closed(self)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.paused = True
        if self._inlet is not None:
            self._inlet.writing_paused()
        self._block()

    def resume_writing(self) -> None:
        self.paused = False
        if self._inlet is not None:
            self._inlet.resume()
            self.flush()
            self._unblock()

    def data_received(self, data: bytes) -> None:
        if self.closing:
            self._unheard += len(data)
            if self._unheard > LINGER_BYTES:
                self._abort()
            return
        self.heard_at = self._loop.time()
        if self._inlet is not None:
            self._inlet.received(data)

    @property
    def frame_left(self) -> int:
        """Bytes that are left of a frame which was fed in part: they hold no other request."""
        return self._sieve.skip

    def feed(self, data: bytes | memoryview) -> None:
        """Handle received bytes; fed() follows once no more are at hand."""
        if self.closing:
            return
        passed, updates = self._sieve.take(data)
        try:
            for part in passed:
                self._h2.receive_data(part)
        except NGH2Error as error:
            self._failed(error)
            return
        events: list[Event] = []
        if passed:
            self._control = True
            events = self._h2.events()
        if events or updates:
            self.partial_since = None
            self._eventless = 0
            self._handle(events)
            if self._sieve.initial_window != self._initial_window:
                self._resize_windows(self._sieve.initial_window)
            if updates:
                self._grow_windows(updates)
            reason = self._floods.exceeded(self.heard_at)
            if reason is not None:
                self.refuse(reason)
            return
        if self.partial_since is None:
            self.partial_since = self.heard_at
        self._eventless += len(data)
        if self._eventless > EVENTLESS_BYTES:
            self.refuse("ignored_frames")

    def fed(self) -> None:
        """Do what the fed bytes asked for, and write it."""
        self.intake.run_ready()
        self.flush()
        if self._window_spent:
            self._unblock()

    # Output

    def mark_dirty(self) -> None:
        """Have the server flush this connection at its next flush, or at the end of this loop iteration."""
        if not self.dirty:
            self.dirty = True
            self.server.mark_dirty(self)

    def flush(self) -> None:
        """Write everything queued, in one write; nothing while the transport is paused."""
        self.dirty = False
        transport, outflow = self._transport, self.outflow
        if transport is None or self.paused or self.closing:
            return
        control = self._control or bool(outflow.waiting)
        if control:
            try:
                self._frame_control()
            except NGH2Error as error:
                self._failed(error)
                return
        output = outflow.take()
        if output:
            data = b"".join(output)
            transport.write(data)
            self._floods.window_updates.give(len(data) // UPDATE_PER_BYTES)
        if control:
            self._after_control()

    def _frame_control(self) -> None:
        """Put nghttp2's output behind the messages before it, then the messages that waited, and their trailers.

        No message is sent on a stream that nghttp2 ended, or after the connection's end.
        """
        h2, outflow = self._h2, self.outflow
        self._control = False
        outflow.put(h2.data_to_send())
        self._told += h2.events()
        if any(isinstance(event, ConnectionClosed) for event in self._told):
            return
        for call in self._opening:
            call.framed = True
        self._opening.clear()
        for event in self._told:
            if isinstance(event, StreamClosed) and event.stream_id in self.calls:
                outflow.drop(self.calls[event.stream_id])
        if outflow.waiting and outflow.pump():
            self._control = False
            outflow.put(h2.data_to_send())
            self._told += h2.events()

    def _after_control(self) -> None:
        """Handle what nghttp2 told about what was sent."""
        events, self._told = self._told, []
        if events:
            self._handle(events)
        if self._early:
            self._reset_early()
        if self.outflow.waiting and self.outflow.window <= 0 and not self._window_spent and not self.closing:
            self._window_spent = True
            self._block()

    def open_response(self, call: Call, fields: RawHeaders) -> bool:
        """Queue the headers of a call's response; False if the stream is gone."""
        self._opening.append(call)
        return self.send_headers(call.stream_id, fields, end_stream=False)

    def send_headers(self, stream_id: int, fields: RawHeaders, *, end_stream: bool) -> bool:
        """Queue response headers; False if the stream is gone."""
        self._control = True
        try:
            self._h2.send_response(stream_id, fields, end_stream=end_stream)
        except NGH2Error:
            return False
        return True

    def send_trailers(self, stream_id: int, fields: RawHeaders) -> bool:
        """Queue trailers; False if the stream is gone."""
        self._control = True
        try:
            self._h2.send_trailers(stream_id, fields)
        except NGH2Error:
            return False
        return True

    def reset(self, stream_id: int, reason: str, code: int = ErrorCode.CANCEL) -> None:
        """Reset a stream and count why."""
        self.server.stats.refusals[reason] += 1
        self._reset(stream_id, code)

    def ping(self) -> None:
        """Ask the client for a sign of life."""
        self._control = True
        try:
            self._h2.ping(KEEPALIVE_PING)
        except NGH2Error as error:
            self._failed(error)
            return
        self.flush()

    def unsent(self) -> int:
        """Bytes the transport holds."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def _reset(self, stream_id: int, code: int) -> None:
        self._control = True
        try:
            self._h2.reset_stream(stream_id, code)
        except NGH2Error:
            return
        self.mark_dirty()

    def _reset_early(self) -> None:
        """Stop clients that still send to a call, once its answer is framed (RFC 9113, section 8.1)."""
        calls = self.calls
        for stream_id in [s for s in self._early if s not in calls or not calls[s].unsent]:
            self._early.discard(stream_id)
            self._reset(stream_id, ErrorCode.NO_ERROR)

    def _block(self) -> None:
        if not self.blocked:
            self.blocked = True
            for call in self.calls.values():
                call.block()

    def _unblock(self) -> None:
        """Let calls send again, unless the connection's window or the transport still holds them back."""
        if self.paused or self.closing:
            return
        self._window_spent = self.outflow.window <= 0
        if self.blocked and not self._window_spent:
            self.blocked = False
            for call in list(self.calls.values()):
                if not call.ended:
                    call.refresh()

    # nghttp2's events

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            handler = HANDLERS.get(type(event))
            if handler is not None:
                handler(self, event)

    def _on_request(self, event: RequestReceived) -> None:
        self._last_stream = stream_id = event.stream_id
        end = event.end_stream
        try:
            call = self.intake.open_call(stream_id, event.headers, self.heard_at)
        except Refusal as refusal:
            self.server.stats.refusals[refusal.reason] += 1
            log.debug("%s: call refused: %s", self.peer, refusal)
            self.send_headers(stream_id, refusal.fields, end_stream=True)
            if not end:
                self._early.add(stream_id)
            return
        self.calls[stream_id] = call
        self.intake.start(call, end, self.heard_at)

    def new_call(self, spec: Method, stream_id: int, metadata: Metadata) -> Call:
        """A call on a stream of this connection."""
        return Call(self, spec, stream_id, metadata, self._initial_window)

    def _on_data(self, event: DataReceived) -> None:
        data, end = event.data, event.end_stream
        call = self.calls.get(event.stream_id)
        if len(data) < TINY_DATA_BYTES and not end:
            self._floods.tiny_data.pending += 1
        if call is not None and not call.ended:
            self.intake.data(call, data, end)
        elif end:
            self._early.discard(event.stream_id)

    def _on_trailers(self, event: TrailersReceived) -> None:
        call = self.calls.get(event.stream_id)
        if call is not None and not call.ended:
            self.intake.data(call, b"", True)

    def _on_reset(self, event: StreamReset) -> None:
        self._floods.resets.pending += 1
        call = self.calls.get(event.stream_id)
        if call is not None:
            call.cancel(CancelReason.CLIENT)

    def _on_stream_closed(self, event: StreamClosed) -> None:
        call = self.calls.pop(event.stream_id, None)
        if call is not None:
            call.cancel(CancelReason.CLIENT)
            self.outflow.drop(call)
            if call.lingers:
                self.lingering -= 1
                self.server.stats.calls_lingering -= 1
        self._early.discard(event.stream_id)
        self._last_call_at = self.heard_at
        if self._goaways == 2 and not self.calls:
            self._control = True
            self.mark_dirty()

    def _grow_windows(self, updates: list[Update]) -> None:
        """The client lets us send more."""
        self._floods.window_updates.pending += len(updates)
        outflow, calls = self.outflow, self.calls
        for stream_id, increment in updates:
            if stream_id == 0:
                outflow.window += increment
                if outflow.window > MAX_WINDOW:
                    self._terminate(ErrorCode.FLOW_CONTROL_ERROR)
                    return
                continue
            call = calls.get(stream_id)
            if call is None:
                # The stream is closed, or was never opened.
                if stream_id > self._sieve.last_stream or not stream_id & 1:
                    self._terminate(ErrorCode.PROTOCOL_ERROR)
                    return
                continue
            call.credit += increment
            if call.credit > MAX_WINDOW and outflow.credit(call) > MAX_WINDOW:
                self.reset(stream_id, "window_overflow", ErrorCode.FLOW_CONTROL_ERROR)
            elif call.blocked and not call.ended:
                call.refresh()

    def _resize_windows(self, window: int) -> None:
        """The client changed the initial window of streams, and with it those of the streams it has."""
        more, self._initial_window = window - self._initial_window, window
        if more > 0:
            # A client counts a larger window from our acknowledgement on, and a smaller one no later.
            try:
                self._frame_control()
            except NGH2Error as error:
                self._failed(error)
                return
            self._control = True
        self.outflow.settle()
        for call in list(self.calls.values()):
            call.credit += more
            if call.credit > MAX_WINDOW:
                self._terminate(ErrorCode.FLOW_CONTROL_ERROR)
                return
            if not call.ended:
                call.refresh()
        self.outflow.settle()

    def _terminate(self, code: int) -> None:
        """Have nghttp2 end the connection for an error of the client."""
        self._control = True
        try:
            self._h2.terminate_connection(code)
        except NGH2Error as error:
            self._failed(error)
            return
        self.flush()

    def _on_settings(self, event: SettingsReceived) -> None:
        self._floods.settings.pending += 1
        self.settled = True

    def _on_ping(self, event: PingReceived) -> None:
        self._floods.pings.pending += 1

    def _on_ping_acknowledged(self, event: PingAcknowledged) -> None:
        if event.opaque_data == DRAIN_PING:
            self._last_goaway()

    def _on_connection_closed(self, event: ConnectionClosed) -> None:
        if event.error_code:
            flood = event.error_code == ErrorCode.ENHANCE_YOUR_CALM
            reason = "http2_limit" if flood else "http2_error"
            self.server.connection_refused(reason, self.peer, f"HTTP/2 error code {event.error_code}")
        self._hang_up()

    def call_ended(self, call: Call, reason: CancelReason | None) -> None:
        """Settle the accounts of a call that was finished (no reason) or cancelled."""
        stats = self.server.stats
        stats.calls_open -= 1
        if call.spec.lasts:
            stats.calls_lasting -= 1
        if reason is not None:
            stats.cancelled[reason.name] += 1
        if call.deadline is not None and reason is not CancelReason.DEADLINE:
            self.server.deadlines.call_ended()
        self.intake.call_ended(call)
        if reason is not CancelReason.CLIENT and reason is not CancelReason.CONNECTION:
            call.lingers = True
            self.lingering += 1
            stats.calls_lingering += 1
            if not call.half_closed:
                self._early.add(call.stream_id)
        else:
            stats.codes[call.spec.path, Code.CANCELLED.name] += 1

    # Ends

    def refuse(self, reason: str) -> None:
        """End the connection with a GOAWAY that names ``reason``."""
        if self.closing:
            return
        self.server.connection_refused(reason, self.peer)
        if self._transport is not None:
            try:
                self._h2.send_goaway(ErrorCode.ENHANCE_YOUR_CALM, debug_data=reason.encode())
                # Messages first: trailers may be with nghttp2 already.
                self.outflow.put(self._h2.data_to_send())
                self._transport.write(b"".join(self.outflow.take()))
            except NGH2Error as error:
                log.debug("%s: no GOAWAY: %s", self.peer, error)
        self._hang_up()

    def drop(self, reason: str) -> None:
        """End the connection of a client that does not listen."""
        self.server.connection_refused(reason, self.peer)
        self.closing = True
        self._abort()

    def _failed(self, error: Exception) -> None:
        """nghttp2 gave the connection up and cannot say so itself."""
        if self.closing:
            return
        flood = isinstance(error, DenialOfServiceError)
        reason = "http2_limit" if flood else "http2_error"
        self.server.connection_refused(reason, self.peer, str(error))
        if self._transport is not None and not self.paused:
            code = ErrorCode.ENHANCE_YOUR_CALM if flood else ErrorCode.PROTOCOL_ERROR
            debug_data = reason.encode()
            self._transport.write(
                struct.pack(">BHBBIII", 0, 8 + len(debug_data), 7, 0, 0, self._last_stream, code) + debug_data
            )
        self._hang_up()

    def _hang_up(self) -> None:
        """End our side and wait up to LINGER_S for the client's: closing on unread input would reset away our GOAWAY."""
        self.closing = True
        transport = self._transport
        if transport is None:
            return
        try:
            if transport.can_write_eof():
                transport.write_eof()
            else:
                transport.close()
        except OSError as error:
            log.debug("%s: %s", self.peer, error)
            transport.abort()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_S, self._abort)
        self._cancel_calls()

    def _abort(self) -> None:
        """Reset the connection: after a plain close the kernel would keep our unsent bytes for the client for minutes."""
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    def shut_down(self, reason: str | None = None) -> None:
        """First GOAWAY: open no more streams. The second follows one round trip later."""
        if self._goaways or self.closing:
            return
        if reason is not None:
            self.server.stats.refusals[reason] += 1
        self._goaways = 1
        self._control = True
        try:
            self._h2.send_shutdown_notice()
            self._h2.ping(DRAIN_PING)
        except NGH2Error as error:
            self._failed(error)
            return
        self._timer = self._loop.call_later(GOAWAY_ROUND_TRIP_S, self._last_goaway)
        self.flush()

    def _last_goaway(self) -> None:
        """Second GOAWAY: the streams seen so far finish, then nghttp2 closes the connection."""
        if self._goaways != 1 or self.closing:
            return
        self._goaways = 2
        self._control = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._h2.send_goaway()
        except NGH2Error as error:
            self._failed(error)
            return
        self.flush()

    def close(self) -> None:
        """Write what is queued and close."""
        self.flush()
        if not self.closing:
            self._hang_up()

    # What the server asks

    def idle_since(self, now: float) -> float:
        """When the last call ended; ``now`` while there is one."""
        busy = any(not call.ended for call in self.calls.values())
        return now if busy else self._last_call_at

    def check(self, now: float) -> None:
        """Enforce the time limits."""
        if not self.closing:
            self._patience.check(now)


HANDLERS: dict[type[Event], Callable[[Connection, Any], None]] = {
    RequestReceived: Connection._on_request,
    DataReceived: Connection._on_data,
    TrailersReceived: Connection._on_trailers,
    StreamReset: Connection._on_reset,
    StreamClosed: Connection._on_stream_closed,
    SettingsReceived: Connection._on_settings,
    PingReceived: Connection._on_ping,
    PingAcknowledged: Connection._on_ping_acknowledged,
    ConnectionClosed: Connection._on_connection_closed,
}


def _peer_name(address: Any) -> str:
    """gRPC's name for a socket address."""
    if not isinstance(address, tuple):
        return "unix:"
    host, port = address[0], address[1]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
