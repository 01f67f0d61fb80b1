"""The front ends of one engine: one that serves, one that takes a dead one's place, one that an upgrade replaces.

    a front end dies    its wire ids are aborted in the engine, another starts on its slot and the same listeners
    an upgrade          another starts on the free slot, serves, and only then the old one hands over and drains

The engine notices neither.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from bridge.supervisor.control import AbortRequests, EngineDown, EngineUp, RankWork, Siblings, Start, ToFrontEnd
from bridge.supervisor.engine_link import FRONT_END_SLOT, SPARE_SLOT, EngineLink
from bridge.supervisor.errors import SupervisorError
from bridge.supervisor.front_end import FrontEnd
from bridge.supervisor.lifeline import Lifeline
from bridge.supervisor.measures import Family, folded, lasting
from bridge.supervisor.policy import FRONT_END_LIMIT, front_end_delay
from bridge.wire.link import LinkError

MEASURE_LIMIT_S = 1.0
"""For a front end to say what it has counted; a scrape does not wait longer for one that is busy."""
SERVING_LIMIT_S = 30.0
"""From a front end's start, or from the engine being up, to the front end serving it."""
POLL_S = 0.01
ABORT_AGAIN_S = (0.3, 2.0)
"""An orphan's abort goes to another socket than its request, and may overtake one that still waits there."""
HELD_ABORT_S = 30.0
"""Before the abort of a request whose KV cache another engine may still write."""
SILENCE_LIMIT_S = 20.0
"""A front end speaks every second; one that is silent this long hangs, and its clients with it."""
UNREADY_AFTER_S = 5.0
"""One that is silent this long is no place to send requests to."""

_log = logging.getLogger(__name__)


class Upward(Protocol):
    """Who is told what front ends say."""

    def front_ends_ended(self, reason: str) -> None:
        """There is no front end and there will be none."""
        ...

    def front_end_work(self, front_end: FrontEnd, ranks: Sequence[RankWork]) -> None: ...

    def engine_lost(self, reason: str) -> None: ...

    def companion_silent(self, what: str) -> None: ...


class FrontEnds:
    """Everything between the engine's slots and the listeners. Runs on the event loop's thread."""

    def __init__(
        self,
        link: EngineLink,
        lifeline: Lifeline,
        make: Callable[[int, bool], Start],
        inherit: Sequence[int],
        upward: Upward,
        *,
        upgrade_drain_s: float,
    ) -> None:
        """`make(slot, listen_at_once)` is the first message of the next front end, `inherit` the listeners' descriptors.

        Streams of a replaced front end may go on for `upgrade_drain_s`.
        """
        self._link = link
        self._lifeline = lifeline
        self._make = make
        self._inherit = inherit
        self._upward = upward
        self._upgrade_drain_s = upgrade_drain_s
        self._current: FrontEnd | None = None
        self._incoming: FrontEnd | None = None
        self._old: FrontEnd | None = None
        self._up: EngineUp | None = None
        self._served = False
        self._stopping = False
        self._upgrading = False
        self._problem = ""
        self._failures = 0
        self._hurry = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._retired: list[Family] = []
        """What those that are gone have counted."""
        self.restarts = 0
        self.upgrades = 0

    # -- what the supervisor does with them ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Spawn the first; its failure before anything was served ends the run. Raises `SupervisorError`."""
        self._current = await self._spawn(FRONT_END_SLOT)
        self._task(self._watch())

    async def engine_up(self, up: EngineUp) -> None:
        """Tell them that the engine is up and wait until one serves it; raises TimeoutError."""
        self._up = up
        for front_end in self._all():
            front_end.serving.clear()
            front_end.send(up)
        async with asyncio.timeout(SERVING_LIMIT_S):
            while not self.serving:
                await asyncio.sleep(POLL_S)
        self._served = True

    def engine_down(self, reason: str) -> None:
        """Every request ends now."""
        self._up = None
        for front_end in self._all():
            front_end.serving.clear()
        self.send(EngineDown(reason=reason))

    def send(self, message: ToFrontEnd) -> None:
        for front_end in self._all():
            front_end.send(message)

    @property
    def serving(self) -> bool:
        current = self._current
        return current is not None and current.serving.is_set() and not current.failed.is_set()

    async def refresh(self) -> None:
        """Ask all front ends what they have counted by now."""
        await asyncio.gather(*(one.measure(MEASURE_LIMIT_S) for one in self._all() if not one.failed.is_set()))

    def measured(self) -> list[Family]:
        """What all front ends of the run have counted, as one."""
        return folded([self._retired, *(front_end.measures for front_end in self._all())])

    def unserved(self) -> str:
        """Why requests are not served now; "" when they are."""
        current = self._current
        if current is None or not current.serving.is_set() or current.failed.is_set():
            return "no front end serves"
        silent_s = time.monotonic() - current.heard_at
        return f"the front end has said nothing for {silent_s:.0f} s" if silent_s > UNREADY_AFTER_S else ""

    async def drain(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Let them finish for at most `grace_s` (`hurry` ends that) and exit; nothing takes their place."""
        self._stopping = True
        await asyncio.gather(*(one.drain(grace_s, hurry) for one in self._all() if not one.failed.is_set()))

    async def stop(self) -> None:
        """End them, whatever they do."""
        self._stopping = True
        self._hurry.set()
        for timer in self._timers:
            timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for front_end in self._all():
            await self._reap(front_end)

    async def upgrade(self, say: Callable[[str], None]) -> None:
        """Replace the front end by one that runs the code installed now; returns once the old one is gone.

        Raises `SupervisorError`, and the old one goes on, when another upgrade is not over yet, the engine is not up, or
        the new one does not come to serve.
        """
        old = self._current
        if self._upgrading or self._incoming is not None:
            raise SupervisorError("the front end is being replaced already; try again when that is over")
        if old is None or not self.serving or self._stopping:
            raise SupervisorError("nothing is served now; try again when the engine is up")
        self._upgrading = True
        try:
            slot = SPARE_SLOT if old.slot == FRONT_END_SLOT else FRONT_END_SLOT
            self._link.lend(slot)
            try:
                self._current = await self._bring_up(slot)
            except SupervisorError as error:
                self._reclaim(slot)
                if old.failed.is_set():
                    self._task(self._revive(old, "the old front end ended too"))
                raise SupervisorError(f"the new front end does not serve, the old one goes on: {error}") from None
            self._old = old
            self.upgrades += 1
            self._tell_siblings()
            say(f"a new front end serves (process {self._current.process.pid}); the old one hands over")
            if not old.failed.is_set():
                await old.drain(self._upgrade_drain_s, self._hurry, handover=True)
            await self._bury(old)
            self._old = None
            self._reclaim(old.slot)
            self._tell_siblings()
            _log.info("the old front end is gone")
        finally:
            self._upgrading = False

    # -- what they say -------------------------------------------------------------------------------------------------

    def ended(self, front_end: FrontEnd, reason: str) -> None:
        if self._stopping:
            return
        if front_end is self._incoming:
            self._problem = reason
        elif front_end is not self._current:
            _log.error("%s while it handed over; its streams end", reason)
        elif not self._served:
            self._upward.front_ends_ended(reason)
        elif self._incoming is None:
            self._task(self._revive(front_end, reason))

    def has_work(self, front_end: FrontEnd, ranks: Sequence[RankWork]) -> None:
        self._upward.front_end_work(front_end, ranks)

    def engine_lost(self, front_end: FrontEnd, reason: str) -> None:
        """Of the engine that this front end serves: a late word on the one before is of no interest."""
        if front_end.serving.is_set():
            self._upward.engine_lost(reason)

    def companion_silent(self, what: str) -> None:
        self._upward.companion_silent(what)

    def abort_elsewhere(self, front_end: FrontEnd, request_ids: list[str]) -> None:
        for other in self._all():
            if other is not front_end:
                other.send(AbortRequests(request_ids=request_ids))

    # -- lives and ends ------------------------------------------------------------------------------------------------

    async def _revive(self, dead: FrontEnd, reason: str) -> None:
        """Another front end on the slot of one that ended."""
        _log.error("%s; starting another", reason)
        began = time.monotonic()
        await self._bury(dead)
        while (delay := front_end_delay(self._failures)) is not None:
            await asyncio.sleep(delay)
            try:
                self._current = await self._bring_up(dead.slot)
            except SupervisorError as error:
                self._failures += 1
                reason = error.reason
                _log.error("the new front end does not serve: %s", reason)
                continue
            self._failures = 0
            self.restarts += 1
            self._tell_siblings()
            _log.info("a new front end serves after %.2f s", time.monotonic() - began)
            if self._current.failed.is_set():
                self._task(self._revive(self._current, "the new front end ended at once"))
            return
        self._upward.front_ends_ended(
            f"{FRONT_END_LIMIT} front ends in a row did not come to serve, the last: {reason}"
        )

    async def _bring_up(self, slot: int) -> FrontEnd:
        """A front end on a slot of nobody, serving the engine if there is one; raises `SupervisorError`."""
        self._problem = ""
        front_end = self._incoming = await self._spawn(slot)
        try:
            if self._up is not None:
                front_end.send(self._up)
            until = time.monotonic() + SERVING_LIMIT_S
            while not (front_end.started if self._up is None else front_end.serving).is_set():
                if front_end.failed.is_set() or time.monotonic() > until:
                    raise SupervisorError(self._problem or f"it does not serve after {SERVING_LIMIT_S:g} s")
                await asyncio.sleep(POLL_S)
        except BaseException:
            await self._reap(front_end)
            raise
        finally:
            self._incoming = None
        return front_end

    async def _spawn(self, slot: int) -> FrontEnd:
        start = self._make(slot, self._up is None)
        try:
            return await FrontEnd.spawn(start, self._inherit, self._lifeline, self)
        except OSError as error:
            raise SupervisorError(f"a front end cannot be started: {error.strerror}") from None

    async def _bury(self, front_end: FrontEnd) -> None:
        """What a front end left running is aborted in the engine; then it is ended for good."""
        if front_end.process.alive:
            await front_end.process.stop(0.0)
        now, later = front_end.left()
        if now or later:
            _log.info("%d generations of the front end that is gone are aborted in the engine", len(now) + len(later))
        self._link.abort(now)
        loop = asyncio.get_running_loop()
        at = loop.time()
        self._timers = [timer for timer in self._timers if timer.when() > at and not timer.cancelled()]
        self._timers += [loop.call_later(delay, self._link.abort, now) for delay in ABORT_AGAIN_S if now]
        if later:
            self._timers.append(loop.call_later(HELD_ABORT_S, self._link.abort, later))
        await self._reap(front_end)

    async def _reap(self, front_end: FrontEnd) -> None:
        await front_end.stop()
        self._retired = folded([self._retired, lasting(front_end.measures)])
        front_end.measures = []
        self._lifeline.forget(front_end.process)
        self._upward.front_end_work(front_end, ())

    def _reclaim(self, slot: int) -> None:
        try:
            self._link.reclaim(slot)
        except LinkError as error:
            _log.error("slot %d is not drained: %s", slot, error)

    async def _watch(self) -> None:
        """End a front end that hangs; what follows is what follows any end."""
        woke = time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            late, woke = time.monotonic() - woke > SILENCE_LIMIT_S / 2, time.monotonic()
            for front_end in self._all():
                if late:
                    front_end.heard_at = woke
                if woke - front_end.heard_at > SILENCE_LIMIT_S and front_end.process.alive:
                    _log.error("the front end on slot %d has hung for %g s; ending it", front_end.slot, SILENCE_LIMIT_S)
                    front_end.process.kill()

    def _tell_siblings(self) -> None:
        everyone = self._all()
        for front_end in everyone:
            front_end.send(Siblings(others=len(everyone) - 1))

    def _all(self) -> list[FrontEnd]:
        return [one for one in (self._current, self._incoming, self._old) if one is not None]

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("front ends are kept no more", exc_info=error)
            self._upward.front_ends_ended(f"front ends cannot be kept: {error}")
