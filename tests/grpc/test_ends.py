"""How calls end before their handler finishes them: resets, lost connections, deadlines."""

from __future__ import annotations

import asyncio
import socket
import struct

import grpc
import pytest

from bridge.grpc.call import Call
from bridge.grpc.status import CancelReason, Code
from tests.grpc.conftest import Connector
from tests.grpc.raw import DATA, END_HEADERS, HEADERS, RST_STREAM, frame, message, reset
from tests.grpc.serving import PACKAGE, Running, until


def use_after_the_end(call: Call) -> None:
    """Everything a handler may still do when it has not noticed the end."""
    call.send(b"late")
    call.send_compressed(b"late" * 1000)
    call.send_initial_metadata()
    call.finish()
    call.finish(Code.INTERNAL, "late")


async def test_a_cancelled_client_cancels_its_call_once(server: Running) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        stream = channel.unary_stream(PACKAGE + "Raw")(b"")
        (call,) = await server.calls(1)
        stream.cancel()
        await until(lambda: bool(server.probe.cancelled))
        assert server.probe.cancelled == [(call, CancelReason.CLIENT)]
        use_after_the_end(call)
        server.server.flush()
        assert await channel.unary_unary(PACKAGE + "Echo")(b"still") == b"still"
    assert server.probe.cancelled == [(call, CancelReason.CLIENT)]
    assert server.server.stats.calls_open == 0


async def test_a_lost_connection_cancels_every_call_once(server: Running, connect: Connector) -> None:
    client = await connect(server)
    for _ in range(50):
        await client.call()
    calls = await server.calls(50)
    sock = client._writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await client.close()
    await until(lambda: len(server.probe.cancelled) == 50)
    assert {reason for _, reason in server.probe.cancelled} == {CancelReason.CONNECTION}
    for call in calls:
        use_after_the_end(call)
    server.server.flush()
    assert len(server.probe.cancelled) == 50
    assert server.server.stats.calls_open == server.server.stats.connections == 0


async def test_reset_after_half_close(server: Running, connect: Connector) -> None:
    client = await connect(server)
    stream = await client.call()
    await server.calls(1)
    await client.send(reset(stream))
    await until(lambda: bool(server.probe.cancelled))
    assert server.server.stats.calls_open == 0


async def test_request_and_reset_in_one_read_never_run_a_handler(server: Running, connect: Connector) -> None:
    """A rapid reset costs the engine nothing."""
    client = await connect(server)
    pairs = [client.request(path) for path in (PACKAGE + "Raw", PACKAGE + "Sleep") for _ in range(3)]
    await client.send(b"".join(request + reset(stream) for stream, request in pairs))
    await until(lambda: server.server.stats.cancelled["CLIENT"] == 6)
    assert not server.probe.open
    assert not server.server._tasks
    assert server.server.stats.calls_open == 0
    assert await client.finished(await client.call(PACKAGE + "Echo")) == {"grpc-status": "0"}


async def test_reset_before_the_request_is_complete_never_runs_a_handler(server: Running, connect: Connector) -> None:
    client = await connect(server)
    stream = client.stream()
    await client.send(frame(HEADERS, END_HEADERS, stream, client.headers()) + frame(DATA, 0, stream, b"\0\0"))
    await until(lambda: server.server.stats.calls_open == 1)
    await client.send(reset(stream))
    await until(lambda: server.server.stats.calls_open == 0)
    assert not server.probe.requests
    assert server.server.stats.buffered_bytes == 0


async def test_reset_after_finish_is_nobody_s_business(server: Running, connect: Connector) -> None:
    client = await connect(server)
    stream = await client.call()
    (call,) = await server.calls(1)
    call.finish()
    await client.send(reset(stream))
    await client.quiet()
    assert not server.probe.cancelled


async def test_a_cancelled_unary_handler_is_cancelled(server: Running) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        call = channel.unary_unary(PACKAGE + "Sleep")(b"")
        await until(lambda: server.server.stats.calls_open == 1)
        await asyncio.sleep(0.05)
        call.cancel()
        await until(lambda: server.probe.task_ends == ["cancelled"])
    assert not server.server._tasks


@pytest.mark.parametrize("method", ["Endless", "Chat"])
async def test_a_cancelled_generator_is_closed(server: Running, method: str) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        if method == "Chat":
            chat = channel.stream_stream(PACKAGE + method)()
            await chat.write(b"a")
            assert await chat.read() == b"A"
            chat.cancel()
        else:
            stream = channel.unary_stream(PACKAGE + method)(b"")
            assert await stream.read() == b"first"
            stream.cancel()
        await until(lambda: server.probe.task_ends == ["closed"])
        await until(lambda: not server.server._tasks)


async def test_a_blocked_generator_is_closed(server: Running, connect: Connector) -> None:
    client = await connect(server)
    stream = await client.call(PACKAGE + "Count", b"100000 1000")
    await client.until(lambda c: len(c.body(stream)) == 65535)
    assert not server.probe.task_ends
    await client.send(reset(stream))
    await until(lambda: server.probe.task_ends == ["closed"])


async def test_a_deadline_ends_a_raw_stream(server: Running) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(PACKAGE + "Raw")(b"", timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: bool(server.probe.cancelled))


@pytest.mark.parametrize("timeout", ["100m", "100000u", "99999999n", "1S"])
async def test_the_server_keeps_the_deadline_by_itself(server: Running, connect: Connector, timeout: str) -> None:
    client = await connect(server)
    stream = await client.call(grpc_timeout=timeout)
    (call,) = await server.calls(1)
    assert call.deadline is not None
    started = server.server.loop.time()
    trailers = await client.finished(stream)
    assert trailers["grpc-status"] == "4"
    assert server.server.loop.time() - started < 1.2
    assert server.probe.cancelled == [(call, CancelReason.DEADLINE)]
    use_after_the_end(call)
    server.server.flush()
    await client.quiet()
    assert not client.of(RST_STREAM)
    assert len(server.server.deadlines) == 0


async def test_a_deadline_covers_the_request_itself(server: Running, connect: Connector) -> None:
    client = await connect(server)
    stream = client.stream()
    await client.send(frame(HEADERS, END_HEADERS, stream, client.headers(grpc_timeout="50m")))
    assert (await client.finished(stream))["grpc-status"] == "4"
    await client.until(lambda c: bool(c.of(RST_STREAM, stream)))
    assert not server.probe.requests


async def test_hours_and_minutes_are_far_away(server: Running, connect: Connector) -> None:
    client = await connect(server)
    for timeout in ("1H", "30M", "1800S", "99999999H"):
        await client.call(grpc_timeout=timeout)
    calls = await server.calls(4)
    now = server.server.loop.time()
    assert [round((call.deadline or 0) - now, -1) for call in calls] == [3600, 1800, 1800, 99999999 * 3600]
    for call in calls:
        call.finish()


@pytest.mark.parametrize("timeout", ["", "5", "S", "123456789S", "-1S", "1.5S", "5s", "1 S"])
async def test_a_malformed_timeout_is_an_error(server: Running, connect: Connector, timeout: str) -> None:
    client = await connect(server)
    trailers = await client.finished(await client.call(grpc_timeout=timeout))
    assert trailers["grpc-status"] == "13"
    assert "grpc-timeout" in trailers["grpc-message"]
    assert server.server.stats.calls_open == 0


async def test_deadlines_of_finished_calls_are_forgotten(server: Running, connect: Connector) -> None:
    client = await connect(server)
    for _ in range(5):
        requests = [client.request(PACKAGE + "Echo", grpc_timeout="1800S") for _ in range(1000)]
        await client.send(b"".join(request for _, request in requests))
        await client.finished(requests[-1][0])
        await client.until(lambda c: all(c.ended(stream) for stream, _ in requests))  # noqa: B023
    assert len(server.server.deadlines) < 2500


async def test_one_call_s_failing_callback_does_not_touch_another(
    server: Running, connect: Connector, caplog: pytest.LogCaptureFixture
) -> None:
    client = await connect(server)
    streams = [await client.call() for _ in range(2)]
    bad, good = await server.calls(2)

    def fail(reason: CancelReason) -> None:
        raise RuntimeError("callback")

    bad.on_cancel = fail
    await client.send(reset(streams[0]))
    await until(lambda: bad.ended)
    good.send(b"fine")
    good.finish()
    await client.finished(streams[1])
    assert client.messages(streams[1]) == [b"fine"]
    assert "on_cancel failed" in caplog.text


async def test_a_connection_cut_at_every_byte_of_a_request_leaves_nothing(server: Running, connect: Connector) -> None:
    whole = await connect(server)
    _, request = whole.request(data=b"some bytes")
    everything = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0) + request
    for size in range(len(everything)):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(everything[:size])
        await writer.drain()
        writer.close()
    await whole.close()
    stats = server.server.stats
    await until(lambda: stats.connections == 0 and stats.calls_open == 0)
    assert stats.buffered_bytes == 0
    assert len(server.probe.cancelled) == len(server.probe.open)


async def test_messages_of_several_frames_and_split_prefixes(server: Running, connect: Connector) -> None:
    client = await connect(server)
    stream = client.stream()
    body = message(b"a longer request")
    await client.send(frame(HEADERS, END_HEADERS, stream, client.headers(PACKAGE + "Echo")))
    for index, byte in enumerate(body):
        await client.send(frame(DATA, int(index == len(body) - 1), stream, bytes([byte])))
    await client.finished(stream)
    assert client.messages(stream) == [b"a longer request"]
    assert server.server.stats.buffered_bytes == 0
