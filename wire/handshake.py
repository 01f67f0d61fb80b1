"""The start-up handshake that engines share: HELLO → INIT → (ready map on every input socket) + READY.

`Handshake` is sans-IO: payloads in, replies out. `HandshakeServer` is its ROUTER socket. Both orders of the ready map
and READY occur (vLLM 0.32, ten milliseconds apart), so a rank is up only once both came. An engine waits five minutes
between HELLO and INIT (vLLM 0.32), so INIT goes out at once.

    engine DEALER ── HELLO {status, local, headless} ─────────▶ bridge ROUTER
    engine DEALER ◀─ INIT {addresses, parallel_config} ──────── bridge ROUTER
    engine DEALER ── ready map, on each input socket ─────────▶ slot input ROUTER
    engine DEALER ── READY {status, local, headless, …} ──────▶ bridge ROUTER
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

MAX_PAYLOAD = 1 << 20
"""Bytes of a handshake frame; real ones are under 2 KiB."""


class HandshakeError(Exception):
    """A handshake message that cannot be part of this engine's start; the text says what and from whom."""


class Phase(enum.Enum):
    """How far one rank has come."""

    AWAITED = "waiting for HELLO"
    LOADING = "loading"
    READY = "ready"


def identity_of(rank: int) -> bytes:
    """The ZMQ identity of a rank: its global index as two little-endian bytes (vLLM, all versions since 0.8)."""
    return struct.pack("<H", rank)


def rank_of(identity: bytes) -> int:
    """The rank index in a ZMQ identity; raises `HandshakeError` when the identity is not one."""
    if len(identity) != 2:
        raise HandshakeError(f"the peer identity {identity.hex()} is not a 2-byte rank index")
    return int.from_bytes(identity, "little")


class RankState:
    """What is known of one rank: `ready` is its ready map once it came, `said_ready` whether READY came too."""

    __slots__ = ("hello", "identity", "phase", "ready", "said_ready")

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.phase = Phase.AWAITED
        self.hello: dict[str, Any] = {}
        self.ready: dict[str, Any] | None = None
        self.said_ready = False


class Handshake:
    """The state of one engine's handshake, all ranks.

    `first_rank` and `rank_count` name the global indices that may dial; `inputs` and `outputs` are the slot addresses
    that INIT offers, one pair a slot.
    """

    def __init__(
        self, *, inputs: Sequence[str], outputs: Sequence[str], first_rank: int = 0, rank_count: int = 1
    ) -> None:
        if len(inputs) != len(outputs) or not inputs:
            raise ValueError("a handshake offers at least one pair of input and output addresses")
        self._init = msgspec.msgpack.encode(
            {
                "addresses": {
                    "inputs": list(inputs),
                    "outputs": list(outputs),
                    "coordinator_input": None,
                    "coordinator_output": None,
                    "frontend_stats_publish_address": None,
                },
                "parallel_config": {},
            }
        )
        self.ranks = {identity_of(i): RankState(identity_of(i)) for i in range(first_rank, first_rank + rank_count)}

    def receive(self, identity: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        """Take a frame from the handshake socket; returns the (identity, payload) replies to send.

        A HELLO from a rank that was already past it means that the rank's process was replaced: its state starts over.
        """
        state = self._state(identity)
        message = _decode_map(payload, "handshake message")
        status = message.get("status")
        if status == "HELLO":
            state.hello = message
            state.phase, state.ready, state.said_ready = Phase.LOADING, None, False
            return [(identity, self._init)]
        if status == "READY":
            if state.phase is Phase.AWAITED:
                raise HandshakeError(f"rank {rank_of(identity)} said READY before HELLO")
            state.said_ready = True
            self._settle(state)
            return []
        raise HandshakeError(f"rank {rank_of(identity)} sent the status {status!r}; HELLO or READY was expected")

    def receive_ready_map(self, identity: bytes, payload: bytes) -> None:
        """Take the first frame a rank sends on an input socket."""
        state = self._state(identity)
        state.ready = _decode_map(payload, "ready map")
        if state.phase is not Phase.AWAITED:
            self._settle(state)

    def _settle(self, state: RankState) -> None:
        if state.said_ready and state.ready is not None:
            state.phase = Phase.READY

    def _state(self, identity: bytes) -> RankState:
        state = self.ranks.get(identity)
        if state is None:
            raise HandshakeError(f"rank {rank_of(identity)} is not among the {len(self.ranks)} this engine should have")
        return state

    @property
    def done(self) -> bool:
        """Whether every rank is up."""
        return all(state.phase is Phase.READY for state in self.ranks.values())

    @property
    def phase(self) -> Phase:
        """The phase of the rank that is furthest behind."""
        order = list(Phase)
        return min((state.phase for state in self.ranks.values()), key=order.index)


def _decode_map(payload: bytes, what: str) -> dict[str, Any]:
    if len(payload) > MAX_PAYLOAD:
        raise HandshakeError(f"a {what} of {len(payload)} bytes is over the limit of {MAX_PAYLOAD}")
    try:
        value = msgspec.msgpack.decode(payload, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"a {what} is not a msgpack map: {error}") from None
    return value


class HandshakeServer:
    """The ROUTER socket that engines dial. Bound to loopback unless the caller names another address."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        """Bind `address` (`tcp://127.0.0.1:P`, `*` as the port for a free one); raises `zmq.ZMQError` when taken."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close(0)
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def fd(self) -> int:
        """Edge-triggered: drain `receive()` to None at each event."""
        return int(self._socket.getsockopt(zmq.FD))

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next (identity, payload), or None when none waits. Messages that are not two frames are dropped."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) == 2:
                return frames[0], frames[1]

    def send(self, identity: bytes, payload: bytes) -> None:
        self._socket.send_multipart([identity, payload], zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
