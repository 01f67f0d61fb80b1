"""The engine's side of the sockets: DEALER handshake, a DEALER for each input, a PUSH for each output."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import zmq

from bridge.plugins.sim.encode import ENGINE_CORE_DEAD

Context = zmq.Context[zmq.Socket[bytes]]

NEVER_MSGPACK = b"\xc1"
"""The one byte msgpack leaves undefined."""


class DialError(Exception):
    """The front end that was dialled did not do its part of the handshake; one line."""


class Addresses(msgspec.Struct):
    """EngineZmqAddresses of INIT."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class Init(msgspec.Struct):
    """INIT. `parallel_config` only matters to mixture-of-experts data parallelism, which is not simulated."""

    addresses: Addresses


class Dial:
    """The handshake with whoever listens at `address`: HELLO, INIT, READY. `index` is this engine's global rank."""

    def __init__(self, context: Context, address: str, index: int) -> None:
        self.identity = struct.pack("<H", index)
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, self.identity)
        self.socket.setsockopt(zmq.LINGER, 1000)
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise DialError(f"cannot dial {address}: {error}") from None

    def say(self, status: str) -> None:
        """Send HELLO or READY, in the words of `vllm serve --headless`."""
        self.socket.send(msgspec.msgpack.encode({"status": status, "local": False, "headless": True}))

    def receive_init(self) -> Addresses | None:
        """The addresses of INIT, None while it has not come; raises `DialError` for an INIT that cannot be served."""
        try:
            payload = self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            addresses = msgspec.msgpack.decode(payload, type=Init).addresses
        except msgspec.MsgspecError as error:
            raise DialError(f"INIT cannot be decoded: {error}") from None
        if not addresses.inputs or len(addresses.inputs) != len(addresses.outputs):
            raise DialError("INIT must name as many output addresses as input addresses, and at least one")
        if addresses.coordinator_input is not None or addresses.coordinator_output is not None:
            raise DialError("INIT names a data-parallel coordinator; the simulated engine has no part for one")
        return addresses

    def close(self) -> None:
        self.socket.close()


class Inbox:
    """Input sockets. Closing them is what the death of vLLM's input thread amounts to."""

    def __init__(self, context: Context, addresses: Sequence[str], identity: bytes, ready: bytes) -> None:
        self.sockets: list[zmq.Socket[bytes]] = []
        for address in addresses:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            socket.send(ready)
            self.sockets.append(socket)

    def receive(self) -> Iterator[list[bytes]]:
        """The frames of every message that waits."""
        for socket in list(self.sockets):
            while not socket.closed:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                yield frames

    def close(self) -> None:
        for socket in self.sockets:
            socket.close(0)
        self.sockets = []


class Outbox:
    """Output sockets, and the faults that befall messages with outputs (`pending`: kind → messages to come)."""

    def __init__(self, context: Context, addresses: Sequence[str]) -> None:
        self.pending: Counter[str] = Counter()
        self._sockets: list[zmq.Socket[bytes]] = []
        for address in addresses:
            socket = context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 4000)
            socket.connect(address)
            self._sockets.append(socket)

    @property
    def alive(self) -> bool:
        return bool(self._sockets)

    def send(self, client: object, message: bytes) -> bool:
        """Queue a message; False when the output thread is dead or dies of this client index, as vLLM's does."""
        if not self._sockets:
            return True
        if not isinstance(client, int) or not 0 <= client < len(self._sockets):
            self.close(0)
            return False
        self._sockets[client].send(message)
        return True

    def take_fault(self, kind: str) -> bool:
        """Whether the next message with outputs shall suffer `kind`; counts it down."""
        if self.pending[kind] <= 0:
            return False
        self.pending[kind] -= 1
        return True

    def send_outputs(self, client: int, message: bytes) -> bool:
        """Like `send`, for a message with outputs: dropped, garbled or doubled when a fault says so."""
        if self.pending:
            if self.take_fault("drop"):
                return True
            if self.take_fault("garble"):
                message = NEVER_MSGPACK + message
            if self.take_fault("duplicate") and not self.send(client, message):
                return False
        return self.send(client, message)

    def send_death(self) -> None:
        """ENGINE_CORE_DEAD on every output socket."""
        for socket in self._sockets:
            socket.send(ENGINE_CORE_DEAD)

    def close(self, linger_ms: int) -> None:
        """Close, giving what is queued `linger_ms` to leave."""
        for socket in self._sockets:
            socket.close(linger_ms)
        self._sockets = []
