"""The end of a server: two GOAWAYs, streams that finish, streams that cannot, and what is cut."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest

from bridge.grpc.status import CancelReason
from tests.grpc.conftest import Connector
from tests.grpc.raw import ACK, GOAWAY, PING, frame
from tests.grpc.serving import PACKAGE, Running, start_on, until


async def test_two_goaways_around_a_round_trip_and_then_the_streams_finish(server: Running, connect: Connector) -> None:
    client = await connect(server)
    stream = await client.call()
    (call,) = await server.calls(1)
    draining = asyncio.ensure_future(server.server.drain(5))
    await client.until(lambda c: bool(c.of(PING)))
    (first,) = client.of(GOAWAY)
    assert first.payload[:8] == b"\x7f\xff\xff\xff\0\0\0\0"
    await client.send(frame(PING, ACK, 0, client.of(PING)[0].payload))
    await client.until(lambda c: len(c.of(GOAWAY)) == 2)
    assert client.of(GOAWAY)[1].payload[:8] == b"\0\0\0\x01\0\0\0\0"
    call.send(b"still flowing")
    server.server.flush()
    await client.until(lambda c: c.messages(stream) == [b"still flowing"])
    assert not draining.done()
    call.finish()
    assert await client.finished(stream) == {"grpc-status": "0"}
    await client.until(lambda c: c.closed)
    assert await draining == 0
    assert not server.probe.cancelled


async def test_a_client_that_does_not_answer_the_ping_gets_the_second_goaway_anyway(
    server: Running, connect: Connector
) -> None:
    client = await connect(server)
    draining = asyncio.ensure_future(server.server.drain(5))
    await client.until(lambda c: c.closed)
    assert len(client.of(GOAWAY)) == 2
    assert await draining == 0


async def test_calls_that_race_the_first_goaway_are_served_and_later_ones_ignored(
    server: Running, connect: Connector
) -> None:
    client = await connect(server)
    await client.call()
    (call,) = await server.calls(1)
    draining = asyncio.ensure_future(server.server.drain(5))
    await client.until(lambda c: bool(c.of(PING)))
    racing = await client.call(PACKAGE + "Echo", b"racing")
    assert await client.finished(racing) == {"grpc-status": "0"}
    endless = await client.call(PACKAGE + "Endless")
    assert (await client.finished(endless))["grpc-status"] == "14"
    await client.send(frame(PING, ACK, 0, client.of(PING)[0].payload))
    await client.until(lambda c: len(c.of(GOAWAY)) == 2)
    assert client.of(GOAWAY)[1].payload[:4] == endless.to_bytes(4, "big")
    late = await client.call(PACKAGE + "Echo")
    await client.quiet()
    assert not [f for f in client.frames if f.stream_id == late]
    call.finish()
    assert await draining == 0
    assert server.server.stats.refusals["draining"] == 1


async def test_endless_streams_end_unavailable_at_once(server: Running) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        stream = channel.unary_stream(PACKAGE + "Endless")(b"")
        assert await stream.read() == b"first"
        draining = asyncio.ensure_future(server.server.drain(30))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(draining, 5) == 0
    assert server.probe.task_ends == ["closed"]


async def test_what_is_left_after_the_grace_is_cut_and_counted(server: Running) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        streams = [channel.unary_stream(PACKAGE + "Raw")(b"") for _ in range(3)]
        await server.calls(3)
        await asyncio.gather(*(stream.initial_metadata() for stream in streams))
        assert await server.server.drain(0.2) == 3
        for stream in streams:
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE
            assert await stream.details() == "the server is shutting down"
    assert {reason for _, reason in server.probe.cancelled} == {CancelReason.SHUTDOWN}
    assert server.server.stats.connections == 0


async def test_the_listener_outlives_a_server_that_shares_it(server: Running) -> None:
    """An upgrade: the old server drains while the new one accepts on the same descriptor, and no call fails."""
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    old = await start_on(sock.dup())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        echo = channel.unary_unary(PACKAGE + "Echo")
        stream = channel.unary_stream(PACKAGE + "Raw")(b"")
        (call,) = await old.calls(1)
        await stream.initial_metadata()
        stop = asyncio.Event()

        async def load() -> int:
            done = 0
            while not stop.is_set():
                assert await echo(b"x", timeout=5) == b"x"
                done += 1
            return done

        loading = [asyncio.ensure_future(load()) for _ in range(8)]
        await asyncio.sleep(0.1)
        new = await start_on(sock)
        draining = asyncio.ensure_future(old.server.drain(10))
        await asyncio.sleep(0.5)
        call.send(b"from the old one")
        old.server.flush()
        assert await stream.read() == b"from the old one"
        call.finish()
        assert await stream.read() is grpc.aio.EOF
        assert await draining == 0
        before = new.server.stats.calls_total
        await asyncio.sleep(0.2)
        stop.set()
        assert min(await asyncio.gather(*loading)) > 0
        assert new.server.stats.calls_total > before
        await new.server.close()


async def test_close_ends_everything_at_once(server: Running) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        stream = channel.unary_stream(PACKAGE + "Raw")(b"")
        unary = channel.unary_unary(PACKAGE + "Sleep")(b"")
        await server.calls(1)
        await until(lambda: server.server.stats.calls_open == 2)
        await server.server.close()
        assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        assert await unary.code() is grpc.StatusCode.UNAVAILABLE
    assert server.server.stats.calls_open == 0
    assert not server.server._tasks
