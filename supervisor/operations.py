"""What operators see of a run: its state, its figures, and whether it is ready, for systemd, kubelet and Prometheus.

The run's owner (`serve`'s supervisor, or `attach`) says what happens; nothing here decides anything.
"""

from __future__ import annotations

import enum
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from bridge import __version__
from bridge.supervisor.http import Answer, HttpResponder
from bridge.supervisor.listeners import BoundListener
from bridge.supervisor.measures import (
    CONTENT_TYPE,
    COUNTER,
    GAUGE,
    Family,
    Sample,
    exposition,
    folded,
    single,
)
from bridge.supervisor.notify import Notifier

PREFIX = "headless_bridge_"
PROGRESS_INTERVAL_S = 10.0
"""Between words to systemd while a start goes on and says nothing new."""


_log = logging.getLogger(__name__)


class Standing(enum.Enum):
    """Where a run stands."""

    LOADING = "loading"
    SERVING = "serving"
    RELOADING = "reloading"
    """The front end is being replaced; requests are served."""
    RESTARTING = "restarting"
    """The engine ended and another is being started."""
    STOPPING = "stopping"


class Source(Protocol):
    """Where the figures come from."""

    async def refresh(self) -> None:
        """Have what is `measured` counted now."""
        ...

    def measured(self) -> list[Family]:
        """The families of the front ends, counted since the start of the run."""
        ...

    def unserved(self) -> str:
        """Why requests are not served now, "" when they are. One line."""
        ...


class Operations:
    """The state of one run as the world sees it."""

    def __init__(
        self,
        notifier: Notifier,
        *,
        engine: str,
        counts: Callable[[], Mapping[str, int]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`counts()` are the restarts so far, by part."""
        self.standing = Standing.LOADING
        self.detail = ""
        self.source: Source | None = None
        self.model = ""
        self._engine = engine
        self._notifier = notifier
        self._counts = counts
        self._clock = clock
        self._told_at = -PROGRESS_INTERVAL_S
        self._started = time.time()
        self._reloads = False
        self._responder: HttpResponder | None = None
        notifier.start_watchdog()

    async def serve(self, listener: BoundListener) -> None:
        """Answer metrics and probes on a bound listener; a duplicate of its descriptor is used."""
        self._responder = HttpResponder(
            {"/metrics": self._metrics, "/livez": self._alive, "/readyz": self._ready, "/healthz": self._alive}
        )
        await self._responder.serve(listener.socket.dup())
        reach = "from this machine only" if listener.loopback else "from other machines too"
        _log.info("metrics and probes on http://%s, reachable %s", listener.address, reach)

    def close(self) -> None:
        if self._responder is not None:
            self._responder.close()
        self._notifier.close()

    # -- what happens --------------------------------------------------------------------------------------------------

    def loading(self, phase: str, elapsed_s: float) -> None:
        """The engine's start goes on; said twice a second."""
        if self.standing is not Standing.RESTARTING:
            self.standing = Standing.LOADING
        now = self._clock()
        if phase != self.detail or now - self._told_at >= PROGRESS_INTERVAL_S:
            self.detail, self._told_at = phase, now
            self._notifier.progress(f"{self._engine} is {phase}, {elapsed_s:.0f} s")

    def serving(self, model: str) -> None:
        """Requests are served, for the first time or again."""
        self.standing, self.detail, self.model = Standing.SERVING, "", model
        self._notifier.ready(f"serving {model}")

    def restarting(self, reason: str) -> None:
        """The engine ended and another will be started."""
        self.standing, self.detail = Standing.RESTARTING, reason
        self._notifier.status(f"restarting: {reason}")

    def reloading(self) -> None:
        """The front end is being replaced; `reloaded` follows, whether that works or not."""
        if self.standing is Standing.SERVING:
            self.standing = Standing.RELOADING
        self._reloads = True
        self._notifier.reloading()

    def reloaded(self) -> None:
        """A new front end serves, or the old one goes on."""
        if not self._reloads:
            return
        self._reloads = False
        if self.standing is Standing.RELOADING:
            self.standing = Standing.SERVING
        self._notifier.ready(f"{self.standing.value} {self.model}")

    def stopping(self, reason: str) -> None:
        """The run ends."""
        self.standing, self.detail = Standing.STOPPING, reason
        self._notifier.stopping(reason)

    # -- what is seen --------------------------------------------------------------------------------------------------

    def unready(self) -> str:
        """Why gateways should send nothing here now; "" when they may."""
        if self.standing not in (Standing.SERVING, Standing.RELOADING):
            return f"{self.standing.value}: {self.detail}" if self.detail else self.standing.value
        return "no front end" if self.source is None else self.source.unserved()

    def families(self) -> list[Family]:
        return folded([[] if self.source is None else self.source.measured(), self._own()])

    def exposition(self) -> str:
        """Everything, as Prometheus text."""
        return exposition(self.families())

    def _own(self) -> Iterable[Family]:
        yield Family(
            PREFIX + "info",
            GAUGE,
            "What runs; always 1.",
            [Sample([__version__, self._engine, self.model], 1)],
            ["version", "engine", "model"],
        )
        yield Family(
            PREFIX + "state",
            GAUGE,
            "1 for the state the run is in.",
            [Sample([one.value], float(one is self.standing)) for one in Standing],
            ["state"],
        )
        yield single(PREFIX + "ready", GAUGE, "1 while requests are served.", float(not self.unready()))
        yield single(PREFIX + "start_time_seconds", GAUGE, "When the run began, since the epoch.", self._started)
        yield Family(
            PREFIX + "restarts_total",
            COUNTER,
            "Parts that were started again; an upgrade is a front end replaced on purpose.",
            [Sample([part], count) for part, count in self._counts().items()],
            ["part"],
        )
        used = os.times()
        yield single(
            PREFIX + "supervisor_cpu_seconds_total", COUNTER, "CPU time of the supervisor.", used.user + used.system
        )

    async def refresh(self) -> None:
        """Have the figures of the front ends brought up to date."""
        if self.source is not None:
            await self.source.refresh()

    async def _metrics(self) -> Answer:
        await self.refresh()
        return Answer(200, self.exposition(), CONTENT_TYPE)

    def _alive(self) -> Answer:
        """The event loop that owns every process answers; whether requests are served is another question."""
        return Answer(200, f"alive: {self.standing.value}\n")

    def _ready(self) -> Answer:
        why = self.unready()
        return Answer(503, f"not ready: {why}\n") if why else Answer(200, "ready\n")
