"""A front end under a supervisor: what it is told over the control channel, what it does, and what it tells back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bridge.supervisor.channel import ControlChannel
from bridge.supervisor.control import (
    AbortRequests,
    Drain,
    Drained,
    EngineDown,
    EngineUp,
    Fatal,
    Loading,
    Measure,
    Measured,
    RankLoad,
    RankWork,
    Serving,
    Siblings,
    Start,
    ToFrontEnd,
    Work,
)
from bridge.wire.codec import Load
from bridge.wire.engines import codec_for
from bridge.wire.errors import LayoutError
from bridge.wire.link import LinkError

if TYPE_CHECKING:
    from bridge.frontend import FrontEnd

WORK_S = 1.0
"""Between words on what is in flight. The supervisor takes 20 s without any as a hang."""
MEASURED_S = 10.0
"""Between words on what was counted that nobody asked for: what is lost of it when this process is killed."""
NEW_WORK_S = 0.2
"""Between looks whether that has changed: the silence of an engine counts from when the supervisor hears of its work."""
CONNECT_S = 0.005
"""Between tries to reach a rank: engines dial a slot that is bound anew every 0.1 s (libzmq's default)."""

log = logging.getLogger(__name__)


class Orders:
    """Obeys one supervisor until it says drain, or is gone."""

    def __init__(
        self,
        front_end: FrontEnd,
        channel: ControlChannel[ToFrontEnd],
        start: Start,
        *,
        engine_starts: Callable[[], None],
    ) -> None:
        """`engine_starts` is called when another engine takes the place of one that is gone."""
        self._front_end = front_end
        self._channel = channel
        self._start = start
        self._engine_starts = engine_starts
        self._listening = False
        self._others = 0
        self._rising: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[int] | None = None
        self._over = asyncio.Event()
        front_end.engine.abort_elsewhere = self._abort_elsewhere

    async def run(self) -> int:
        """The exit code: 0 after a drain, 1 when there is nobody to obey or nothing to serve."""
        if self._start.listen_at_once:
            await self._listen()
        working = asyncio.ensure_future(self._tell_work())
        receiving = asyncio.ensure_future(self._receive())
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait({receiving, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, receiving, over, self._rising):
                if task is not None:
                    task.cancel()
        if self._draining is not None and self._draining.done():
            self._channel.send(Measured(families=self._front_end.measured()))
            self._channel.send(Drained(aborted=self._draining.result()))
            return 0
        return 1

    async def _receive(self) -> None:
        while (message := await self._channel.receive()) is not None:
            await self._obey(message)
        self._front_end.engine_down("the supervisor is gone")

    async def _obey(self, message: ToFrontEnd) -> None:
        front_end = self._front_end
        match message:
            case Loading(phase=phase, elapsed_s=elapsed):
                if front_end.engine.gone:
                    self._engine_starts()
                front_end.engine.loading(f"{phase}, {elapsed:.0f} s")
                await self._listen()
            case EngineUp():
                self._stop_rising()
                self._rising = asyncio.ensure_future(self._rise(message))
            case EngineDown(reason=reason):
                self._stop_rising()
                front_end.engine_down(reason)
                await self._listen()
            case Measure():
                self._channel.send(Measured(families=front_end.measured()))
            case RankLoad():
                front_end.engine.take_load(
                    Load(
                        rank=message.rank,
                        running=message.running,
                        waiting=message.waiting,
                        kv_cache_usage=message.kv_cache_usage,
                    )
                )
            case Siblings(others=others):
                self._others = others
            case AbortRequests(request_ids=request_ids):
                front_end.engine.abort_here(request_ids)
            case Drain(grace_s=grace, handover=handover):
                self._drain(grace, handover)
            case Start():
                log.warning("told to start twice")

    async def _rise(self, message: EngineUp) -> None:
        """Serve an engine that is up, once its ranks can be reached on this slot."""
        front_end = self._front_end
        try:
            await self._connected(message)
            front_end.engine_up([(rank.identity, rank.ready) for rank in message.ranks], message.facts)
        except LayoutError as error:
            self._channel.send(Fatal(reason=str(error)))
            self._over.set()
            return
        await self._listen()
        self._channel.send(Serving())

    async def _connected(self, message: EngineUp) -> None:
        """Wait until every rank takes messages on this slot.

        A rank announces itself on a slot once (vLLM 0.32), to whoever had it first, so a message that does nothing is
        what tells: the abort of a request that never was. Raises `LayoutError`.
        """
        front_end, start = self._front_end, self._start
        slot = front_end.engine.slot
        codec = codec_for(start.engine, message.ranks[0].ready, message.facts.layouts, slot.index)
        nothing = codec.abort([f"{slot.index}.{start.incarnation:x}.0"])
        for rank in message.ranks:
            while True:
                while slot.receive_ready() is not None:
                    pass
                with contextlib.suppress(LinkError):
                    slot.send(rank.identity, nothing)
                    break
                await asyncio.sleep(CONNECT_S)

    def _stop_rising(self) -> None:
        if self._rising is not None:
            self._rising.cancel()
            self._rising = None

    async def _listen(self) -> None:
        if self._listening or self._draining is not None:
            return
        self._listening = True
        for listener in self._start.listeners:
            await self._front_end.listen(listener.kind, socket.socket(fileno=listener.fd))

    def _drain(self, grace_s: float, handover: bool) -> None:
        if self._draining is not None:
            self._draining.remove_done_callback(self._drained)
            self._draining.cancel()
        self._draining = asyncio.ensure_future(self._front_end.drain(grace_s, handover=handover))
        self._draining.add_done_callback(self._drained)

    def _drained(self, task: asyncio.Task[int]) -> None:
        self._over.set()

    async def _tell_work(self) -> None:
        told: list[RankWork] | None = None
        due = measured_due = 0.0
        while True:
            ranks = [RankWork(*entry) for entry in self._front_end.engine.work()]
            now = time.monotonic()
            if ranks != told or now >= due:
                told = ranks
                self._channel.send(Work(ranks=ranks))
            if now >= due:
                due = now + WORK_S
            if now >= measured_due:
                measured_due = now + MEASURED_S
                self._channel.send(Measured(families=self._front_end.measured()))
            await asyncio.sleep(NEW_WORK_S)

    def _abort_elsewhere(self, request_ids: list[str]) -> None:
        if self._others:
            self._channel.send(AbortRequests(request_ids=request_ids))
