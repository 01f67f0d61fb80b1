"""One front end as the supervisor sees it: its process, its control channel, and what it has said."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Sequence

from bridge.supervisor.channel import ControlChannel, compatible, supervisor_end
from bridge.supervisor.control import (
    CONTROL_VERSION,
    CompanionSilent,
    Drain,
    Drained,
    Fatal,
    Serving,
    Start,
    Started,
    ToFrontEnd,
    ToSupervisor,
)
from bridge.supervisor.lifeline import Lifeline
from bridge.supervisor.process import Process

MODULE = "bridge.frontend"
DRAIN_MARGIN_S = 3.0
"""On top of a drain's grace: the front end cuts the streams itself at the grace, then closes its connections."""
STOP_GRACE_S = 2.0

_log = logging.getLogger(__name__)


class FrontEnd:
    """A running front end.

    `on_end(reason)` is called once, when it ends or says that it cannot serve; `on_silence(what)` when it waits in vain
    for the companion.
    """

    def __init__(
        self,
        process: Process,
        channel: ControlChannel[ToSupervisor],
        on_end: Callable[[str], None],
        on_silence: Callable[[str], None],
    ) -> None:
        self.process = process
        self.started = asyncio.Event()
        self.serving = asyncio.Event()
        self._channel = channel
        self._on_end = on_end
        self._on_silence = on_silence
        self._drained = False
        self._fatal: str | None = None
        self._listener = asyncio.ensure_future(self._listen())

    @classmethod
    async def spawn(
        cls,
        start: Start,
        inherit: Sequence[int],
        lifeline: Lifeline,
        on_end: Callable[[str], None],
        on_silence: Callable[[str], None],
    ) -> FrontEnd:
        """Start the process with the listeners `inherit`, and send it `start`. It logs to our standard error itself.

        No parent-death wrapper: the end of its control channel tells it, and the leash makes sure.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            argv = [sys.executable, "-m", MODULE, "--control-fd", str(theirs.fileno())]
            try:
                process = Process.spawn("front end", argv, pass_fds=[theirs.fileno(), *inherit], relay=False)
            except BaseException:
                ours.close()
                raise
        lifeline.watch(process)
        channel = await supervisor_end(ours)
        channel.send(start)
        return cls(process, channel, on_end, on_silence)

    def send(self, message: ToFrontEnd) -> None:
        self._channel.send(message)

    async def drain(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Let its streams finish for at most `grace_s`, then see it exit. `hurry` ends the grace when it is set."""
        self.send(Drain(grace_s=grace_s))
        hurried = asyncio.ensure_future(hurry.wait())
        exited = asyncio.ensure_future(self.process.exited.wait())
        try:
            await asyncio.wait({hurried, exited}, timeout=grace_s + DRAIN_MARGIN_S, return_when=asyncio.FIRST_COMPLETED)
            if hurried.done() and not exited.done():
                self.send(Drain(grace_s=0.0))
                await asyncio.wait({exited}, timeout=DRAIN_MARGIN_S)
        finally:
            hurried.cancel()
            exited.cancel()
        if self.process.alive:
            _log.warning("the front end did not finish its drain of %g s; stopping it", grace_s)

    async def stop(self) -> None:
        """End it, whatever it does."""
        await self.process.stop(STOP_GRACE_S)
        self._channel.close()
        self._listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listener

    async def _listen(self) -> None:
        while (message := await self._channel.receive()) is not None:
            match message:
                case Started(version=version):
                    if not compatible(CONTROL_VERSION, version):
                        self._fatal = f"it speaks control version {version}, this supervisor {CONTROL_VERSION}"
                        self._on_end(f"the front end cannot be used: {self._fatal}")
                    self.started.set()
                case Serving():
                    self.serving.set()
                case Drained(aborted=aborted):
                    self._drained = True
                    _log.log(logging.WARNING if aborted else logging.DEBUG, "the front end is drained, %d cut", aborted)
                case Fatal(reason=reason):
                    self._fatal = reason
                    self._on_end(reason)
                case CompanionSilent(waited_s=waited):
                    self._on_silence(f"did not answer for {waited:g} s")
        await self.process.exited.wait()
        if not self._drained and self._fatal is None:
            self._on_end(f"the front end {self.process.describe_exit()}")
