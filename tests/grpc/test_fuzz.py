"""Arbitrary frames in arbitrary pieces, fed without a socket: nothing escapes a connection, and nothing is left of it."""

from __future__ import annotations

import asyncio
import random

import hpack
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.grpc.call import Call
from bridge.grpc.connection import Connection
from bridge.grpc.server import Server
from bridge.grpc.stats import ServerStats
from tests.grpc import raw
from tests.grpc.serving import PACKAGE, Probe


class Wire:
    """A transport that swallows what it is given, and pushes back when told to."""

    def __init__(self) -> None:
        self.closed = False
        self.written = 0

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += len(data)

    def get_extra_info(self, name: str) -> object:
        return ("127.0.0.1", 1) if name == "peername" else None

    def set_write_buffer_limits(self, high: int) -> None:
        assert high > 0

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    abort = close


def frames(random_: random.Random, encoder: hpack.Encoder) -> list[bytes]:
    """Requests, their bodies, and control frames; a rude client has every kind of wrong ones among them."""
    out, stream = [], 1
    rude = random_.random() < 0.4
    for _ in range(random_.randrange(1, 40)):
        known = max(1, stream - 2 * random_.randrange(1, 5))
        some = random_.choice([0, 2, stream, random_.randrange(1 << 31)]) if rude and random_.random() < 0.1 else known
        kind = random_.randrange(14 if rude else 9)
        if kind < 5:
            path = PACKAGE + random_.choice(["Raw", "Echo", "Count", "Chat", "Fail", "Nope", "Endless"])
            fields = [(":method", random_.choice(["POST"] * 9 + ["GET"])), (":scheme", "http"), (":path", path)]
            fields += [(":authority", "x"), ("content-type", "application/grpc"), ("grpc-timeout", "1S")]
            if random_.random() < 0.3:
                fields.append((random_.choice(["grpc-encoding", "x-bin", "te"]), random_.choice(["gzip", "!", ""])))
            end = random_.random() < 0.2
            out.append(raw.frame(raw.HEADERS, raw.END_HEADERS | end, stream, encoder.encode(fields)))
            body = raw.message(random_.choice([b"", b"3 10", b"200 2000", b"stop"]), random_.choice([0] * 9 + [1, 7]))
            if not end and random_.random() < 0.9:
                cut = random_.randrange(len(body) + 1)
                out.append(raw.frame(raw.DATA, 0, stream, body[:cut]))
                out.append(raw.frame(raw.DATA, raw.END_STREAM, stream, body[cut:]))
            stream += 2
        elif kind == 5:
            out.append(raw.reset(some, random_.randrange(20)))
        elif kind == 6:
            out.append(raw.settings(window=random_.choice([0, 1, 100, 65535, 1 << 20])))
        elif kind == 7:
            sizes = [0, 1 << 20, (1 << 31) - 1] if rude else [1, 100, 1000, 65535]
            out.append(raw.window_update(random_.choice([0, some]), random_.choice(sizes)))
        elif kind == 8:
            out.append(raw.frame(raw.PING, random_.choice([0, raw.ACK]), 0, random_.randbytes(8)))
        elif kind == 9:
            out.append(raw.frame(raw.GOAWAY, 0, 0, random_.randbytes(8)))
        elif kind == 10:
            out.append(raw.frame(raw.SETTINGS, raw.ACK, 0))
        elif kind == 11:
            out.append(raw.frame(raw.DATA, random_.randrange(16), some, random_.randbytes(random_.randrange(20))))
        elif random_.random() < 0.2:
            payload = random_.randbytes(random_.randrange(30))
            out.append(raw.frame(random_.randrange(256), random_.randrange(256), some, payload))
    return out


async def converse(seed: int) -> ServerStats:
    """Talk, hang up, look at what is left; the server's counters at the end."""
    random_ = random.Random(seed)
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    probe = Probe()
    server = Server([probe])
    connection, wire = Connection(server), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    data = raw.PREFACE + raw.settings() + b"".join(frames(random_, hpack.Encoder()))
    if random_.random() < 0.1:
        at = random_.randrange(len(data))
        data = data[:at] + random_.randbytes(3) + data[at + random_.randrange(5) :]
    position = 0
    while position < len(data) and not wire.closed:
        size = random_.choice([1, 10, 100, 1000, 10_000])
        connection.data_received(data[position : position + size])
        position += size
        for call in random_.sample(probe.open, min(3, len(probe.open))):
            use(call, random_)
        if random_.random() < 0.1:
            connection.resume_writing() if connection.paused else connection.pause_writing()
        if random_.random() < 0.3:
            server.flush()
        if random_.random() < 0.3:
            await asyncio.sleep(0)
    if random_.random() < 0.3:
        connection.check(server.loop.time() + random_.choice([30, 100, 1000]))
        connection.shut_down()
    connection.connection_lost(None)
    for call in probe.open:
        use(call, random_)
    for _ in range(10):
        await asyncio.sleep(0)
    stats = server.stats
    assert (stats.calls_open, stats.calls_lasting, stats.calls_lingering, stats.connections) == (0, 0, 0, 0)
    assert stats.buffered_bytes == 0
    assert not server.waiting
    assert not server._tasks
    assert not failures
    cancelled = [call for call, _ in probe.cancelled]
    assert len(set(map(id, cancelled))) == len(cancelled)
    await server.close()
    return stats


def use(call: Call, random_: random.Random) -> None:
    """Anything a handler may do."""
    action = random_.randrange(5)
    if action == 0:
        call.finish()
    elif action == 1:
        call.send_initial_metadata((("a", "b"),))
    else:
        call.send(b"x" * random_.choice([0, 10, 5000, 100_000]))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_any_conversation_leaves_nothing_behind(seed: int) -> None:
    stats = asyncio.run(converse(seed))
    assert (stats.calls_open, stats.connections, stats.buffered_bytes) == (0, 0, 0)
