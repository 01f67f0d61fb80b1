"""One timer for the deadlines of every call."""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.grpc.call import Call

# Rebuilding is worth it once this many entries belong to ended calls and they are the majority.
_DEAD_ENTRIES = 1024


class Deadlines:
    """A heap of deadlines with at most one pending loop timer.

    An entry of a call that ended stays in the heap until its time or until ended entries are the majority, so adding
    and ending a call cost O(log n) and O(1) amortized.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, Call]] = []
        self._sequence = 0
        self._dead = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, call: Call, deadline: float) -> None:
        """Expire ``call`` at loop time ``deadline`` unless it ends first."""
        self._sequence += 1
        heapq.heappush(self._heap, (deadline, self._sequence, call))
        if self._timer is None or deadline < self._timer_at:
            self._arm(deadline)

    def call_ended(self) -> None:
        """A call with a deadline ended before it."""
        self._dead += 1
        if self._dead > _DEAD_ENTRIES and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].ended]
            heapq.heapify(self._heap)
            self._dead = 0

    def close(self) -> None:
        """Forget every deadline."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._timer = None
        # A timer may fire up to its clock's resolution (1 ms on uvloop) early.
        now = self._loop.time() + 0.001
        # expire() runs handlers that may end other calls and so rebuild the heap.
        while self._heap and self._heap[0][0] <= now:
            call = heapq.heappop(self._heap)[2]
            if call.ended:
                self._dead -= 1
            else:
                call.expire()
        if self._heap:
            self._arm(self._heap[0][0])
