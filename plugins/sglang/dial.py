"""The engine's side of the sockets: the handshake's DEALER, a DEALER for each input, a PUSH for each output."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from bridge.wire.handshake import identity_of

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

INIT_LIMIT_S = 600.0
"""Longest wait for INIT once the model is up; a front end answers HELLO at once."""
INIT_SLICE_S = 15.0
"""Between two log lines while waiting."""
HANDSHAKE_LINGER_MS = 1000

_log = logging.getLogger(__name__)


class DialError(Exception):
    """Whoever listens at the handshake address did not do its part; one line."""


class Addresses(msgspec.Struct):
    """EngineZmqAddresses of INIT, the part that matters here."""

    inputs: list[str]
    outputs: list[str]


class Init(msgspec.Struct):
    """INIT."""

    addresses: Addresses


def unbounded(socket: Socket) -> Socket:
    """No high-water mark, so that a stalled front end never blocks the scheduler; no linger, so that it may end."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


@dataclass(frozen=True)
class Sockets:
    """The data sockets of a rank, one pair a slot, in the order INIT offered them."""

    inputs: Sequence[Socket]
    outputs: Sequence[Socket]
    output_addresses: Sequence[str]


class Dial:
    """One rank's handshake. HELLO goes out at once, so that a front end sees the rank load; READY follows with the model."""

    def __init__(self, context: Context, address: str, rank: int) -> None:
        """Raises `DialError` for an address that cannot be dialled."""
        self._context = context
        self._address = address
        self._identity = identity_of(rank)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._identity)
        self._socket.setsockopt(zmq.LINGER, HANDSHAKE_LINGER_MS)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise DialError(f"cannot dial {address}: {error}") from None
        self._say("HELLO")

    def _say(self, status: str) -> None:
        self._socket.send(msgspec.msgpack.encode({"status": status, "local": True, "headless": True}))

    def finish(self, ready: Mapping[str, Any]) -> Sockets:
        """Wait for INIT, say READY, and send the ready map on every input. Raises `DialError`."""
        addresses = self._receive_init()
        self._say("READY")
        payload = msgspec.msgpack.encode(ready)
        inputs = []
        for address in addresses.inputs:
            socket = unbounded(self._context.socket(zmq.DEALER))
            socket.setsockopt(zmq.IDENTITY, self._identity)
            socket.connect(address)
            socket.send(payload)
            inputs.append(socket)
        outputs = []
        for address in addresses.outputs:
            socket = unbounded(self._context.socket(zmq.PUSH))
            socket.connect(address)
            outputs.append(socket)
        self._socket.close()
        return Sockets(inputs, outputs, addresses.outputs)

    def _receive_init(self) -> Addresses:
        end = time.monotonic() + INIT_LIMIT_S
        while not self._socket.poll(int(INIT_SLICE_S * 1000), zmq.POLLIN):
            if time.monotonic() >= end:
                raise DialError(f"nobody answered HELLO at {self._address} within {INIT_LIMIT_S:g} s")
            _log.info("waiting for the front end at %s to answer HELLO", self._address)
        try:
            addresses = msgspec.msgpack.decode(self._socket.recv_multipart()[-1], type=Init).addresses
        except msgspec.MsgspecError as error:
            raise DialError(f"INIT from {self._address} cannot be decoded: {error}") from None
        if not addresses.inputs or len(addresses.inputs) != len(addresses.outputs):
            raise DialError(f"INIT from {self._address} must name as many outputs as inputs, and at least one")
        return addresses
