"""`headless-bridge attach`: the front end for an engine that somebody else starts.

One slot; this process answers the handshake and does slot 0's work itself. Facts come from the model folder, so no engine
needs to be installed here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path

import msgspec
import uvloop
import zmq

from bridge.contracts.names import contracts_for
from bridge.flags import Values, folders_of
from bridge.frontend import FrontEnd, tame_collector
from bridge.supervisor.errors import EXIT_REQUESTED, EXIT_UNREQUESTED, SupervisorError, UsageError
from bridge.supervisor.listeners import bind_admin, bind_metrics, bind_tcp, bind_unix
from bridge.supervisor.notify import Notifier
from bridge.supervisor.operations import Operations
from bridge.supervisor.state import StateFolder
from bridge.wire.errors import LayoutError
from bridge.wire.handshake import Handshake, HandshakeError, HandshakeServer
from bridge.wire.link import LinkError, Slot
from bridge.wire.model_folder import ModelFolderError, facts_from_folder

log = logging.getLogger(__name__)


def run(engine: str, model: str, values: Values) -> int:
    """Serve until a signal (exit 0) or the engine's end (exit 1)."""
    state = StateFolder.open(*folders_of(values))
    try:
        return uvloop.run(_Attached(engine, model, values, state).run())
    finally:
        state.close()


class _Attached:
    """One run of `attach`."""

    def __init__(self, engine: str, model: str, values: Values, state: StateFolder) -> None:
        self._engine = engine
        self._model = model
        self._values = values
        self._state = state
        self._ended: asyncio.Future[tuple[int, str]] | None = None
        self._began = time.monotonic()
        name = values["served_model_name"] or model
        try:
            self._facts = facts_from_folder(model, engine=engine, engine_version="", served_model_name=name)
        except ModelFolderError as error:
            raise UsageError(str(error)) from None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        operations = self._operations = Operations(Notifier(os.environ), engine=self._engine)
        ended: asyncio.Future[tuple[int, str]] = loop.create_future()
        self._ended = ended
        values, state = self._values, self._state
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        listener = bind_unix(Path(values["uds"])) if values["uds"] else bind_tcp(values["host"], values["port"])
        admin = bind_admin(values["admin_bind"]) if values["admin_bind"] else None
        if values["metrics_port"] is not None:
            await operations.serve(bind_metrics(values["metrics_host"], values["metrics_port"]))
        address = values["listen_handshake"]
        try:
            server = HandshakeServer(context, address)
        except zmq.ZMQError as error:
            raise UsageError(f"cannot bind the handshake address {address}: {error}") from None
        try:
            slot = Slot(0, *state.slot(0))
        except LinkError as error:
            raise UsageError(str(error)) from None
        tame_collector()
        front_end = FrontEnd(
            self._engine,
            slot,
            incarnation=state.next_incarnation(0),
            contracts=contracts_for(self._engine, values["contract"]),
            options=values.values,
            on_death=lambda reason: self._end(EXIT_UNREQUESTED, f"the engine is gone: {reason}"),
        )
        operations.source = front_end
        self._handshake = Handshake(
            inputs=[slot.input_address], outputs=[slot.output_address], rank_count=values["data_parallel_size"]
        )
        self._server, self._slot, self._front_end = server, slot, front_end
        loop.add_reader(server.fd, self._on_handshake)
        loop.add_reader(slot.input_fd, self._on_input)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, EXIT_REQUESTED, "a signal asked for the stop")
        for one in (listener, admin):
            if one is not None:
                await front_end.listen(one.kind, one.socket)
        log.info("serving gRPC on %s; waiting for the engine on %s", listener.address, server.address)
        self._on_handshake()
        code, reason = await ended
        log.info("stopping: %s", reason)
        operations.stopping(reason)
        await front_end.drain(values["drain_secs"] if code == EXIT_REQUESTED else 0.0)
        loop.remove_reader(server.fd)
        server.close()
        await front_end.close()
        operations.close()
        if code != EXIT_REQUESTED:
            raise SupervisorError(reason)
        return code

    def _end(self, code: int, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result((code, reason))

    def _on_handshake(self) -> None:
        while (received := self._server.receive()) is not None:
            was_up = self._handshake.done
            try:
                replies = self._handshake.receive(*received)
            except HandshakeError as error:
                log.warning("ignored on the handshake socket: %s", error)
                continue
            for reply in replies:
                self._server.send(*reply)
            if was_up and not self._handshake.done:
                self._front_end.engine_down("a rank started anew")
                self._end(EXIT_UNREQUESTED, "a rank of the engine started anew; attach again")
                return
        self._advance()

    def _on_input(self) -> None:
        while (received := self._slot.receive_ready()) is not None:
            try:
                self._handshake.receive_ready_map(*received)
            except HandshakeError as error:
                log.warning("ignored on the input socket: %s", error)
        self._advance()
        if self._slot.take_gone() and self._handshake.done:
            self._front_end.engine_down("it closed its connection")
            self._end(EXIT_UNREQUESTED, "the engine closed its connection")

    def _advance(self) -> None:
        front_end = self._front_end
        if front_end.context.ready:
            return
        front_end.engine.detail = self._handshake.phase.value
        self._operations.loading(self._handshake.phase.value, time.monotonic() - self._began)
        if not self._handshake.done:
            return
        ranks = [(state.identity, state.ready or {}) for state in self._handshake.ranks.values()]
        version = str(ranks[0][1].get("vllm_version") or "")
        try:
            front_end.engine_up(ranks, msgspec.structs.replace(self._facts, engine_version=version))
        except LayoutError as error:
            self._end(EXIT_UNREQUESTED, str(error))
            return
        self._operations.serving(self._facts.served_model_name)
        log.info("the engine is up: %s %s", self._engine, version)
