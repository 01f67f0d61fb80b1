"""The supervisor's part of the link: the handshake, slot 0 for the engine's life, and the slots nobody uses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

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
UNDECODABLE_LIMIT = 3
"""Messages in a row on slot 0 that do not decode before the link counts as broken."""
ABORT_AT_ONCE = 4096
"""Wire ids in one abort message."""
STRANGERS_KEPT = 4096
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
        on_step: Callable[[Codec, object], None] = lambda codec, step: None,
    ) -> None:
        """`port` 0 takes a free one. `on_phase` is called at each handshake message with the phase of the last rank,
        `on_step(codec, step)` for each message that reaches slot 0 once `use` was called.

        Raises `UsageError` when the port is taken or a slot cannot be bound.
        """
        self._on_phase = on_phase
        self._on_death = on_death
        self._on_step = on_step
        self._loads = LoadFeed(on_load)
        self._codec: Codec | None = None
        self._handshake: Handshake | None = None
        self._slots: dict[int, Slot] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._loop = asyncio.get_running_loop()
        self._undecodable = 0
        self._reading = False
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
                self._slots[index] = Slot(index, *self._pairs[index])
        except LinkError as error:
            self.close()
            raise UsageError(str(error)) from None
        self.address = self._server.address
        """`tcp://127.0.0.1:P`, what the engine dials."""

    # -- the engine's life ---------------------------------------------------------------------------------------------

    def expect(self, launch: Launch) -> None:
        """Start to answer the ranks that `launch` will bring: the first engine's, or those of one that takes its place."""
        self._codec = None
        self._undecodable = 0
        self._discard(OWN_SLOT)
        self._handshake = Handshake(
            inputs=[pair[0] for pair in self._pairs],
            outputs=[pair[1] for pair in self._pairs],
            first_rank=launch.first_rank,
            rank_count=launch.rank_count,
        )
        if not self._reading:
            self._reading = True
            own, spare = self._slots[OWN_SLOT], self._slots[SPARE_SLOT]
            self._loop.add_reader(self._server.fd, self._read_handshake)
            self._loop.add_reader(own.input_fd, self._read_ready_maps)
            self._loop.add_reader(own.output_fd, self._read_own)
            self._drain(spare)
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
        """Read slot 0 with this codec from now on, until the next `expect`."""
        self._codec = codec

    def send(self, identity: bytes, frames: list[bytes]) -> None:
        """Queue a message to a rank, whose answer comes to slot 0; raises `LinkError` for one that is not connected."""
        self._slots[OWN_SLOT].send(identity, frames)

    def abort(self, wire_ids: Sequence[str]) -> None:
        """Abort requests of any slot, in every rank: a rank ignores ids that it does not have (vLLM 0.27 to 0.33)."""
        codec = self._codec
        if codec is None:
            return  # no engine runs anything
        for start in range(0, len(wire_ids), ABORT_AT_ONCE):
            frames = codec.abort(wire_ids[start : start + ABORT_AT_ONCE])
            for rank in self.ranks():
                try:
                    self.send(rank.identity, frames)
                except LinkError as error:
                    _log.warning("%d aborts were not sent: %s", len(wire_ids), error)

    # -- slots ---------------------------------------------------------------------------------------------------------

    def lend(self, index: int) -> None:
        """Let a slot go to the front end that will bind it."""
        slot = self._slots.pop(index, None)
        if slot is not None:
            self._release(slot)

    def reclaim(self, index: int) -> None:
        """Bind a slot whose front end is gone, and drain it; raises `LinkError` while somebody holds it."""
        if index not in self._slots:
            self._slots[index] = Slot(index, *self._pairs[index])
            self._drain(self._slots[index])

    def close(self) -> None:
        self._loads.close()
        for slot in self._slots.values():
            self._release(slot)
        self._slots = {}
        self._loop.remove_reader(self._server.fd)
        self._server.close()
        self._context.destroy(linger=0)

    def _release(self, slot: Slot) -> None:
        self._loop.remove_reader(slot.input_fd)
        self._loop.remove_reader(slot.output_fd)
        slot.close()

    def _drain(self, slot: Slot) -> None:
        strangers = Strangers(self.abort)
        self._loop.add_reader(slot.input_fd, self._discard_ready_maps, slot)
        self._loop.add_reader(slot.output_fd, self._discard_outputs, slot, strangers)
        self._discard_ready_maps(slot)
        self._discard_outputs(slot, strangers)

    # -- reading -------------------------------------------------------------------------------------------------------

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
        while OWN_SLOT in self._slots and (received := self._slots[OWN_SLOT].receive_ready()) is not None:
            try:
                handshake.receive_ready_map(*received)
            except HandshakeError as error:
                _log.warning("ignored on slot %d: %s", OWN_SLOT, error)
                continue
            self._on_phase(handshake.phase)

    def _read_own(self) -> None:
        for _ in range(MESSAGES_PER_WAKEUP):
            if OWN_SLOT not in self._slots or (frames := self._slots[OWN_SLOT].receive()) is None:
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
            step = codec.step(frames)
            load = codec.load(step)
        except WireError as error:
            self._undecodable += 1
            _log.warning("slot %d: a message does not fit the wire layout: %s", OWN_SLOT, error)
            if self._undecodable == UNDECODABLE_LIMIT:
                self._on_death(f"{UNDECODABLE_LIMIT} messages in a row could not be decoded, the last: {error}")
            return
        self._undecodable = 0
        self._on_step(codec, step)
        if load is not None:
            self._loads.put(load)

    def _discard(self, index: int) -> None:
        """Drop what an engine that is gone has sent to a slot of ours."""
        slot = self._slots[index]
        while slot.receive_ready() is not None or slot.receive() is not None:
            pass

    def _discard_ready_maps(self, slot: Slot) -> None:
        while self._slots.get(slot.index) is slot and slot.receive_ready() is not None:
            pass

    def _discard_outputs(self, slot: Slot, strangers: Strangers) -> None:
        for _ in range(MESSAGES_PER_WAKEUP):
            if self._slots.get(slot.index) is not slot or (frames := slot.receive()) is None:
                return
            if self._codec is not None:
                strangers.take(self._codec, frames)
        self._loop.call_soon(self._discard_outputs, slot, strangers)


class Strangers:
    """Aborts what still runs for a slot without a front end, each wire id once."""

    def __init__(self, abort: Callable[[Sequence[str]], None]) -> None:
        self._abort = abort
        self._seen: dict[str, None] = {}

    def take(self, codec: Codec, frames: Sequence[bytes]) -> None:
        """Look at one message of that slot. What does not decode is no reason to act: nobody waits for it."""
        if codec.is_death(frames):
            return  # slot 0 hears it too
        try:
            step = codec.step(frames)
        except WireError:
            return
        found = self._new(delta.request_id for delta in step.outputs if delta.finish_reason is None)
        if found:
            _log.info("%d generations without a front end are aborted in the engine", len(found))
            self._abort(found)

    def _new(self, wire_ids: Iterable[str]) -> list[str]:
        found = [wire_id for wire_id in wire_ids if wire_id not in self._seen]
        self._seen.update(dict.fromkeys(found))
        while len(self._seen) > STRANGERS_KEPT:
            del self._seen[next(iter(self._seen))]
        return found


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
