"""Whether an engine that is there still works: a call through the busy loop of each rank, and how long it may take.

An engine core that hangs keeps its process, its sockets and its health (vLLM 0.32: an exception in its input thread ends
that thread alone, and nothing tells). A utility call is answered between two steps, so its answer proves the input
thread, the loop and the output thread. One call a rank is out at a time, however long it takes.

Silence counts only while the rank has work, from the last answer or from when the work began, whichever is later; prompt
tokens that wait for their first output extend the limit, because a prefill may be one long step.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bridge.supervisor.control import RankWork
from bridge.wire.link import LinkError

TICK_S = 0.5
STALL_FACTOR = 4
"""A tick this many times late means that this process was stopped or starved: nothing is judged by it."""
LOST_LIMIT = 2
"""Calls in a row that cannot be sent, because a rank's connection is gone, before the rank is."""
SILENCE_FLAG = "--silence-secs"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LivenessLimits:
    """`interval_s` between calls, 0 for none. `silence_s` plus pending prompt tokens over `prefill_tps` may pass without
    an answer; `prefill_tps` 0 is no extension."""

    interval_s: float = 5.0
    silence_s: float = 300.0
    prefill_tps: float = 2000.0


class _Pulse:
    """One rank."""

    def __init__(self, identity: bytes, now: float) -> None:
        self.identity = identity
        self.heard_at = now
        self.call_id = 0
        self.called_at = now
        self.lost = 0
        self.busy_since: float | None = None
        self.in_flight = 0
        self.prompt_tokens = 0


class Liveness:
    """Judges one engine from when it is up. Sans-IO but for `run`, which only ticks."""

    def __init__(
        self,
        ranks: Iterable[tuple[int, bytes]],
        limits: LivenessLimits,
        call: Callable[[bytes, int], None],
        on_death: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ranks` are (index, identity). `call(identity, call_id)` sends a call; raises `LinkError`."""
        self._limits = limits
        self._interval_s = min(limits.interval_s, limits.silence_s / 2)
        self._call = call
        self._on_death = on_death
        self._clock = clock
        self._ids = itertools.count(1)
        now = clock()
        self._pulses = {index: _Pulse(identity, now) for index, identity in ranks}
        self._work: dict[Hashable, Sequence[RankWork]] = {}
        self._ticked = now
        self._judged = False

    def work(self, front_end: Hashable, ranks: Sequence[RankWork]) -> None:
        """What a front end has in flight now; an empty sequence when it is gone."""
        if ranks:
            self._work[front_end] = ranks
        else:
            self._work.pop(front_end, None)
        now = self._clock()
        for index, pulse in self._pulses.items():
            entries = [one for work in self._work.values() for one in work if one.rank == index]
            pulse.in_flight = sum(one.in_flight for one in entries)
            pulse.prompt_tokens = sum(one.prompt_tokens for one in entries)
            if not pulse.in_flight:
                pulse.busy_since = None
            elif pulse.busy_since is None:
                pulse.busy_since = now

    def answered(self, call_id: int) -> None:
        """The answer to a call came."""
        for pulse in self._pulses.values():
            if pulse.call_id == call_id:
                pulse.call_id = 0
                pulse.heard_at = self._clock()

    def silence(self) -> Mapping[int, float]:
        """Seconds by rank since the rank last answered, as far as it has work; 0 without."""
        now = self._clock()
        return {index: self._silent_s(pulse, now) for index, pulse in self._pulses.items()}

    def tick(self) -> None:
        """Call what is due and judge what is late."""
        now = self._clock()
        late, self._ticked = now - self._ticked > STALL_FACTOR * TICK_S, now
        for index, pulse in self._pulses.items():
            if late:
                pulse.heard_at = now
            if not pulse.call_id and now - pulse.called_at >= self._interval_s:
                self._send(index, pulse, now)
            limit = self._limits.silence_s
            if self._limits.prefill_tps > 0:
                limit += pulse.prompt_tokens / self._limits.prefill_tps
            if pulse.call_id and self._silent_s(pulse, now) >= limit:
                extension = f", {limit - self._limits.silence_s:.1f} s of it for prompts" * (pulse.prompt_tokens > 0)
                self._die(
                    f"rank {index} does not answer: {limit:.1f} s of silence with {pulse.in_flight} requests in flight "
                    f"are the limit ({SILENCE_FLAG} {self._limits.silence_s:g}{extension})"
                )

    async def run(self) -> None:
        """Tick until cancelled; returns at once without an interval."""
        self._ticked = self._clock()
        while self._interval_s > 0:
            self.tick()
            await asyncio.sleep(TICK_S)

    def _silent_s(self, pulse: _Pulse, now: float) -> float:
        return 0.0 if pulse.busy_since is None else now - max(pulse.heard_at, pulse.busy_since)

    def _send(self, index: int, pulse: _Pulse, now: float) -> None:
        pulse.called_at = now
        call_id = next(self._ids)
        try:
            self._call(pulse.identity, call_id)
        except LinkError as error:
            pulse.lost += 1
            _log.warning("the liveness call to rank %d was not sent: %s", index, error)
            if pulse.lost >= LOST_LIMIT:
                self._die(f"lost rank {index}: it is not connected any more")
            return
        pulse.lost = 0
        pulse.call_id = call_id

    def _die(self, reason: str) -> None:
        if not self._judged:
            self._judged = True
            self._on_death(reason)
