"""The front end: one slot of one engine, the guard and the contracts, behind the gRPC server.

`FrontEnd` composes them and is told what happens to the engine. `python -m bridge.frontend --control-fd N` runs it under
a supervisor; `attach` runs it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import uvloop
import zmq

from bridge.companion import CompanionGrammar, Latch
from bridge.contracts.catalog import service
from bridge.contracts.context import Context, Grammar
from bridge.contracts.health import NOT_SERVING, SERVING, HealthService
from bridge.contracts.reflection import ALPHA, V1, ReflectionService
from bridge.engine import Engine, State
from bridge.exposure import fitted, limits_of, tls_of
from bridge.grpc.server import Server
from bridge.supervisor.channel import ControlChannel, front_end_end
from bridge.supervisor.control import (
    CompanionSilent,
    Drain,
    Drained,
    EngineDown,
    EngineUp,
    Fatal,
    Loading,
    RankLoad,
    Serving,
    Start,
    Started,
    ToFrontEnd,
)
from bridge.supervisor.errors import UsageError
from bridge.supervisor.logs import configure
from bridge.wire.codec import Load
from bridge.wire.companion import Facts
from bridge.wire.errors import LayoutError
from bridge.wire.link import LinkError, Slot

log = logging.getLogger(__name__)

GC_THRESHOLD = 10_000
"""Objects of the youngest generation. CPython's 700 would run a collection in every step of 700 streams."""


class FrontEnd:
    """Everything between a bound slot and bound listeners."""

    def __init__(
        self,
        engine: str,
        slot: Slot,
        *,
        incarnation: int,
        contracts: Sequence[str],
        options: Mapping[str, Any],
        on_death: Callable[[str], None],
        grammar: Grammar | None = None,
    ) -> None:
        """`options` are front-end flags by key; `on_death(reason)` is called when the slot learns of the engine's end.
        Without `grammar`, constraints are refused.

        Raises `UsageError` for TLS files that do not work.
        """
        self._on_death = on_death
        self.engine = Engine(
            engine,
            slot,
            wire_prefix=f"{slot.index}.{incarnation:x}",
            max_in_flight=int(options.get("max_in_flight", 16384)),
            cork=self._cork,
            flush=self._flush,
            on_death=self._died,
        )
        self.context = Context(self.engine)
        if grammar is not None:
            self.context.grammar = grammar
        self.health = HealthService()
        services = [service(name, self.context) for name in contracts]
        self._names = ["", *(one.name for one in services)]
        self._set_health(serving=False)
        listed = [one.name for one in (*services, self.health)]
        reflection = [ReflectionService(package, listed) for package in (V1, ALPHA)]
        self.server = Server([*services, self.health, *reflection], fitted(limits_of(options)), tls_of(options))

    def _cork(self) -> None:
        self.server.cork()

    def _flush(self) -> None:
        self.server.flush()

    def _set_health(self, *, serving: bool) -> None:
        for name in self._names:
            self.health.set_status(name, SERVING if serving else NOT_SERVING)

    def _died(self, reason: str) -> None:
        self.engine_down(reason)
        self._on_death(reason)

    def engine_up(self, ranks: Sequence[tuple[bytes, dict[str, Any]]], facts: Facts) -> None:
        """Start to serve; raises `LayoutError` when no codec fits the engine."""
        self.engine.up(ranks, facts)
        self.context.engine_up()
        self._set_health(serving=True)

    def engine_down(self, reason: str) -> None:
        """Every request ends with UNAVAILABLE; health turns NOT_SERVING and stays so."""
        self._set_health(serving=False)
        self.engine.down(reason)

    async def drain(self, grace_s: float) -> int:
        """Refuse new work, let streams finish, give the rest their `abort`; returns how many were cut."""
        self.context.draining = True
        self._set_health(serving=False)
        draining = asyncio.ensure_future(self.server.drain(grace_s + 1.0))
        cut = 0
        if self.engine.state is State.UP:
            table = self.engine.table
            idle = asyncio.Event()
            table.on_idle = idle.set
            if len(table):
                try:
                    await asyncio.wait_for(idle.wait(), grace_s)
                except TimeoutError:
                    cut = table.abort_all()
                    self.server.flush()
        await draining
        return cut

    async def close(self) -> None:
        await self.server.close()
        self.engine.close()


def tame_collector() -> None:
    """What is loaded by now stays: collections that look at it all the same would stall every stream for 10 ms."""
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


async def _serve(control_fd: int) -> int:
    channel = await front_end_end(socket.socket(fileno=control_fd))
    start = await channel.receive()
    if not isinstance(start, Start):
        log.error("the first control message was %r; expected start", start)
        return 1
    configure(start.options.get("log_level", "info"), start.options.get("log_format", "text"))
    tame_collector()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        slot = Slot(context, start.slot, start.input_address, start.output_address)
    except LinkError as error:
        channel.send(Fatal(reason=str(error)))
        channel.close()
        return 1
    grammar: CompanionGrammar | None = None
    if start.companion:
        grammar = CompanionGrammar(
            start.companion, Latch(start.latch), lambda waited_s: channel.send(CompanionSilent(waited_s=waited_s))
        )
    try:
        front_end = FrontEnd(
            start.engine,
            slot,
            incarnation=start.incarnation,
            contracts=start.contracts,
            options=start.options,
            on_death=lambda reason: channel.send(Fatal(reason=f"the engine is gone: {reason}")),
            grammar=grammar,
        )
    except UsageError as error:
        channel.send(Fatal(reason=str(error)))
        channel.close()
        return 1
    for listener in start.listeners:
        await front_end.server.serve(socket.socket(fileno=listener.fd))
    channel.send(Started(pid=os.getpid()))
    try:
        return await _obey(front_end, channel)
    finally:
        await front_end.close()
        if grammar is not None:
            grammar.close()
        channel.close()


async def _obey(front_end: FrontEnd, channel: ControlChannel[ToFrontEnd]) -> int:
    """Do what the supervisor says until it says drain, or is gone."""
    draining: asyncio.Task[int] | None = None
    receiving = asyncio.ensure_future(channel.receive())
    while True:
        await asyncio.wait({receiving, draining} if draining else {receiving}, return_when=asyncio.FIRST_COMPLETED)
        if draining is not None and draining.done():
            receiving.cancel()
            channel.send(Drained(aborted=draining.result()))
            return 0
        if not receiving.done():
            continue
        message = receiving.result()
        receiving = asyncio.ensure_future(channel.receive())
        match message:
            case None:
                front_end.engine_down("the supervisor is gone")
                return 1
            case Loading(phase=phase, elapsed_s=elapsed):
                front_end.engine.detail = f"{phase}, {elapsed:.0f} s"
            case EngineUp(ranks=ranks, facts=facts):
                await _connected(front_end.engine.slot, {rank.identity for rank in ranks})
                try:
                    front_end.engine_up([(rank.identity, rank.ready) for rank in ranks], facts)
                except LayoutError as error:
                    channel.send(Fatal(reason=str(error)))
                    return 1
                channel.send(Serving())
            case EngineDown(reason=reason):
                front_end.engine_down(reason)
            case RankLoad():
                front_end.engine.take_load(
                    Load(
                        rank=message.rank,
                        running=message.running,
                        waiting=message.waiting,
                        kv_cache_usage=message.kv_cache_usage,
                    )
                )
            case Drain(grace_s=grace):
                if draining is not None:
                    draining.cancel()
                draining = asyncio.ensure_future(front_end.drain(grace))


async def _connected(slot: Slot, ranks: set[bytes]) -> None:
    """Wait for every rank's ready map on this slot: a rank that is up for the supervisor may reach us a moment later."""
    while True:
        while (received := slot.receive_ready()) is not None:
            ranks.discard(received[0])
        if not ranks:
            return
        await asyncio.sleep(0.005)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run under a supervisor: `--control-fd N` is this end of the control channel."""
    parser = argparse.ArgumentParser(prog="python -m bridge.frontend", description=main.__doc__)
    parser.add_argument("--control-fd", type=int, required=True)
    given = parser.parse_args(arguments)
    try:
        return uvloop.run(_serve(given.control_fd))
    except KeyboardInterrupt:
        return 1


if __name__ == "__main__":
    sys.exit(main())
