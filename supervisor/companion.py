"""The companion in the engine's Python: it tells the facts, and where the engine has one that stays, is kept running."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from bridge import __version__
from bridge.supervisor.errors import StartError, SupervisorError
from bridge.supervisor.lifeline import Lifeline
from bridge.supervisor.process import Process
from bridge.wire.companion import Facts

STOP_GRACE_S = 2.0
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 60.0
"""Before another companion takes a dead one's place; doubled each time, until one has lived for that long."""

_log = logging.getLogger(__name__)


class Companion:
    """The companion of one engine. Its end never ends the engine: what needs it is refused until another is there."""

    def __init__(
        self,
        engine: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        lifeline: Lifeline,
        on_line: Callable[[str], None],
        *,
        stays: bool,
    ) -> None:
        """`argv` prints the facts as its first line, then exits, or with `stays` serves; `on_line` gets its log."""
        self._engine = engine
        self._argv = argv
        self._env = env
        self._lifeline = lifeline
        self._on_line = on_line
        self._stays = stays
        self._process: Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.restarts = 0

    async def start(self) -> Facts:
        """Start it and read the facts.

        Raises `StartError` with its last log lines when it fails, prints no facts, or is of another version.
        """
        process = self._spawn()
        line = await process.first_line()
        if line is None:
            await self._end(process)
            raise StartError(self._failure(process), list(process.tail)[:-1])
        facts = self._read(line, process)
        if self._stays:
            self._keeper = asyncio.ensure_future(self._keep(process))
        else:
            await self._end(process)
        return facts

    def restart(self, reason: str) -> None:
        """End it, so that another takes its place."""
        if self._process is not None and self._process.alive:
            _log.warning("the companion of %s %s; ending it", self._engine, reason)
            self._process.kill()

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        if self._process is not None:
            await self._end(self._process)

    def _spawn(self) -> Process:
        process = self._process = Process.spawn(
            f"{self._engine} companion",
            self._argv,
            env=self._env,
            parent_death=signal.SIGTERM,
            capture=True,
            on_line=self._on_line,
        )
        self._lifeline.watch(process)
        return process

    async def _end(self, process: Process) -> None:
        await process.stop(STOP_GRACE_S)
        self._lifeline.forget(process)
        if self._process is process:
            self._process = None

    async def _keep(self, process: Process) -> None:
        delay = FIRST_DELAY_S
        while True:
            await process.exited.wait()
            await self._end(process)
            if time.monotonic() - process.started_at > MAX_DELAY_S:
                delay = FIRST_DELAY_S
            last = f"; its last line: {process.tail[-1]}" if process.tail else ""
            _log.warning(
                "the companion of %s %s; constraints are refused until another is ready, started in %g s%s",
                self._engine,
                process.describe_exit(),
                delay,
                last,
            )
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_DELAY_S)
            while True:
                try:
                    process = self._spawn()
                    self.restarts += 1
                    break
                except SupervisorError as error:
                    _log.error("%s; trying again in %g s", error, MAX_DELAY_S)
                    await asyncio.sleep(MAX_DELAY_S)

    def _read(self, line: bytes, process: Process) -> Facts:
        try:
            facts = msgspec.json.decode(line, type=Facts)
        except msgspec.MsgspecError as error:
            raise StartError(f"the companion of {self._engine} printed no facts: {error}", process.tail) from None
        if facts.bridge_version != __version__:
            raise StartError(
                f"{self._argv[0]} has headless-bridge {facts.bridge_version}, this is {__version__}: "
                f"install headless-bridge=={__version__} there too"
            )
        return facts

    def _failure(self, process: Process) -> str:
        if any("No module named 'bridge'" in line for line in process.tail):
            return (
                f"headless-bridge is not installed in {self._argv[0]}: install headless-bridge=={__version__} there too"
            )
        last = f": {process.tail[-1]}" if process.tail else ""
        return f"the companion of {self._engine} {process.describe_exit()}{last}"
