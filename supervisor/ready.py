"""How a start goes: its phase, its age, whether the engine gives signs of life, and the limits on all that."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable

from bridge.supervisor.errors import StartError
from bridge.supervisor.process import Process
from bridge.supervisor.status_line import StatusLine

TICK_S = 0.5
LINE_INTERVAL_S = 5.0
"""Between progress lines where standard error is no terminal."""
LAST_LOG = 100
"""Characters of the last log line that a progress line quotes."""
TIMEOUT_FLAG = "--startup-timeout-secs"
CEILING_FLAG = "--startup-ceiling-secs"

_log = logging.getLogger(__name__)


class StartPhase(enum.Enum):
    """The legs of a start, in order. The value completes `the engine is …`."""

    SPAWNED = "starting its process"
    IMPORTING = "importing"
    LOADING = "loading the model"
    FACTS = "ready, and its companion is reading the facts"
    WARMING = "making its first token"
    UP = "up"


class Progress:
    """The start of one engine. A sign of life is a log line or a handshake message."""

    def __init__(self, engine: str, process: Process, *, timeout_s: float, ceiling_s: float) -> None:
        """`timeout_s`: longest silence; `ceiling_s`: longest start. 0 is no limit."""
        self.phase = StartPhase.SPAWNED
        self._engine = engine
        self._process = process
        self._timeout_s = timeout_s
        self._ceiling_s = ceiling_s
        self._started = time.monotonic()
        self._sign = self._started

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def sign(self) -> None:
        """The engine or its companion showed that it lives."""
        self._sign = time.monotonic()

    def advance(self, phase: StartPhase) -> None:
        """The start reached `phase`, which is a sign of life; it never goes back."""
        self.sign()
        if list(StartPhase).index(phase) < list(StartPhase).index(self.phase):
            return
        if phase is not self.phase:
            self.phase = phase
            _log.debug("%s is %s, %.1f s after its start", self._engine, phase.value, self.elapsed_s)

    def check_limits(self) -> None:
        """Raises `StartError` naming the leg, the limit and the flag that changes it."""
        now = time.monotonic()
        if 0 < self._timeout_s < now - self._sign:
            raise StartError(
                f"{self._engine} gave no sign of life for {self._timeout_s:g} s while {self.phase.value} "
                f"(limit: {TIMEOUT_FLAG} {self._timeout_s:g})",
                self._process.tail,
            )
        if 0 < self._ceiling_s < now - self._started:
            raise StartError(
                f"{self._engine} is not up {self._ceiling_s:g} s after its start, still {self.phase.value} "
                f"(limit: {CEILING_FLAG} {self._ceiling_s:g}; 0 is no limit)",
                self._process.tail,
            )

    def describe(self) -> str:
        """One line: engine, phase, age, whether its process lives, its last log line."""
        state = f"process {self._process.pid} {'alive' if self._process.alive else self._process.describe_exit()}"
        last = f"; last log: {self._process.tail[-1][:LAST_LOG]}" if self._process.tail else ""
        return f"{self._engine} is {self.phase.value}: {self.elapsed_s:.0f} s, {state}{last}"

    async def show(self, tell: Callable[[StartPhase, float], None]) -> None:
        """Print progress and `tell(phase, elapsed_s)` until cancelled; raises `StartError` at a limit."""
        line = StatusLine()
        printed = time.monotonic()
        try:
            while True:
                self.check_limits()
                if self.phase is StartPhase.SPAWNED and self.elapsed_s > TICK_S and self._process.alive:
                    self.advance(StartPhase.IMPORTING)
                tell(self.phase, self.elapsed_s)
                if line.enabled:
                    line.show(self.describe())
                elif time.monotonic() - printed >= LINE_INTERVAL_S:
                    printed = time.monotonic()
                    _log.info("%s", self.describe())
                await asyncio.sleep(TICK_S)
        finally:
            line.close()
