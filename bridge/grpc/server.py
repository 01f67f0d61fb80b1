"""The gRPC server: listeners, connections, the flush of a step, and the drain."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from bridge.grpc.call import Call
from bridge.grpc.connection import Connection, http2_configuration
from bridge.grpc.deadlines import Deadlines
from bridge.grpc.inlet import Turns
from bridge.grpc.limits import Limits
from bridge.grpc.service import Method, Service
from bridge.grpc.stats import ServerStats
from bridge.grpc.status import CancelReason, Code, GrpcError

log = logging.getLogger(__name__)

CHECK_S = 1.0
DRAIN_POLL_S = 0.02
CLOSE_S = 2.0
# A connection that has been without calls this long gives way to a new one at max_connections.
GIVES_WAY_AFTER_S = 10.0
# An attack must not fill the log.
LOG_S = 10.0
# Large compressed requests inflated at once, off the loop.
INFLATING = 2


class Server:
    """Serves gRPC services on sockets that somebody else bound.

    Create it on the event loop it serves on. ``tls`` is a server context that offers "h2" (``bridge.grpc.tls``).
    """

    def __init__(
        self,
        services: Iterable[Service],
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or Limits()
        self.loop = asyncio.get_running_loop()
        self.monotonic = monotonic
        self.stats = ServerStats()
        self.deadlines = Deadlines(self.loop)
        self.turns = Turns(self)
        # Calls whose request is not with its handler yet, the oldest first.
        self.waiting: dict[Call, Call] = {}
        self.http2_configuration = http2_configuration(self.limits)
        self.inflating = asyncio.Semaphore(INFLATING)
        self.parsing = asyncio.Lock()
        self.draining = False
        self.methods: dict[bytes, Method] = {}
        for service in services:
            for method in service.methods():
                path = method.path.encode("ascii")
                if path in self.methods:
                    raise ValueError(f"two services have the method {method.path}")
                self.methods[path] = method
        self._tls = tls
        self._listeners: list[asyncio.Server] = []
        self._connections: set[Connection] = set()
        self._dirty: list[Connection] = []
        self._flush_scheduled = False
        self._corked = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._logged_at: dict[str, float] = {}
        self._checker: asyncio.TimerHandle | None = None

    async def serve(self, sock: socket.socket) -> None:
        """Accept connections on ``sock``, which is bound and listening, until drain() or close().

        May be called for several sockets, TCP and unix. The server owns the descriptor it is given and closes it; other
        descriptors of the same listener, in this process or another, are not affected.
        """
        if sock.family == socket.AF_UNIX:
            listener = await self.loop.create_unix_server(
                lambda: Connection(self), sock=sock, ssl=self._tls, backlog=self.limits.backlog, **self._tls_timeout()
            )
        else:
            listener = await self.loop.create_server(
                lambda: Connection(self), sock=sock, ssl=self._tls, backlog=self.limits.backlog, **self._tls_timeout()
            )
        self._listeners.append(listener)
        if self._checker is None:
            self._checker = self.loop.call_later(CHECK_S, self._check)

    def _tls_timeout(self) -> dict[str, Any]:
        return {} if self._tls is None else {"ssl_handshake_timeout": self.limits.preface_s}

    def cork(self) -> None:
        """Schedule no flush until flush() is called, which the caller will do before it returns to the loop."""
        self._corked = True

    def flush(self) -> None:
        """Write every connection with queued output, each in one write. Called once after each drain of engine steps."""
        self._corked = False
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            if connection.dirty:
                connection.flush()

    def mark_dirty(self, connection: Connection) -> None:
        """Flush ``connection`` at the next flush(), which comes at the end of this loop iteration at the latest."""
        self._dirty.append(connection)
        if not self._flush_scheduled and not self._corked:
            self._flush_scheduled = True
            self.loop.call_soon(self._scheduled_flush)

    def _scheduled_flush(self) -> None:
        self._flush_scheduled = False
        self.flush()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a handler as a task that the server keeps alive."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self, grace_s: float) -> int:
        """Finish gracefully; returns how many calls were cut off after ``grace_s`` seconds.

        Stops accepting; sends each connection the first GOAWAY and, a round trip later, the last. Calls that race the
        first are still served (grpcio and tonic fail a call that is reset, even with REFUSED_STREAM); those after the
        last one were never processed, and clients send them elsewhere unasked. Endless streams end with UNAVAILABLE at
        once, and what is left after the grace too.
        """
        self.draining = True
        self._stop_listening()
        for connection in list(self._connections):
            for call in list(connection.calls.values()):
                if call.spec.endless:
                    call.abort(CancelReason.SHUTDOWN, Code.UNAVAILABLE, "the server is draining")
            connection.shut_down()
        deadline = self.monotonic() + grace_s
        while self._connections and self.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        cut = 0
        for connection in list(self._connections):
            for call in list(connection.calls.values()):
                if not call.ended:
                    cut += 1
                    call.abort(CancelReason.SHUTDOWN, Code.UNAVAILABLE, "the server is shutting down")
        await self.close()
        return cut

    async def close(self) -> None:
        """Stop accepting, cancel what is open, and close every connection after its queued output."""
        self.draining = True
        self._stop_listening()
        if self._checker is not None:
            self._checker.cancel()
            self._checker = None
        for connection in list(self._connections):
            for call in list(connection.calls.values()):
                call.abort(CancelReason.SHUTDOWN, Code.UNAVAILABLE, "the server is shutting down")
            connection.close()
        deadline = self.monotonic() + CLOSE_S
        while (self._connections or self._tasks) and self.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        for task in list(self._tasks):
            task.cancel()
        self.deadlines.close()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _check(self) -> None:
        self._checker = self.loop.call_later(CHECK_S, self._check)
        now = self.loop.time()
        for connection in list(self._connections):
            connection.check(now)

    def make_room(self, newcomer: Connection) -> bool:
        """At max_connections: end the connection that has gone longest without a call; False if none may be ended."""
        now = self.loop.time()
        others = (connection for connection in self._connections if connection is not newcomer)
        oldest = min(others, key=lambda connection: connection.idle_since(now), default=None)
        if oldest is None or now - oldest.idle_since(now) < GIVES_WAY_AFTER_S:
            return False
        oldest.refuse("gave_way")
        return True

    def make_room_for_a_call(self) -> bool:
        """At max_calls: end the call that has waited longest for the rest of its request; False if none waits."""
        waiting = next(iter(self.waiting), None)
        if waiting is None:
            return False
        message = f"gave way at the server's limit of {self.limits.max_calls} calls: its request was not complete"
        waiting.connection.intake.refuse(waiting, GrpcError(Code.RESOURCE_EXHAUSTED, message), "call_gave_way")
        return True

    def connection_refused(self, reason: str, peer: str, detail: str = "") -> None:
        """Count a connection that a limit or an error ends; log the first of its kind in each LOG_S."""
        self.stats.refusals[reason] += 1
        now = self.monotonic()
        if now - self._logged_at.get(reason, -LOG_S) >= LOG_S:
            self._logged_at[reason] = now
            count = self.stats.refusals[reason]
            log.warning("%s: connection ended: %s (%d so far)", peer, detail or reason, count)

    def call_failed(self, call: Call, error: GrpcError) -> None:
        """Count and tell a call that ends with a handler's error."""
        if error.refusal:
            self.stats.refused[call.spec.path, error.code.name] += 1
        if log.isEnabledFor(logging.DEBUG):
            fields = {
                "method": call.spec.path,
                "request_id": call.request_id,
                "peer": call.peer,
                "code": error.code.name,
            }
            name = f" request {call.request_id!r}" if call.request_id else ""
            log.debug("%s: %s%s failed: %s", call.peer, call.spec.path, name, error, extra={"fields": fields})

    def connection_opened(self, connection: Connection) -> None:
        """Called by a connection whose transport is made."""
        self._connections.add(connection)
        self.stats.connections += 1
        self.stats.connections_total += 1

    def connection_closed(self, connection: Connection) -> None:
        """Called by a connection whose transport is gone."""
        self._connections.discard(connection)
        self.stats.connections -= 1
