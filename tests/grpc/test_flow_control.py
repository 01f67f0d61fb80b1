"""Windows and slow readers: a blocked call keeps its tokens, and memory stays bounded."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

from bridge.grpc.call import Call
from bridge.grpc.connection import Connection
from bridge.grpc.limits import Limits
from tests.grpc.conftest import Connector, Starter
from tests.grpc.raw import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    RawClient,
    frame,
    message,
    reset,
    settings,
    window_update,
)
from tests.grpc.serving import PACKAGE, Running, until

LARGEST = 2**31 - 1
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR = 1, 3, 6


class Merging:
    """A handler's side as contracts have it: tokens wait here while the call is blocked."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.waiting: list[int] = []
        self.chunks = 0
        self.wakes = 0
        call.on_writable = self.writable

    def step(self, token: int) -> None:
        self.waiting.append(token)
        if not self.call.blocked:
            self.render()

    def writable(self) -> None:
        self.wakes += 1
        if self.waiting:
            self.render()

    def render(self) -> None:
        self.chunks += 1
        self.call.send(b"".join(token.to_bytes(4, "big") for token in self.waiting))
        self.waiting.clear()


def tokens(messages: list[bytes]) -> list[int]:
    body = b"".join(messages)
    return [int.from_bytes(body[at : at + 4], "big") for at in range(0, len(body), 4)]


async def test_tokens_merge_while_a_stream_window_is_spent(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=90))
    stream = await client.call()
    (call,) = await server.calls(1)
    merging = Merging(call)
    for token in range(1000):
        merging.step(token)
        server.server.flush()
    await client.quiet()
    assert len(client.body(stream)) == 90
    assert merging.chunks == 10
    assert call.blocked
    await client.send(window_update(stream, 1_000_000))
    await until(lambda: not merging.waiting)
    assert merging.chunks == 11
    assert merging.wakes == 1
    assert not call.blocked
    call.finish()
    await client.finished(stream)
    assert tokens(client.messages(stream)) == list(range(1000))


async def test_a_zero_window_blocks_from_the_start(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=0))
    stream = await client.call()
    (call,) = await server.calls(1)
    assert call.blocked
    await client.until(lambda c: bool(c.of(1, stream)))
    await client.send(window_update(stream, 10))
    await until(lambda: not call.blocked)


async def test_a_settings_change_opens_and_closes_windows(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=100))
    stream = await client.call()
    (call,) = await server.calls(1)
    merging = Merging(call)
    for token in range(20):
        merging.step(token)
    assert call.blocked
    await client.send(settings(window=100_000))
    await until(lambda: not merging.waiting)
    assert not call.blocked
    await client.send(settings(window=0))
    await until(lambda: call.blocked)
    call.finish()
    await client.send(window_update(stream, 100_000))
    await client.finished(stream)
    assert tokens(client.messages(stream)) == list(range(20))


async def test_one_blocked_stream_does_not_hold_its_neighbours(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=50))
    first, second = await client.call(), await client.call()
    blocked, free = await server.calls(2)
    blocked.send(b"x" * 200)
    server.server.flush()
    assert blocked.blocked
    assert not free.blocked
    free.send(b"y" * 20)
    free.finish()
    await client.finished(second)
    assert client.messages(second) == [b"y" * 20]
    assert not client.ended(first)


async def test_the_connection_window_blocks_every_call_and_is_shared(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=1_000_000))
    streams = [await client.call() for _ in range(10)]
    calls = await server.calls(10)
    merging = [Merging(call) for call in calls]
    for token in range(3000):
        for each in merging:
            each.step(token)
        server.server.flush()
    await client.quiet()
    assert sum(len(client.body(stream)) for stream in streams) == 65535
    assert all(call.blocked for call in calls)
    (connection,) = server.server._connections
    assert queued(connection) < 10 * 64
    for _ in range(40):
        await client.send(window_update(0, 20_000))
        await client.quiet(0.02)
    assert not any(each.waiting for each in merging)
    for call in calls:
        call.finish()
    for stream in streams:
        await client.finished(stream)
        assert tokens(client.messages(stream)) == list(range(3000))


async def test_streams_share_a_short_connection_window(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=1_000_000))
    streams = [await client.call() for _ in range(4)]
    for call in await server.calls(4):
        call.send(bytes(60_000))
    server.server.flush()
    await client.quiet()
    assert all(len(client.body(stream)) > 16_000 for stream in streams)


async def test_a_terminal_behind_a_spent_window_comes_last(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=10))
    stream = await client.call()
    (call,) = await server.calls(1)
    call.send(b"0123456789")
    call.send(b"the terminal is sent although the call is blocked")
    call.finish()
    await client.quiet()
    assert len(client.body(stream)) == 10
    assert not client.ended(stream)
    await client.send(window_update(stream, 1000))
    assert await client.finished(stream) == {"grpc-status": "0"}
    assert len(client.messages(stream)) == 2


async def test_a_client_that_does_not_read_blocks_its_calls_only(serve: Starter, connect: Connector) -> None:
    server = await serve()
    slow, quick = await connect(server, settings(window=2**31 - 1)), await connect(server)
    await slow.send(window_update(0, 2**31 - 65536))
    streams = [await slow.call() for _ in range(8)]
    await server.calls(8)
    quick_stream = await quick.call()
    calls = await server.calls(9)
    merging = [Merging(call) for call in calls[:8]]
    slow.pause()
    gc.collect()
    steps = 0
    while not calls[0].blocked:
        for each in merging:
            each.waiting.extend(range(2000))
            each.step(1)
        server.server.flush()
        steps += 1
        assert steps < 2000, "the transport never pushed back"
        await asyncio.sleep(0)
    assert all(call.blocked for call in calls[:8])
    assert not calls[8].blocked
    (connection,) = [c for c in server.server._connections if c.paused]
    before = connection.unsent()
    for _ in range(1000):
        for each in merging:
            each.step(1)
        server.server.flush()
    assert connection.unsent() == before
    assert queued(connection) == 0
    calls[8].send(b"quick")
    calls[8].finish()
    await quick.finished(quick_stream)
    slow._writer.transport.resume_reading()  # type: ignore[attr-defined]
    await slow.until(lambda c: not calls[0].blocked)
    for call in calls[:8]:
        call.finish()
    sent = [steps * 2001 + 1000] * 8
    for stream in streams:
        await slow.finished(stream)
    assert [len(tokens(slow.messages(stream))) for stream in streams] == sent


async def test_a_generator_waits_for_a_client_that_does_not_read(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=2**31 - 1))
    await client.send(window_update(0, 2**31 - 65536))
    client.pause()
    await client.call(PACKAGE + "Count", b"1000000 10000")
    await until(lambda: bool(server.server._connections) and any(c.paused for c in server.server._connections))
    (connection,) = server.server._connections
    await asyncio.sleep(0.2)
    assert connection.unsent() + queued(connection) < 1 << 20
    await client.close()
    await until(lambda: server.probe.task_ends == ["closed"])


async def test_requests_of_a_paused_client_are_bounded(serve: Starter, connect: Connector) -> None:
    """A client that sends without reading is not read any further."""
    server = await serve(Limits(write_buffer_bytes=1024, max_streams_per_connection=100_000))
    client = await connect(server, settings(window=2**31 - 1))
    await client.send(window_update(0, 2**31 - 65536))
    client.pause()
    _, big = client.request(PACKAGE + "Count", b"5000 10000")
    await client.send(big)
    await until(lambda: any(c.paused for c in server.server._connections))
    (connection,) = server.server._connections

    async def flood() -> None:
        while True:
            await client.send(b"".join(client.request("/no.Such/Method")[1] for _ in range(200)))

    flooding = asyncio.ensure_future(flood())
    await asyncio.sleep(1.0)
    assert connection._inlet._paused_input < 3 << 20
    assert not flooding.done()
    flooding.cancel()


async def test_a_100_000_token_prompt_needs_no_window_update(server: Running, connect: Connector) -> None:
    client = await connect(server)
    await client.quiet()
    stream = await client.call(PACKAGE + "Echo", bytes(300_000))
    await client.send(window_update(0, 1 << 20) + window_update(stream, 1 << 20))
    await client.finished(stream)
    assert len(client.messages(stream)[0]) == 300_000


def queued(connection: Connection) -> int:
    """Bytes of messages that the connection keeps."""
    outflow = connection.outflow
    return sum(map(len, outflow._out)) + sum(len(call.unsent) for call in outflow.waiting)


def goaway_code(client: RawClient) -> int:
    """The error of the last GOAWAY."""
    return int.from_bytes(client.of(GOAWAY)[-1].payload[4:8], "big")


async def test_a_late_update_does_not_end_up_in_another_streams_request(server: Running, connect: Connector) -> None:
    """Updates of closed streams come between the frames of others, and reads end where they like."""
    client = await connect(server)
    first = await client.call(PACKAGE + "Echo", b"one")
    await client.finished(first)
    body = message(bytes(range(256)) * 16)
    second = client.stream()
    head = frame(HEADERS, END_HEADERS, second, client.headers(PACKAGE + "Echo"))
    data = frame(DATA, END_STREAM, second, body)
    await client.send(head + window_update(first, 8) + data[:1000])
    await client.quiet(0.05)
    await client.send(data[1000:])
    await client.finished(second)
    assert client.messages(second) == [body[5:]]


async def test_a_window_of_zero_may_become_the_largest(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=0))
    stream = await client.call()
    (call,) = await server.calls(1)
    call.send(b"waits")
    await client.until(lambda c: bool(c.of(HEADERS, stream)))
    await client.send(settings(window=LARGEST))
    await client.until(lambda c: bool(c.messages(stream)))
    call.finish()
    assert await client.finished(stream) == {"grpc-status": "0"}
    assert client.messages(stream) == [b"waits"]


@pytest.mark.parametrize("before", [True, False])
async def test_trailers_need_no_window(server: Running, connect: Connector, before: bool) -> None:
    client = await connect(server, settings(window=0 if before else 100))
    stream = await client.call()
    (call,) = await server.calls(1)
    call.send_initial_metadata()
    await client.until(lambda c: bool(c.of(HEADERS, stream)))
    if not before:
        await client.send(settings(window=0))
        await until(lambda: call.blocked)
    call.finish()
    assert await client.finished(stream) == {"grpc-status": "0"}
    assert not client.of(RST_STREAM)


async def test_a_window_below_zero_has_to_be_filled_first(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=100))
    stream = await client.call()
    (call,) = await server.calls(1)
    call.send(bytes(200))
    await client.until(lambda c: len(c.body(stream)) == 100)
    await client.send(settings(window=40))
    await client.send(window_update(stream, 60))
    await client.quiet()
    assert len(client.body(stream)) == 100
    await client.send(window_update(stream, 5))
    await client.until(lambda c: len(c.body(stream)) > 100)
    await client.quiet()
    assert len(client.body(stream)) == 105
    await client.send(settings(window=140))
    await client.until(lambda c: len(c.body(stream)) > 105)
    assert len(client.body(stream)) == 205


async def test_a_stream_window_that_overflows_ends_the_stream(server: Running, connect: Connector) -> None:
    """Nothing follows the RST_STREAM, although bytes waited and have a window now."""
    client = await connect(server, settings(window=10))
    stream, other = await client.call(), await client.call()
    call, healthy = await server.calls(2)
    call.send(bytes(100))
    await client.until(lambda c: len(c.body(stream)) == 10)
    await client.send(window_update(stream, LARGEST) + window_update(stream, 1))
    await client.until(lambda c: bool(c.of(RST_STREAM, stream)))
    healthy.finish()
    await client.finished(other)
    own = [one for one in client.frames if one.stream_id == stream]
    assert [one.kind for one in own] == [HEADERS, DATA, RST_STREAM]
    assert int.from_bytes(own[-1].payload, "big") == FLOW_CONTROL_ERROR
    (connection,) = server.server._connections
    assert not connection.outflow.waiting and not call.unsent


async def test_the_largest_window_given_back_byte_by_byte_does_not_overflow(
    server: Running, connect: Connector
) -> None:
    client = await connect(server, settings(window=LARGEST))
    await client.send(window_update(0, LARGEST - 65535))
    stream = await client.call()
    (call,) = await server.calls(1)
    for size in (1, 1000, 50_000):
        call.send(bytes(size))
        before = len(client.body(stream))
        await client.until(lambda c, expected=before + 5 + size: len(c.body(stream)) == expected)
        await client.send(window_update(stream, 5 + size) + window_update(0, 5 + size))
    call.finish()
    await client.finished(stream)
    assert [len(one) for one in client.messages(stream)] == [1, 1000, 50_000]
    assert not client.of(GOAWAY) and not client.of(RST_STREAM)


@pytest.mark.parametrize("more", [b"", frame(PING, 0, 0, bytes(8)) * 1000], ids=["alone", "in a long read"])
async def test_a_connection_window_that_overflows_ends_the_connection(
    server: Running, connect: Connector, more: bytes
) -> None:
    client = await connect(server)
    await client.call()
    await server.calls(1)
    await client.send(window_update(0, LARGEST) + more)
    await client.until(lambda c: c.closed)
    assert goaway_code(client) == FLOW_CONTROL_ERROR
    assert len(client.of(GOAWAY)) == 1


async def test_settings_that_overflow_a_window_end_the_connection(server: Running, connect: Connector) -> None:
    client = await connect(server)
    stream = await client.call()
    await server.calls(1)
    await client.send(window_update(stream, LARGEST - 65535))
    await client.quiet(0.05)
    assert not client.of(GOAWAY)
    await client.send(settings(window=65536))
    await client.until(lambda c: c.closed)
    assert goaway_code(client) == FLOW_CONTROL_ERROR


BAD_UPDATES = {
    "nothing, connection": (lambda stream: window_update(0, 0), PROTOCOL_ERROR),
    "nothing, stream": (lambda stream: window_update(stream, 0), PROTOCOL_ERROR),
    "three bytes": (lambda stream: frame(WINDOW_UPDATE, 0, stream, b"abc"), FRAME_SIZE_ERROR),
    "five bytes": (lambda stream: frame(WINDOW_UPDATE, 0, 0, b"abcde"), FRAME_SIZE_ERROR),
    "idle stream": (lambda stream: window_update(stream + 2, 1), PROTOCOL_ERROR),
    "even stream": (lambda stream: window_update(2, 1), PROTOCOL_ERROR),
    "too large a window": (lambda stream: settings(window=LARGEST + 1), FLOW_CONTROL_ERROR),
    "in a header block": (
        lambda stream: (
            frame(HEADERS, 0, stream + 2, b"\x83") + window_update(stream, 1) + frame(CONTINUATION, 4, stream + 2)
        ),
        PROTOCOL_ERROR,
    ),
}


@pytest.mark.parametrize("name", BAD_UPDATES)
async def test_updates_that_are_errors_end_the_connection(server: Running, connect: Connector, name: str) -> None:
    client = await connect(server)
    stream = await client.call()
    await server.calls(1)
    make, code = BAD_UPDATES[name]
    await client.send(make(stream))
    await client.until(lambda c: c.closed)
    assert goaway_code(client) == code


async def test_updates_of_closed_streams_are_ignored(server: Running, connect: Connector) -> None:
    client = await connect(server)
    done, refused, dropped = await client.call(PACKAGE + "Echo"), await client.call("/no.Such/Method"), client.stream()
    malformed = frame(HEADERS, END_HEADERS | END_STREAM, dropped, client.headers(te="Trailers", connection="close"))
    await client.send(malformed)
    for stream in (done, refused, dropped):
        await client.until(lambda c, stream=stream: c.ended(stream))
    await client.send(b"".join(window_update(stream, LARGEST) * 2 for stream in (done, refused, dropped)))
    last = await client.call(PACKAGE + "Echo", b"alive")
    await client.finished(last)
    assert client.messages(last) == [b"alive"]
    assert not client.of(GOAWAY)


async def test_frames_may_be_cut_at_every_byte(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=10))
    stream, request = client.request(PACKAGE + "Echo", bytes(80))
    whole = request + settings(window=15) + window_update(stream, 30) + frame(PING, 0, 0, b"12345678")
    whole += window_update(stream, 7) + settings(window=20) + window_update(0, 1)
    for at in range(len(whole)):
        await client.send(whole[at : at + 1])
        await asyncio.sleep(0)
    await client.until(lambda c: len(c.body(stream)) >= 57)
    await client.quiet(0.05)
    assert len(client.body(stream)) == 20 + 30 + 7
    assert [one.payload for one in client.of(PING)] == [b"12345678"]
    await client.send(window_update(stream, 100))
    await client.finished(stream)
    assert client.messages(stream) == [bytes(80)]


async def test_a_large_reply_never_exceeds_what_was_granted(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=1000))
    random_ = random.Random(1)
    await client.quiet(0.05)
    stream = await client.call(PACKAGE + "Echo", bytes(range(256)) * 800)
    own, whole = 1000, 65535
    while not client.ended(stream):
        await client.quiet(0.02)
        got = len(client.body(stream))
        assert got == min(own, whole, 204_805)
        grants = random_.choice(((40_000, 0), (0, 30_000), (17_000, 16_384), (50_000, 50_000)))
        own, whole = own + grants[0], whole + grants[1]
        for stream_id, grant in zip((stream, 0), grants, strict=True):
            if grant:
                await client.send(window_update(stream_id, grant))
    assert client.messages(stream) == [bytes(range(256)) * 800]
    assert max(len(one.payload) for one in client.of(DATA)) == 16384
    assert client.trailers(stream) == {"grpc-status": "0"}


async def test_a_call_that_is_cancelled_takes_its_waiting_bytes_along(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=10))
    stream = await client.call()
    (call,) = await server.calls(1)
    call.send(bytes(1000))
    await client.until(lambda c: len(c.body(stream)) == 10)
    (connection,) = server.server._connections
    assert call in connection.outflow.waiting
    await client.send(reset(stream) + window_update(stream, 1000))
    await until(lambda: call.ended)
    await client.quiet(0.05)
    assert not connection.outflow.waiting and not call.unsent
    assert len(client.body(stream)) == 10


async def test_a_deadline_that_passes_while_bytes_wait_comes_behind_them(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=10))
    stream = await client.call(grpc_timeout="100m")
    (call,) = await server.calls(1)
    call.send(bytes(100))
    await until(lambda: call.ended)
    await client.quiet(0.05)
    assert not client.ended(stream)
    await client.send(window_update(stream, 1000))
    assert (await client.finished(stream))["grpc-status"] == "4"
    assert client.messages(stream) == [bytes(100)]


async def test_what_waits_is_gone_with_the_connection(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=10))
    for _ in range(40):
        await client.call()
    calls = list(await server.calls(40))
    for call in calls:
        call.send(bytes(1000))
        call.finish()
    await until(lambda: all(len(call.unsent) == 995 for call in calls))
    (connection,) = server.server._connections
    await client.close()
    await until(lambda: not server.server._connections)
    assert not connection.outflow.waiting and not connection.outflow.take()
    assert not any(call.unsent for call in calls)


async def test_a_refused_connection_has_its_messages_before_their_trailers(server: Running, connect: Connector) -> None:
    client = await connect(server)
    stream = await client.call()
    (call,) = await server.calls(1)
    call.send(b"first")
    await client.until(lambda c: bool(c.messages(stream)))
    (connection,) = server.server._connections
    call.send(b"last")
    call.finish()
    connection.refuse("ping_flood")
    await client.until(lambda c: c.closed)
    assert client.messages(stream) == [b"first", b"last"]
    assert client.trailers(stream) == {"grpc-status": "0"}
    assert [one.kind for one in client.frames if one.stream_id == stream] == [HEADERS, DATA, DATA, HEADERS]
    assert len(client.of(GOAWAY)) == 1


async def test_a_draining_connection_waits_for_its_blocked_streams(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=10))
    streams = [await client.call() for _ in range(3)]
    for call in await server.calls(3):
        call.send(bytes(100))
        call.finish()
    await client.quiet(0.05)
    draining = asyncio.ensure_future(server.server.drain(10.0))
    await client.until(lambda c: bool(c.of(PING)))
    await client.send(frame(PING, ACK, 0, client.of(PING)[0].payload))
    await client.until(lambda c: len(c.of(GOAWAY)) == 2)
    assert not any(client.ended(stream) for stream in streams)
    for stream in streams:
        await client.send(window_update(stream, 95))
        await client.finished(stream)
    await client.until(lambda c: c.closed)
    assert [client.messages(stream) for stream in streams] == [[bytes(100)]] * 3
    assert await draining == 0


async def test_a_larger_window_is_used_behind_the_acknowledgement_only(server: Running, connect: Connector) -> None:
    """Until then strict clients hold the old window against what arrives."""
    client = await connect(server, settings(window=10))
    await client.quiet(0.05)
    stream = await client.call()
    (call,) = await server.calls(1)
    call.on_writable = lambda: call.send(b"more")
    call.send(b"12345")
    await client.until(lambda c: len(c.body(stream)) == 10)
    before = len(client.frames)
    await client.send(settings(window=100))
    await client.until(lambda c: len(c.messages(stream)) == 2)
    assert [(one.kind, one.flags) for one in client.frames[before:]] == [(SETTINGS, ACK), (DATA, 0)]
    assert client.messages(stream) == [b"12345", b"more"]


async def test_a_call_is_over_when_its_last_bytes_are_out(server: Running, connect: Connector) -> None:
    """Nothing more has to happen on the connection for it."""
    client = await connect(server, settings(window=10))
    stream = await client.call()
    (call,) = await server.calls(1)
    call.send(bytes(100))
    call.finish()
    await client.until(lambda c: len(c.body(stream)) == 10)
    (connection,) = server.server._connections
    assert connection.lingering == 1
    await client.send(window_update(stream, 1000))
    await client.finished(stream)
    await until(lambda: not connection.calls, timeout_s=1.0)
    assert connection.lingering == server.server.stats.calls_lingering == 0
