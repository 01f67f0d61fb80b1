"""The workers of a companion: forked when there is work, kept while they are well, replaced when they are not."""

from __future__ import annotations

import asyncio
import logging
import signal

from bridge.plugins.resident.worker import Judge, Limits, Worker, WorkerEnded
from bridge.wire.companion import Cause, Check, Refused, Verdict

WORKERS = 2
"""Checks judged at once: one that runs into its limits leaves the other place to the rest."""
MAX_WAITING = 128
QUEUE_LIMIT_S = 30.0
"""Longest wait for a place."""

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)

_log = logging.getLogger(__name__)


class Pool:
    """Judges checks in at most `WORKERS` processes."""

    def __init__(self, judge: Judge, limits: Limits | None = None) -> None:
        self._judge = judge
        self._limits = limits or Limits()
        self._places = asyncio.Semaphore(WORKERS)
        self._idle: list[Worker] = []
        self._waiting = 0

    async def judge(self, check: Check) -> Verdict:
        """The verdict on one check, whatever becomes of the process that judges it."""
        if self._waiting >= MAX_WAITING:
            return Refused(id=check.id, cause=Cause.AGAIN, reason=f"{self._waiting} other constraints wait for a check")
        self._waiting += 1
        try:
            async with asyncio.timeout(QUEUE_LIMIT_S):
                await self._places.acquire()
        except TimeoutError:
            reason = f"others were checked for {QUEUE_LIMIT_S:g} s"
            return Refused(id=check.id, cause=Cause.AGAIN, reason=reason)
        finally:
            self._waiting -= 1
        try:
            return await self._judge_in_place(check)
        finally:
            self._places.release()

    async def _judge_in_place(self, check: Check) -> Verdict:
        worker = self._idle.pop() if self._idle else Worker.fork(self._judge, self._limits)
        try:
            async with asyncio.timeout(self._limits.wall_s):
                verdict = await worker.ask(check)
        except TimeoutError:
            await worker.end(kill=True)
            _log.warning("a check of %s took over %g s; its process is replaced", check.kind, self._limits.wall_s)
            reason = f"it was not checked within {self._limits.wall_s:g} s"
            return Refused(id=check.id, cause=Cause.AGAIN, reason=reason)
        except WorkerEnded as end:
            cause, reason = self._explain(end.status)
            _log.warning("a check of %s ended its process: %s", check.kind, reason)
            return Refused(id=check.id, cause=cause, reason=reason)
        self._idle.append(worker)
        return verdict

    def _explain(self, status: int) -> tuple[Cause, str]:
        if status == -signal.SIGPROF:
            return Cause.COST, f"checking it takes more than {self._limits.cpu_s:g} s of CPU time"
        if -status in CRASHES:
            return Cause.COST, f"it crashes the code that would enforce it ({signal.Signals(-status).name})"
        ended = f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"
        return Cause.AGAIN, f"the process that checked it {ended}"
