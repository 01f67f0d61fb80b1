"""The one place where the simulated engine waits: for sockets, signals, its parent's end and the control channel."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import zmq

PARENT_CHECK_S = 0.2
LONGEST_WAIT_S = 1.0
POLL_GRAIN_S = 0.0015


class Stopped(Exception):
    """The process shall end now: a stop signal, or its parent is gone."""


class Waiter:
    """Waits until a deadline or until a watched socket can be read; raises `Stopped` from any wait.

    `terminating` is set by SIGTERM and SIGINT; with `drain` they do not raise, and the owner ends the process itself.
    """

    def __init__(self, *, exit_with_parent: bool, drain: bool) -> None:
        self.terminating = False
        self.signals = 0
        self._drain = drain
        self._parent = os.getppid() if exit_with_parent else None
        self._parent_checked = 0.0
        self._inputs = zmq.Poller()
        self._others = zmq.Poller()
        self._callbacks: list[Callable[[], None]] = []
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._terminate)
        signal.signal(signal.SIGUSR1, self._count)
        for poller in (self._inputs, self._others):
            poller.register(self._wake.fileno(), zmq.POLLIN)

    def watch(self, watched: zmq.Socket[bytes]) -> None:
        """Let `wait` end early when `watched` can be read."""
        self._inputs.register(watched, zmq.POLLIN)

    def unwatch(self, watched: zmq.Socket[bytes]) -> None:
        """Undo `watch`; before the socket is closed."""
        self._inputs.unregister(watched)

    def attend(self, watched: zmq.Socket[bytes], callback: Callable[[], None]) -> None:
        """Call `callback` from every wait in which `watched` can be read; the wait goes on."""
        self._callbacks.append(callback)
        for poller in (self._inputs, self._others):
            poller.register(watched, zmq.POLLIN)

    def wait(self, deadline: float, *, inputs: bool = True) -> bool:
        """Until `deadline` (monotonic seconds, may be past: then just look), or earlier when something happened.

        True when a watched socket may be readable; with `inputs` false those do not end the wait.
        """
        now = time.monotonic()
        if self._parent is not None and now - self._parent_checked >= PARENT_CHECK_S:
            self._parent_checked = now
            if os.getppid() != self._parent:
                raise Stopped("the parent process is gone")
        longest = PARENT_CHECK_S if self._parent is not None else LONGEST_WAIT_S
        milliseconds = int(max(0.0, min(deadline - now, longest)) * 1000)
        events = (self._inputs if inputs else self._others).poll(milliseconds)
        if events:
            self._drain_wakeups()
            for callback in self._callbacks:
                callback()
        else:
            rest = deadline - time.monotonic()  # poll counts whole milliseconds
            if 0 < rest < POLL_GRAIN_S:
                time.sleep(rest)
        if self.terminating and not self._drain:
            raise Stopped("a stop signal")
        return bool(events) and inputs

    def sleep(self, seconds: float) -> None:
        """Wait that long whatever arrives."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.wait(end, inputs=False)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        self._wake.close()
        self._woken.close()

    def _drain_wakeups(self) -> None:
        try:
            while self._wake.recv(64):
                continue
        except BlockingIOError:
            return

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.terminating = True

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1
