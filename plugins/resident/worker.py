"""A process that judges one check at a time, forked from one that has imported everything: ready in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from bridge.wire.companion import MAX_MESSAGE, Check, Verdict
from bridge.wire.framing import Framing, framed

Judge = Callable[[Check], Verdict]
"""Decides about one check; raises nothing that the check could cause."""

READ_SIZE = 64 << 10
EXIT_WAIT_S = 2.0
"""For a process that closed its socket to be gone."""
POLL_S = 0.002
DEFAULT_STACK = 8 << 20
"""Bytes of a thread's stack where the limit is infinite."""
PR_SET_PDEATHSIG = 1
"""Linux: a worker in the middle of a check does not outlive the companion. Elsewhere its CPU limit ends it."""


@dataclass(frozen=True)
class Limits:
    """What one check may cost: seconds of CPU time over all threads, seconds in all, bytes above what is in use."""

    cpu_s: float = 10.0
    wall_s: float = 120.0
    memory: int = 1 << 30


class WorkerEnded(Exception):
    """The process is gone; `status` is as `subprocess` gives it, negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Worker:
    """One forked process and our end of its socket."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._connection = connection
        self._framing = Framing(MAX_MESSAGE)
        self._decoder: msgspec.msgpack.Decoder[Verdict] = msgspec.msgpack.Decoder(Verdict)

    @classmethod
    def fork(cls, judge: Judge, limits: Limits) -> Worker:
        """Call it from a process without threads: only the calling one would live on in the child."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _child(theirs, judge, limits)
        theirs.close()
        ours.setblocking(False)
        return cls(pid, ours)

    async def ask(self, check: Check) -> Verdict:
        """Raises `WorkerEnded` when the process ends before it answers."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._connection, framed(check))
            while True:
                data = await loop.sock_recv(self._connection, READ_SIZE)
                if not data:
                    break
                for body in self._framing.feed(data):
                    return self._decoder.decode(body)
        except ConnectionError:
            pass
        raise WorkerEnded(await self.end())

    async def end(self, *, kill: bool = False) -> int:
        """See the process gone and release its socket; its exit status, negative for a signal."""
        self._connection.close()
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        loop = asyncio.get_running_loop()
        until = loop.time() + EXIT_WAIT_S
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if loop.time() > until:
                os.kill(self.pid, signal.SIGKILL)
            await asyncio.sleep(POLL_S)


def _child(connection: socket.socket, judge: Judge, limits: Limits) -> None:
    """The worker's whole life; never returns."""
    status = 1
    try:
        _detach(connection.fileno())
        _limit(limits.memory)
        _answer(connection, judge, limits.cpu_s)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@contextlib.contextmanager
def unlimited() -> Iterator[None]:
    """For what a judge does once and not for this check alone: its CPU time does not count."""
    left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, left)


def _detach(keep: int) -> None:
    """Leave the parent's signals and sockets alone, and do not outlive it."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    os.closerange(3, keep)
    os.closerange(keep + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def _limit(extra: int) -> None:
    """Half the stack that a thread gets by default, so that what fits here fits in the engine. No core files.

    The heap is limited on Linux only; elsewhere its limit is the machine's.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    half = (DEFAULT_STACK if soft == resource.RLIM_INFINITY else soft) // 2
    resource.setrlimit(resource.RLIMIT_STACK, (half, hard))
    with contextlib.suppress(FileNotFoundError), open("/proc/self/status") as status:
        used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + extra, hard))


def _answer(connection: socket.socket, judge: Judge, cpu_s: float) -> None:
    """Judge until the other end closes. The kernel ends a check that is over its CPU time with SIGPROF."""
    framing = Framing(MAX_MESSAGE)
    decoder = msgspec.msgpack.Decoder(Check)
    while data := connection.recv(READ_SIZE):
        for body in framing.feed(data):
            check = decoder.decode(body)
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            verdict = judge(check)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(framed(verdict))
