"""Windows and slow readers: a blocked call keeps its tokens, and memory stays bounded."""

from __future__ import annotations

import asyncio
import gc

from bridge.grpc.call import Call
from bridge.grpc.limits import Limits
from tests.grpc.conftest import Connector, Starter
from tests.grpc.raw import settings, window_update
from tests.grpc.serving import PACKAGE, Running, until


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
    assert connection._h2.queued_body_size() < 10 * 64
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
    assert connection._h2.queued_body_size() == 0
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
    assert connection.unsent() + connection._h2.queued_body_size() < 1 << 20
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
