"""One front end as the supervisor sees it: its process, its control channel, and what it has said."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from bridge.supervisor import ledger
from bridge.supervisor.channel import ControlChannel, compatible, supervisor_end
from bridge.supervisor.control import (
    CONTROL_VERSION,
    AbortRequests,
    CompanionSilent,
    Drain,
    Drained,
    EngineLost,
    Fatal,
    Measure,
    Measured,
    RankWork,
    Serving,
    Start,
    Started,
    ToFrontEnd,
    ToSupervisor,
    Work,
)
from bridge.supervisor.lifeline import Lifeline
from bridge.supervisor.measures import Family
from bridge.supervisor.process import Process

MODULE = "bridge.frontend"
DRAIN_MARGIN_S = 3.0
"""On top of a drain's grace: the front end cuts the streams itself at the grace, then closes its connections."""
STOP_GRACE_S = 2.0
LAST_WORDS_S = 0.5
"""For what a front end said before it ended to be heard: its end may be seen first."""

_log = logging.getLogger(__name__)


class Owner(Protocol):
    """Who is told what a front end says."""

    def ended(self, front_end: FrontEnd, reason: str) -> None:
        """It ended, or said that it cannot serve. Called once, and not for a drain that was asked for."""
        ...

    def has_work(self, front_end: FrontEnd, ranks: Sequence[RankWork]) -> None: ...

    def engine_lost(self, front_end: FrontEnd, reason: str) -> None: ...

    def abort_elsewhere(self, front_end: FrontEnd, request_ids: list[str]) -> None: ...

    def companion_silent(self, what: str) -> None: ...


class FrontEnd:
    """A running front end on one slot. Its `ledger` outlives it, until `stop`."""

    def __init__(
        self, start: Start, ledger_fd: int, process: Process, channel: ControlChannel[ToSupervisor], owner: Owner
    ) -> None:
        self.slot = start.slot
        self.incarnation = start.incarnation
        self.process = process
        self.started = asyncio.Event()
        self.serving = asyncio.Event()
        """It accepts generations; cleared while there is no engine."""
        self.failed = asyncio.Event()
        """It ended, or said that it cannot serve."""
        self.drained = False
        self.measures: list[Family] = []
        """What it has counted since its start, when it was last heard of."""
        self._measured = asyncio.Event()
        self.heard_at = time.monotonic()
        self._ledger = ledger_fd
        self._channel = channel
        self._owner = owner
        self._listener = asyncio.ensure_future(self._listen())

    @classmethod
    async def spawn(cls, start: Start, inherit: Sequence[int], lifeline: Lifeline, owner: Owner) -> FrontEnd:
        """Start the process with the listeners `inherit`, and send it `start`. It logs to our standard error itself.

        No parent-death wrapper: the end of its control channel tells it, and the leash makes sure. Raises
        `SupervisorError`.
        """
        start.ledger = ledger_fd = _new_ledger(int(start.options.get("max_in_flight", 16384)))
        ours, theirs = socket.socketpair()
        with theirs:
            argv = [sys.executable, "-m", MODULE, "--control-fd", str(theirs.fileno())]
            try:
                passed = [fd for fd in (theirs.fileno(), ledger_fd, *inherit) if fd >= 0]
                process = Process.spawn("front end", argv, pass_fds=passed, relay=False)
            except BaseException:
                ours.close()
                if ledger_fd >= 0:
                    os.close(ledger_fd)
                raise
        lifeline.watch(process)
        channel = await supervisor_end(ours)
        channel.send(start)
        return cls(start, ledger_fd, process, channel, owner)

    def send(self, message: ToFrontEnd) -> None:
        self._channel.send(message)

    async def measure(self, limit_s: float) -> None:
        """Bring `measures` up to date; they stay as they are when it does not answer within the limit."""
        self._measured.clear()
        self.send(Measure())
        await self.wait_for(self._measured, limit_s)

    async def wait_for(self, event: asyncio.Event, limit_s: float) -> bool:
        """Whether `event` (`started`, `serving`) came before it failed and within the limit."""
        waits = [asyncio.ensure_future(one.wait()) for one in (event, self.failed)]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return event.is_set() and not self.failed.is_set()

    async def drain(self, grace_s: float, hurry: asyncio.Event, *, handover: bool = False) -> None:
        """Let its streams finish for at most `grace_s`, then see it exit. `hurry` ends the grace when it is set."""
        self.send(Drain(grace_s=grace_s, handover=handover))
        hurried = asyncio.ensure_future(hurry.wait())
        exited = asyncio.ensure_future(self.process.exited.wait())
        try:
            await asyncio.wait({hurried, exited}, timeout=grace_s + DRAIN_MARGIN_S, return_when=asyncio.FIRST_COMPLETED)
            if hurried.done() and not exited.done():
                self.send(Drain(grace_s=0.0, handover=handover))
                await asyncio.wait({exited}, timeout=DRAIN_MARGIN_S)
        finally:
            hurried.cancel()
            exited.cancel()
        if self.process.alive:
            _log.warning("the front end did not finish its drain of %g s; stopping it", grace_s)

    def left(self) -> tuple[list[str], list[str]]:
        """Wire ids that it had in flight and has not ended: to abort now, and after the hold of a KV transfer."""
        if self._ledger < 0:
            return [], []
        try:
            found = ledger.read(self._ledger)
        except OSError as error:
            _log.warning("the ledger of the front end on slot %d cannot be read: %s", self.slot, error)
            return [], []
        if found is None:
            _log.warning("the ledger of the front end on slot %d is of another version: its output tells", self.slot)
            return [], []
        prefix = f"{self.slot}.{self.incarnation:x}."
        now, later = ([f"{prefix}{counter:x}" for counter in counters] for counters in found)
        return now, later

    async def stop(self) -> None:
        """End it, whatever it does."""
        await self.process.stop(STOP_GRACE_S)
        await asyncio.wait({self._listener}, timeout=LAST_WORDS_S)
        self._channel.close()
        self._listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listener
        if self._ledger >= 0:
            os.close(self._ledger)
            self._ledger = -1

    async def _listen(self) -> None:
        while (message := await self._channel.receive()) is not None:
            self.heard_at = time.monotonic()
            match message:
                case Started(version=version):
                    if not compatible(CONTROL_VERSION, version):
                        self._fail(
                            "the front end cannot be used: "
                            f"it speaks control version {version}, this supervisor {CONTROL_VERSION}"
                        )
                    self.started.set()
                case Serving():
                    self.serving.set()
                case Drained(aborted=aborted):
                    self.drained = True
                    _log.log(logging.WARNING if aborted else logging.DEBUG, "the front end is drained, %d cut", aborted)
                case Fatal(reason=reason):
                    self._fail(reason)
                case EngineLost(reason=reason):
                    self._owner.engine_lost(self, reason)
                case Work(ranks=ranks):
                    self._owner.has_work(self, ranks)
                case Measured(families=families):
                    self.measures = families
                    self._measured.set()
                case AbortRequests(request_ids=request_ids):
                    self._owner.abort_elsewhere(self, request_ids)
                case CompanionSilent(waited_s=waited, other_version=version):
                    what = f"is of headless-bridge {version}" if version else f"did not answer for {waited:g} s"
                    self._owner.companion_silent(what)
        await self.process.exited.wait()
        if not self.drained:
            self._fail(f"the front end {self.process.describe_exit()}")

    def _fail(self, reason: str) -> None:
        if not self.failed.is_set():
            self.failed.set()
            self._owner.ended(self, reason)


def _new_ledger(cells: int) -> int:
    """-1 where there is no memory for one: a front end serves without it, and its orphans show by their output."""
    try:
        return ledger.create(cells)
    except OSError as error:
        _log.warning("a front end starts without a ledger: %s", error.strerror)
        return -1
