"""One life of the engine: spawned, watched in every way that tells, and ended whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from bridge.supervisor.engines import Launch, Launcher
from bridge.supervisor.lifeline import Lifeline
from bridge.supervisor.liveness import Liveness
from bridge.supervisor.logs import RELAYED
from bridge.supervisor.process import Process
from bridge.supervisor.ready import Progress, StartPhase
from bridge.supervisor.vitals import Vitals

STOP_GRACE_S = 15.0
"""From SIGTERM to SIGKILL at a stop. vLLM 0.32 with nothing in flight takes under three seconds."""
DEATH_GRACE_S = 2.0
"""The same for what is left of an engine that died: vLLM 0.32's launcher needs five seconds to notice by itself, and two
to clear its tree when it is told."""

_log = logging.getLogger(__name__)
_relayed = logging.getLogger(RELAYED)


class EngineRun:
    """The first thing that tells of its end sets `died`, to a sentence whose subject is the engine."""

    def __init__(
        self,
        engine: Launcher,
        launch: Launch,
        lifeline: Lifeline,
        *,
        startup_timeout_s: float,
        startup_ceiling_s: float,
    ) -> None:
        """Spawn it; raises `SupervisorError`."""
        self._engine = engine
        self._lifeline = lifeline
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ranks_up = asyncio.Event()
        self.process = Process.spawn(
            engine.name, launch.argv, env=launch.environment, parent_death=signal.SIGTERM, on_line=self._on_line
        )
        lifeline.watch(self.process)
        self.progress = Progress(engine.name, self.process, timeout_s=startup_timeout_s, ceiling_s=startup_ceiling_s)
        self.liveness: Liveness | None = None
        self._vitals: Vitals | None = None
        self._tasks = [asyncio.ensure_future(self._watch())]
        _log.info("started %s, process %d", engine.name, self.process.pid)

    async def end(self) -> str:
        """Wait for its end; how it came."""
        await asyncio.wait({self.died})
        return self.died.result()

    def die(self, reason: str, *, hangs: bool = False) -> None:
        """Somebody found that it is gone or of no use; the first reason counts. One that hangs is not asked to end."""
        if not self.died.done():
            if hangs:
                self.process.kill()
            self.died.set_result(f"{self._engine.name} {reason}")

    def watch_vitals(self) -> None:
        """It is up: its inner processes are known and watched from now on."""
        self._vitals = Vitals(
            self.process, self._engine.vital, lambda pid, title: self.die(f"lost its process {pid} ({title})")
        )

    def watch_liveness(self, liveness: Liveness) -> None:
        """Call and judge it from now on."""
        self.liveness = liveness
        self._tasks.append(asyncio.ensure_future(liveness.run()))

    async def stop(self, grace_s: float) -> None:
        """End it and everything it started; later calls join."""
        for task in self._tasks:
            task.cancel()
        self.liveness = None
        if self._vitals is not None:
            self._vitals.close()
            self._vitals = None
        await self.process.stop(grace_s)
        self._lifeline.forget(self.process)
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _watch(self) -> None:
        await self.process.exited.wait()
        progress, how = self.progress, self.process.describe_exit()
        if progress.phase is StartPhase.UP:
            self.die(f"{how} though nobody stopped it")
        else:
            self.die(f"{how} while {progress.phase.value}, {progress.elapsed_s:.0f} s in")

    def _on_line(self, line: str) -> None:
        _relayed.info("[%s] %s", self._engine.name, line)
        self.progress.sign()
