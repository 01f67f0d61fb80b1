"""The supervisor's part of the link: the handshake, slot 0 for the engine's life, and the slots nobody uses yet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq

from bridge.supervisor.control import Rank, RankLoad
from bridge.supervisor.engines import Launch
from bridge.supervisor.errors import UsageError
from bridge.supervisor.state import StateFolder
from bridge.wire.codec import Codec, Load
from bridge.wire.errors import WireError
from bridge.wire.handshake import Handshake, HandshakeError, HandshakeServer, Phase
from bridge.wire.link import LinkError, Slot

OWN_SLOT = 0
FRONT_END_SLOT = 1
SPARE_SLOT = 2
"""For the front end of an upgrade. Drained meanwhile: an offered slot that nobody binds queues without limit."""
SLOTS = (OWN_SLOT, FRONT_END_SLOT, SPARE_SLOT)

MESSAGES_PER_WAKEUP = 256
LOAD_INTERVAL_S = 0.05
"""Between load messages to the front end; the last value always goes out."""
HANDSHAKE_PORT_FLAG = "--handshake-port"

_log = logging.getLogger(__name__)


class EngineLink:
    """Binds before the engine is spawned; answers HELLO at once; then reads slot 0. All on the event loop's thread."""

    def __init__(
        self,
        state: StateFolder,
        *,
        port: int,
        on_phase: Callable[[Phase], None],
        on_load: Callable[[RankLoad], None],
        on_death: Callable[[str], None],
    ) -> None:
        """`port` 0 takes a free one. `on_phase` is called at each handshake message with the phase of the last rank.

        Raises `UsageError` when the port is taken or a slot cannot be bound.
        """
        self._on_phase = on_phase
        self._on_death = on_death
        self._loads = LoadFeed(on_load)
        self._codec: Codec | None = None
        self._handshake: Handshake | None = None
        self._slots: list[Slot] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._loop = asyncio.get_running_loop()
        self._undecodable = 0
        try:
            self._server = HandshakeServer(self._context, f"tcp://127.0.0.1:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.term()
            if error.errno == zmq.EADDRINUSE:
                raise UsageError(
                    f"the handshake port {port} is already in use: "
                    f"stop what listens there, or choose another with {HANDSHAKE_PORT_FLAG} (0 takes a free one)"
                ) from None
            raise UsageError(f"cannot bind the handshake port {port}: {error}") from None
        try:
            self._pairs = [state.slot(index) for index in SLOTS]
            for index in (OWN_SLOT, SPARE_SLOT):
                self._slots.append(Slot(self._context, index, *self._pairs[index]))
        except LinkError as error:
            self.close()
            raise UsageError(str(error)) from None
        self.address = self._server.address
        """`tcp://127.0.0.1:P`, what the engine dials."""

    def expect(self, launch: Launch) -> None:
        """Start to answer the ranks that `launch` will bring."""
        self._handshake = Handshake(
            inputs=[pair[0] for pair in self._pairs],
            outputs=[pair[1] for pair in self._pairs],
            first_rank=launch.first_rank,
            rank_count=launch.rank_count,
        )
        self._loop.add_reader(self._server.fd, self._read_handshake)
        own, spare = self._slots
        self._loop.add_reader(own.input_fd, self._read_ready_maps)
        self._loop.add_reader(own.output_fd, self._read_own)
        self._loop.add_reader(spare.input_fd, self._discard_ready_maps)
        self._loop.add_reader(spare.output_fd, self._discard_outputs)
        for read in (self._read_handshake, self._read_ready_maps, self._read_own):
            read()  # the descriptors are edge-triggered

    @property
    def done(self) -> bool:
        """Whether every rank is up."""
        return self._handshake is not None and self._handshake.done

    def ranks(self) -> list[Rank]:
        """The ranks that are up, by index, with their ready maps."""
        states = self._handshake.ranks.values() if self._handshake is not None else ()
        return [Rank(state.identity, state.ready) for state in states if state.ready is not None]

    def use(self, codec: Codec) -> None:
        """Read slot 0 with this codec from now on."""
        self._codec = codec

    def close(self) -> None:
        self._loads.close()
        for slot in self._slots:
            self._loop.remove_reader(slot.input_fd)
            self._loop.remove_reader(slot.output_fd)
            slot.close()
        self._slots = []
        self._loop.remove_reader(self._server.fd)
        self._server.close()
        self._context.destroy(linger=0)

    def _read_handshake(self) -> None:
        handshake = self._handshake
        assert handshake is not None
        while (received := self._server.receive()) is not None:
            was_done = handshake.done
            try:
                replies = handshake.receive(*received)
            except HandshakeError as error:
                _log.warning("ignored on the handshake socket: %s", error)
                continue
            for identity, payload in replies:
                self._server.send(identity, payload)
            if was_done and not handshake.done:
                self._on_death("a rank started anew, so its work is lost")
                return
            self._on_phase(handshake.phase)

    def _read_ready_maps(self) -> None:
        handshake = self._handshake
        assert handshake is not None
        while (received := self._slots[0].receive_ready()) is not None:
            try:
                handshake.receive_ready_map(*received)
            except HandshakeError as error:
                _log.warning("ignored on slot %d: %s", OWN_SLOT, error)
                continue
            self._on_phase(handshake.phase)

    def _read_own(self) -> None:
        for _ in range(MESSAGES_PER_WAKEUP):
            if not self._slots or (frames := self._slots[0].receive()) is None:
                return
            self._take(frames)
        self._loop.call_soon(self._read_own)

    def _take(self, frames: Sequence[bytes]) -> None:
        codec = self._codec
        if codec is None:
            return  # nothing was asked of the engine yet, so this can only be early statistics
        if codec.is_death(frames):
            self._on_death("it said that it died")
            return
        try:
            load = codec.load(codec.step(frames))
        except WireError as error:
            self._undecodable += 1
            if self._undecodable.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …
                _log.warning("slot %d: %d undecodable messages so far: %s", OWN_SLOT, self._undecodable, error)
            return
        if load is not None:
            self._loads.put(load)

    def _discard_ready_maps(self) -> None:
        while self._slots[1].receive_ready() is not None:
            pass

    def _discard_outputs(self) -> None:
        for _ in range(MESSAGES_PER_WAKEUP):
            if not self._slots or self._slots[1].receive() is None:
                return
        self._loop.call_soon(self._discard_outputs)


class LoadFeed:
    """Thins out load figures: per rank, the first goes out at once, then the latest at most every `LOAD_INTERVAL_S`."""

    def __init__(self, send: Callable[[RankLoad], None]) -> None:
        self._send = send
        self._latest: dict[int, Load] = {}
        self._timer: asyncio.TimerHandle | None = None

    def put(self, load: Load) -> None:
        self._latest[load.rank] = load
        if self._timer is None:
            self._flush()

    def _flush(self) -> None:
        self._timer = None
        if not self._latest:
            return
        for load in self._latest.values():
            self._send(
                RankLoad(rank=load.rank, running=load.running, waiting=load.waiting, kv_cache_usage=load.kv_cache_usage)
            )
        self._latest.clear()
        self._timer = asyncio.get_running_loop().call_later(LOAD_INTERVAL_S, self._flush)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
