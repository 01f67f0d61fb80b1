"""The time limits of one connection, checked about once a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.grpc.status import Code, GrpcError

if TYPE_CHECKING:
    from bridge.grpc.connection import Connection


class Patience:
    """Ends connections and calls that take too long at something a client must do."""

    __slots__ = ("_connection", "_limits", "_opened_at", "_paused_since", "_pinged_at", "_stuck", "_unsent")

    def __init__(self, connection: Connection, now: float) -> None:
        self._connection = connection
        self._limits = connection.limits
        self._opened_at = now
        self._pinged_at: float | None = None
        # Since when the transport has been paused without any progress, at which size of its buffer.
        self._paused_since: float | None = None
        self._unsent = 0
        # Ended calls whose last bytes the client does not take, and since when.
        self._stuck: dict[int, float] = {}

    def check(self, now: float) -> None:
        """Enforce every limit."""
        connection, limits = self._connection, self._limits
        if not connection.settled:
            if now - self._opened_at > limits.preface_s:
                connection.refuse("preface_timeout")
        elif connection.partial_since is not None and now - connection.partial_since > limits.frame_s:
            connection.refuse("slow_frame")
        elif self._reader_is_stuck(now):
            connection.drop("slow_reader")
        elif not self._is_alive(now):
            connection.drop("keepalive_timeout")
        elif limits.idle_connection_s and now - connection.idle_since(now) > limits.idle_connection_s:
            connection.shut_down("idle")
        else:
            self._refuse_slow_requests(now)
            self._reset_stuck_streams(now)

    def _reader_is_stuck(self, now: float) -> bool:
        if not self._connection.paused:
            self._paused_since = None
            return False
        unsent = self._connection.unsent()
        if self._paused_since is None or unsent < self._unsent:
            self._paused_since = now
        self._unsent = unsent
        return now - self._paused_since > self._limits.slow_reader_s

    def _is_alive(self, now: float) -> bool:
        """Whether the client answers within the keepalive limits; sends the PING when it has been quiet."""
        heard_at = self._connection.heard_at
        if self._pinged_at is not None:
            if heard_at < self._pinged_at:
                return now - self._pinged_at <= self._limits.keepalive_timeout_s
            self._pinged_at = None
        if now - heard_at > self._limits.keepalive_s:
            self._pinged_at = now
            self._connection.ping()
        return True

    def _refuse_slow_requests(self, now: float) -> None:
        intake, limit = self._connection.intake, self._limits.request_s
        slow = [
            c for c in intake.receiving.values() if c.receiving_since is not None and now - c.receiving_since > limit
        ]
        for call in slow:
            error = GrpcError(Code.DEADLINE_EXCEEDED, f"the request was not complete after {limit:g} s")
            intake.refuse(call, error, "slow_request")

    def _reset_stuck_streams(self, now: float) -> None:
        ended = [stream_id for stream_id, call in self._connection.calls.items() if call.ended]
        self._stuck = {stream_id: self._stuck.get(stream_id, now) for stream_id in ended}
        for stream_id, since in self._stuck.items():
            if now - since > self._limits.slow_reader_s:
                self._connection.reset(stream_id, "slow_stream")
