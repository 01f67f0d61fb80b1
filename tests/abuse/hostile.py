"""Runs attacks: connections in threads that send what an attack says, and connect again when they are thrown out."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import hpack

from tests.grpc import raw

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
HEALTH = "/vllm.grpc.engine.VllmEngine/HealthCheck"

Bytes = bytes | memoryview
Script = Iterator[Bytes | float]
"""What one connection sends, from its first byte on: bytes, and pauses in seconds. Its end closes the connection."""


class Hand:
    """Writes the frames of one connection."""

    def __init__(self) -> None:
        self._encoder = hpack.Encoder()
        self._blocks: dict[tuple[tuple[str, str], ...], bytes] = {}
        self._next = 1

    def stream(self) -> int:
        self._next += 2
        return self._next - 2

    def block(self, path: str = GENERATE, *extra: tuple[str, str], method: str = "POST", kind: str = "") -> bytes:
        """A header block. The second and later ones of the same fields are their table's indices, and cost nothing."""
        fields = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        fields += [("te", "trailers"), ("content-type", kind or "application/grpc"), *extra]
        key = tuple(fields)
        block = self._blocks.get(key)
        if block is None:
            first = bytes(self._encoder.encode(fields))
            self._blocks[key] = bytes(self._encoder.encode(fields))
            return first
        return block

    def open(self, path: str = GENERATE, *extra: tuple[str, str], end: bool = False) -> tuple[int, bytes]:
        """A new stream and its HEADERS."""
        stream = self.stream()
        flags = raw.END_HEADERS | (raw.END_STREAM if end else 0)
        return stream, raw.frame(raw.HEADERS, flags, stream, self.block(path, *extra))

    def request(self, body: bytes, path: str = GENERATE) -> tuple[int, bytes]:
        """A new stream and its whole request of one message."""
        stream, headers = self.open(path)
        return stream, headers + raw.frame(raw.DATA, raw.END_STREAM, stream, raw.message(body))


@dataclass(frozen=True)
class Attack:
    """`connections` clients that follow `script` at the same time; without `reads` they take nothing from the socket."""

    script: Callable[[Hand], Script]
    connections: int = 4
    reads: bool = True
    per_second: float | None = None
    """Connections a client may make in a second."""

    @property
    def name(self) -> str:
        return self.script.__name__ + ("" if self.reads else "_without_reading")


class Toll:
    """What an attack did so far."""

    def __init__(self) -> None:
        self.connections = 0
        self.sent = 0


@contextmanager
def under(attack: Attack, port: int) -> Iterator[Toll]:
    """The attack goes on as long as the block does."""
    ended = threading.Event()
    toll = Toll()
    threads = [threading.Thread(target=_attack, args=(attack, port, toll, ended)) for _ in range(attack.connections)]
    for thread in threads:
        thread.start()
    try:
        yield toll
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _attack(attack: Attack, port: int, toll: Toll, ended: threading.Event) -> None:
    while not ended.is_set():
        started = time.monotonic()
        with contextlib.suppress(OSError), socket.socket() as sock:
            if not attack.reads:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(5.0)
            sock.connect(("127.0.0.1", port))
            sock.setblocking(False)
            toll.connections += 1
            _follow(attack.script(Hand()), sock, attack.reads, toll, ended)
        if attack.per_second is not None:
            ended.wait(max(0.0, started + 1 / attack.per_second - time.monotonic()))


def _follow(script: Script, sock: socket.socket, reads: bool, toll: Toll, ended: threading.Event) -> None:
    """To the script's end, the other side's end, or the attack's."""
    gone = select.POLLRDHUP | select.POLLHUP | select.POLLERR
    poll = select.poll()
    pending = memoryview(b"")
    resume_at = 0.0
    while not ended.is_set():
        if not pending and time.monotonic() >= resume_at:
            step = next(script, None)
            if step is None:
                return
            if isinstance(step, float):
                resume_at = time.monotonic() + step
            else:
                pending = memoryview(step)
        wait_s = 0.05 if pending else min(0.05, max(0.0, resume_at - time.monotonic()))
        poll.register(sock, gone | (select.POLLIN if reads else 0) | (select.POLLOUT if pending else 0))
        ready = sum(what for _, what in poll.poll(wait_s * 1000))
        if (ready & select.POLLIN and not sock.recv(1 << 16)) or (ready & gone and not ready & select.POLLIN):
            return
        if ready & select.POLLOUT:
            sent = sock.send(pending)
            toll.sent += sent
            pending = pending[sent:]
