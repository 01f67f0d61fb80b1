"""Token buckets that tell a flood of HTTP/2 control frames from a client's ordinary use of them."""

from __future__ import annotations

from bridge.grpc.limits import Limits, Rate


class Bucket:
    """A token bucket on a clock that its caller reads; ``pending`` events are spent at the next check."""

    __slots__ = ("_at", "_rate", "_tokens", "pending", "reason")

    def __init__(self, reason: str, rate: Rate, now: float) -> None:
        self.reason = reason
        self.pending = 0
        self._rate = rate
        self._tokens = float(rate.burst)
        self._at = now

    def check(self, now: float) -> bool:
        """Spend what is pending; False when there were not enough tokens."""
        tokens = min(self._tokens + (now - self._at) * self._rate.per_second, float(self._rate.burst))
        self._at = now
        self._tokens = tokens - self.pending
        self.pending = 0
        return self._tokens >= 0

    def give(self, count: int) -> None:
        """Add ``count`` tokens, up to the burst."""
        self._tokens = min(self._tokens + count, float(self._rate.burst))


class Floods:
    """The buckets of one connection."""

    __slots__ = ("_all", "pings", "resets", "settings", "tiny_data", "window_updates")

    def __init__(self, limits: Limits, now: float) -> None:
        self.resets = Bucket("reset_flood", limits.resets, now)
        self.pings = Bucket("ping_flood", limits.pings, now)
        self.settings = Bucket("settings_flood", limits.settings, now)
        self.tiny_data = Bucket("tiny_data_flood", limits.tiny_data, now)
        self.window_updates = Bucket("window_update_flood", limits.window_updates, now)
        self._all = (self.resets, self.pings, self.settings, self.tiny_data, self.window_updates)

    def exceeded(self, now: float) -> str | None:
        """The reason of a bucket that ran empty."""
        for bucket in self._all:
            if bucket.pending and not bucket.check(now):
                return bucket.reason
        return None
