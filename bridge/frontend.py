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

from bridge.companion import CompanionGrammar, Latch
from bridge.contracts.catalog import service
from bridge.contracts.context import Context, Grammar
from bridge.contracts.health import NOT_SERVING, SERVING, HealthService
from bridge.contracts.reflection import ALPHA, V1, ReflectionService
from bridge.engine import Engine, State
from bridge.exposure import fitted, limits_of, tls_of
from bridge.grpc.server import Server
from bridge.grpc.service import Service
from bridge.grpc.unprivileged import Unprivileged
from bridge.metrics import Meters, families
from bridge.orders import Orders
from bridge.supervisor.channel import front_end_end
from bridge.supervisor.control import CompanionSilent, EngineLost, Fatal, Start, Started
from bridge.supervisor.errors import UsageError
from bridge.supervisor.ledger import Ledger
from bridge.supervisor.listeners import ADMIN
from bridge.supervisor.logs import configure
from bridge.supervisor.measures import Family
from bridge.wire.companion import Facts
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
        ledger: Ledger | None = None,
    ) -> None:
        """`options` are front-end flags by key; `on_death(reason)` is called when the slot learns of the engine's end.
        Without `grammar`, constraints are refused. `ledger` keeps what is in flight for whoever cleans up after us.

        Raises `UsageError` for TLS files that do not work.
        """
        self._on_death = on_death
        self._meters = Meters()
        self.engine = Engine(
            engine,
            slot,
            wire_prefix=f"{slot.index}.{incarnation:x}",
            max_in_flight=int(options.get("max_in_flight", 16384)),
            on_death=self._died,
            ledger=ledger,
            meters=self._meters,
        )
        asyncio.get_running_loop().add_reader(slot.input_fd, slot.service)
        self.context = Context(self.engine)
        if grammar is not None:
            self.context.grammar = grammar
        self.health = HealthService()
        services = [service(name, self.context) for name in contracts]
        self._names = ["", *(one.name for one in services)]
        self._set_health(serving=False)
        listed = [one.name for one in (*services, self.health)]
        beside: list[Service] = [self.health, *(ReflectionService(package, listed) for package in (V1, ALPHA))]
        limits, tls = fitted(limits_of(options)), tls_of(options)
        apart = bool(options.get("admin_bind"))
        public = [Unprivileged(one) for one in services] if apart else services
        self.server = Server([*public, *beside], limits, tls)
        self._servers = {"grpc": self.server}
        if apart:
            self._servers[ADMIN] = Server([*services, *beside], limits, tls)

        writer = self if apart else self.server
        self.engine.write_through(writer.cork, writer.flush)

    def cork(self) -> None:
        """Hold back the writes of every server."""
        for server in self._servers.values():
            server.cork()

    def flush(self) -> None:
        """Write what every server has."""
        for server in self._servers.values():
            server.flush()

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

    async def listen(self, kind: str, listening: socket.socket) -> None:
        """Serve what `kind` of listener it is on a socket that somebody else bound."""
        await self._servers[kind].serve(listening)

    def engine_down(self, reason: str) -> None:
        """Every request ends with UNAVAILABLE; health is NOT_SERVING until `engine_up`."""
        self._set_health(serving=False)
        self.engine.down(reason)

    async def drain(self, grace_s: float, *, handover: bool = False) -> int:
        """Refuse new work, let streams finish, give the rest their `abort`; returns how many were cut.

        With `handover` another front end has the listeners, so health stays: what is asked here meanwhile is asked of
        an engine that serves.
        """
        if not handover:
            self.context.draining = True
            self._set_health(serving=False)
        draining = asyncio.gather(*(server.drain(grace_s + 1.0) for server in self._servers.values()))
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
                    self.flush()
        await draining
        return cut

    async def refresh(self) -> None:
        """What is counted here is always up to date."""

    def measured(self) -> list[Family]:
        """What it has counted since its start."""
        return families(self._meters, self.engine, (server.stats for server in self._servers.values()))

    def unserved(self) -> str:
        """Why requests are not served now; "" when they are."""
        if self.context.draining:
            return "draining"
        return "" if self.engine.state is State.UP else f"{self.engine.state.value}: {self.engine.detail}"

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()
        asyncio.get_running_loop().remove_reader(self.engine.slot.input_fd)
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
    try:
        slot = Slot(start.slot, start.input_address, start.output_address)
    except LinkError as error:
        channel.send(Fatal(reason=str(error)))
        channel.close()
        return 1
    grammar: CompanionGrammar | None = None
    latch = Latch(start.latch)
    if start.companion:
        grammar = CompanionGrammar(
            start.companion,
            latch,
            lambda waited_s: channel.send(CompanionSilent(waited_s=waited_s)),
            lambda version: channel.send(CompanionSilent(other_version=version)),
        )
    try:
        front_end = FrontEnd(
            start.engine,
            slot,
            incarnation=start.incarnation,
            contracts=start.contracts,
            options=start.options,
            on_death=lambda reason: channel.send(EngineLost(reason=reason)),
            grammar=grammar,
            ledger=Ledger(start.ledger) if start.ledger >= 0 else None,
        )
    except UsageError as error:
        channel.send(Fatal(reason=str(error)))
        channel.close()
        return 1
    channel.send(Started(pid=os.getpid()))
    meeting = asyncio.ensure_future(grammar.meet()) if grammar is not None and not start.listen_at_once else None
    try:
        return await Orders(front_end, channel, start, engine_starts=latch.open).run()
    finally:
        await front_end.close()
        if meeting is not None:
            meeting.cancel()
        if grammar is not None:
            grammar.close()
        channel.close()


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
