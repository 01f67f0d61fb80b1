"""Every limit refuses with a reason, is counted, and leaves everybody else alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bridge.grpc.connection import Connection
from bridge.grpc.limits import Limits, Rate
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
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    RawClient,
    frame,
    message,
    reset,
    settings,
    window_update,
)
from tests.grpc.serving import PACKAGE, Running, until


async def still_serves(server: Running, connect: Connector) -> None:
    client = await connect(server)
    assert await client.finished(await client.call(PACKAGE + "Echo", b"x")) == {"grpc-status": "0"}


async def goaway(client: RawClient) -> str:
    """Read to the end of the connection; what its GOAWAY said."""
    await client.until(lambda c: c.closed)
    last = client.of(GOAWAY)[-1].payload
    assert int.from_bytes(last[4:8], "big") == 0xB
    return last[8:].decode()


async def test_calls_in_flight(serve: Starter, connect: Connector) -> None:
    server = await serve(Limits(max_calls=3))
    client = await connect(server)
    for _ in range(3):
        await client.call()
    calls = await server.calls(3)
    trailers = await client.finished(await client.call(PACKAGE + "Echo"))
    assert trailers["grpc-status"] == "8"
    assert "3 calls in flight" in trailers["grpc-message"]
    assert server.server.stats.refusals["calls"] == 1
    calls[0].finish()
    assert (await client.finished(await client.call(PACKAGE + "Echo")))["grpc-status"] == "0"


async def test_streams_of_a_connection(serve: Starter, connect: Connector) -> None:
    """Streams above the limit are refused before the client has acknowledged it; then they end the connection."""
    server = await serve(Limits(max_streams_per_connection=5))
    client = await connect(server)
    requests = [client.request() for _ in range(7)]
    client._polite = False
    await client.send(b"".join(request for _, request in requests))
    await client.until(lambda c: len(c.of(RST_STREAM)) == 2)
    assert [f.payload for f in client.of(RST_STREAM)] == [b"\0\0\0\7"] * 2
    assert len(server.probe.open) == 5
    await client.send(frame(SETTINGS, ACK, 0))
    await client.call()
    await client.until(lambda c: c.closed)
    assert len(server.probe.cancelled) == 5
    await still_serves(server, connect)


async def test_connections(serve: Starter, connect: Connector) -> None:
    server = await serve(Limits(max_connections=3))
    first = [await connect(server) for _ in range(3)]
    for client in first:
        assert (await client.finished(await client.call(PACKAGE + "Echo")))["grpc-status"] == "0"
    extra = await connect(server)
    assert await goaway(extra) == "connections"
    for client in first:
        assert (await client.finished(await client.call(PACKAGE + "Echo")))["grpc-status"] == "0"
    assert server.server.stats.refusals["connections"] == 1


async def test_an_idle_connection_gives_way_to_a_new_one(serve: Starter, connect: Connector) -> None:
    server = await serve(Limits(max_connections=2))
    idle, busy = await connect(server), await connect(server)
    await busy.call()
    await server.calls(1)
    for connection in server.server._connections:
        connection._last_call_at -= 60
    await still_serves(server, connect)
    assert await goaway(idle) == "gave_way"
    assert not server.probe.cancelled


async def test_metadata_size(serve: Starter, connect: Connector) -> None:
    server = await serve(Limits(max_header_list_bytes=4096))
    client = await connect(server)
    ok = await client.call(PACKAGE + "Echo", custom="x" * 3000)
    assert (await client.finished(ok))["grpc-status"] == "0"
    trailers = await client.finished(await client.call(PACKAGE + "Echo", custom="x" * 5000))
    assert trailers["grpc-status"] == "8"
    assert "4096 bytes" in trailers["grpc-message"]
    assert server.server.stats.refusals["metadata"] == 1


async def test_a_header_bomb_ends_its_connection(serve: Starter, connect: Connector) -> None:
    server = await serve()
    client = await connect(server)
    # One 4000-byte value in the table, then one byte for each copy of it.
    await client.send(frame(HEADERS, END_HEADERS | END_STREAM, client.stream(), client.headers(custom="x" * 3900)))
    indexed = client.headers(custom="x" * 3900)[-1:]
    await client.send(frame(HEADERS, END_HEADERS | END_STREAM, client.stream(), client.headers() + indexed * 1000))
    await client.until(lambda c: c.closed)
    assert server.server.stats.refusals["http2_limit"] == 1
    await still_serves(server, connect)


async def test_a_continuation_flood_ends_its_connection(server: Running, connect: Connector) -> None:
    client = await connect(server)
    stream = client.stream()
    flood = frame(HEADERS, 0, stream, client.headers()) + frame(CONTINUATION, 0, stream, b"") * 1000
    await client.send(flood)
    await client.until(lambda c: c.closed)
    assert server.server.stats.refusals["http2_limit"] == 1
    await still_serves(server, connect)


FLOODS: dict[str, Callable[[RawClient], bytes]] = {
    "ping_flood": lambda client: frame(PING, 0, 0, bytes(8)) * 20,
    "settings_flood": lambda client: settings(window=1000) * 20,
    "tiny_data_flood": lambda client: frame(DATA, 0, 1, b"") * 20,
    "window_update_flood": lambda client: window_update(0, 1) * 20,
    "reset_flood": lambda client: b"".join(request + reset(s) for s, request in [client.request() for _ in range(20)]),
}


async def test_frames_that_http2_ignores_are_a_flood_too(server: Running, connect: Connector) -> None:
    floods = (("", frame(PRIORITY, 0, 1, b"\0\0\0\3\10")), ("ignored_frames", frame(77, 0, 0, b"x" * 100)))
    for said, junk in floods:
        client = await connect(server)
        await client.quiet()
        await client.send(junk * (300_000 // len(junk)))
        assert await goaway(client) == said
    assert server.server.stats.refusals == {"http2_limit": 1, "ignored_frames": 1}
    await still_serves(server, connect)


@pytest.mark.parametrize("reason", FLOODS)
async def test_a_flood_ends_its_connection_only(serve: Starter, connect: Connector, reason: str) -> None:
    rate = Rate(10, 1)
    server = await serve(Limits(pings=rate, settings=rate, tiny_data=rate, window_updates=rate, resets=rate))
    good = await connect(server)
    await good.call()
    (call,) = await server.calls(1)
    client = await connect(server)
    stream = client.stream()
    await client.send(frame(HEADERS, END_HEADERS, stream, client.headers()))
    await client.send(FLOODS[reason](client))
    assert await goaway(client) == reason
    assert server.server.stats.refusals[reason] == 1
    call.send(b"fine")
    call.finish()
    await good.until(lambda c: c.messages(1) == [b"fine"])
    await until(lambda: server.server.stats.calls_open == 0)


async def test_the_default_limits_allow_a_gateway_that_drops_all_its_streams(
    server: Running, connect: Connector
) -> None:
    client = await connect(server)
    streams = [await client.call() for _ in range(3000)]
    await server.calls(3000)
    await client.send(b"".join(reset(stream) for stream in streams))
    await until(lambda: server.server.stats.calls_open == 0)
    assert len(server.probe.cancelled) == 3000
    assert await client.finished(await client.call(PACKAGE + "Echo")) == {"grpc-status": "0"}


async def test_a_client_may_update_windows_for_every_frame(serve: Starter, connect: Connector) -> None:
    server = await serve(Limits(window_updates=Rate(100, 1)))
    client = await connect(server)
    stream = await client.call()
    (call,) = await server.calls(1)
    for index in range(500):
        call.send(b"")
        server.server.flush()
        await client.until(lambda c: len(c.of(DATA)) == index + 1)  # noqa: B023
        await client.send(window_update(0, 5) + window_update(stream, 5))
    call.finish()
    assert await client.finished(stream) == {"grpc-status": "0"}


async def test_request_bytes_in_flight(serve: Starter, connect: Connector) -> None:
    server = await serve(Limits(max_buffered_bytes_per_connection=100_000))
    client = await connect(server)
    streams = []
    for _ in range(8):
        stream = client.stream()
        streams.append(stream)
        await client.send(frame(HEADERS, END_HEADERS, stream, client.headers()))
        await client.send(frame(DATA, 0, stream, message(bytes(20_000))[:15_000]))
    await client.until(lambda c: any(c.ended(stream) for stream in streams))
    refused = [stream for stream in streams if client.ended(stream)]
    assert client.trailers(refused[0])["grpc-status"] == "8"
    assert server.server.stats.buffered_bytes <= 100_000
    assert server.server.stats.refusals["buffered_bytes"] >= 1
    await client.close()
    await until(lambda: server.server.stats.buffered_bytes == 0)


async def test_messages_that_wait_for_a_bidi_handler(serve: Starter, connect: Connector) -> None:
    server = await serve(Limits(max_pending_messages=10))
    client = await connect(server, settings(window=20))
    stream = client.stream()
    await client.send(frame(HEADERS, END_HEADERS, stream, client.headers(PACKAGE + "Chat")))
    await client.until(lambda c: bool(c.of(HEADERS, stream)))
    await client.send(frame(DATA, 0, stream, message(b"word") * 40))
    await client.send(window_update(stream, 10_000))
    assert (await client.finished(stream))["grpc-status"] == "8"
    await until(lambda: server.probe.task_ends == ["closed"])
    assert server.server.stats.buffered_bytes == 0
    assert not server.server._tasks


# Limits on time, with the clock of the check in the test's hand.


async def only(server: Running, client: RawClient) -> Connection:
    await client.until(lambda c: bool(c.of(SETTINGS)))
    (connection,) = server.server._connections
    return connection


async def test_a_connection_without_a_preface_is_ended(server: Running) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await until(lambda: bool(server.server._connections))
    (connection,) = server.server._connections
    connection.check(server.server.loop.time() + 9)
    assert server.server.stats.connections == 1
    connection.check(server.server.loop.time() + 11)
    assert (await asyncio.wait_for(reader.read(), 5))[-15:] == b"preface_timeout"
    writer.close()


async def test_half_a_frame_is_not_waited_for_for_ever(server: Running, connect: Connector) -> None:
    client = await connect(server)
    connection = await only(server, client)
    await client.quiet()
    await client.send(frame(HEADERS, END_HEADERS, 1, client.headers())[:20])
    await until(lambda: connection.partial_since is not None)
    now = server.server.loop.time()
    connection.check(now + 29)
    assert not connection.closing
    connection.check(now + 31)
    assert await goaway(client) == "slow_frame"


async def test_half_a_request_is_not_waited_for_for_ever(server: Running, connect: Connector) -> None:
    client = await connect(server)
    connection = await only(server, client)
    stream = client.stream()
    await client.send(frame(HEADERS, END_HEADERS, stream, client.headers()) + frame(DATA, 0, stream, b"\0"))
    await until(lambda: server.server.stats.buffered_bytes == 1)
    connection.heard_at = now = server.server.loop.time() + 121
    connection.check(now)
    trailers = await client.finished(stream)
    assert trailers["grpc-status"] == "4"
    assert server.server.stats.refusals["slow_request"] == 1
    assert server.server.stats.buffered_bytes == 0


async def test_a_quiet_client_is_pinged_and_a_dead_one_dropped(server: Running, connect: Connector) -> None:
    client = await connect(server)
    connection = await only(server, client)
    await client.call()
    await server.calls(1)
    now = server.server.loop.time()
    connection.check(now + 59)
    await client.quiet()
    assert not client.of(PING)
    connection.check(now + 61)
    await client.until(lambda c: bool(c.of(PING)))
    connection.check(now + 80)
    assert server.server.stats.connections == 1
    connection.check(now + 82)
    await client.until(lambda c: c.closed)
    await until(lambda: len(server.probe.cancelled) == 1)
    assert server.server.stats.refusals["keepalive_timeout"] == 1


async def test_a_client_that_answers_the_ping_stays(server: Running, connect: Connector) -> None:
    client = await connect(server)
    connection = await only(server, client)
    await client.quiet()
    connection.heard_at = before = server.server.loop.time() - 61
    connection.check(before + 61)
    await client.until(lambda c: bool(c.of(PING)))
    await client.send(frame(PING, ACK, 0, client.of(PING)[0].payload))
    await until(lambda: connection.heard_at > before)
    connection.check(connection.heard_at + 25)
    assert server.server.stats.connections == 1


async def test_a_reader_that_makes_no_progress_is_dropped(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=2**31 - 1))
    await client.send(window_update(0, 2**31 - 65536))
    client.pause()
    await client.call(PACKAGE + "Count", b"1000000 10000")
    await until(lambda: any(c.paused for c in server.server._connections))
    (connection,) = server.server._connections
    await asyncio.sleep(0.1)
    now = server.server.loop.time()
    connection.check(now)
    connection.heard_at = now + 59
    connection.check(now + 59)
    assert not connection.closing
    connection.check(now + 61)
    await until(lambda: server.server.stats.connections == 0)
    assert server.server.stats.refusals["slow_reader"] == 1


async def test_a_finished_call_whose_end_is_not_taken_is_reset(server: Running, connect: Connector) -> None:
    client = await connect(server, settings(window=3))
    stream = await client.call(PACKAGE + "Echo", b"abc")
    await client.quiet()
    connection = await only(server, client)
    now = server.server.loop.time()
    for later in (0, 30, 59):
        connection.heard_at = now + later
        connection.check(now + later)
    await client.quiet()
    assert not client.ended(stream)
    connection.heard_at = now + 61
    connection.check(now + 61)
    await client.until(lambda c: bool(c.of(RST_STREAM, stream)))
    assert not connection.calls


async def test_idle_connections_end_gracefully_only_when_told_to(serve: Starter, connect: Connector) -> None:
    patient, strict = await serve(), await serve(Limits(idle_connection_s=100))
    for server in (patient, strict):
        client = await connect(server)
        connection = await only(server, client)
        connection.heard_at = now = server.server.loop.time() + 101
        connection.check(now)
        await client.quiet()
        assert len(client.of(GOAWAY)) == (1 if server is strict else 0)


async def test_the_checks_run_by_themselves(serve: Starter) -> None:
    server = await serve(Limits(preface_s=0.1))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert server.server.stats.refusals["preface_timeout"] == 1


async def test_bytes_that_are_not_http2_do_not_disturb_others(server: Running, connect: Connector) -> None:
    good = await connect(server)
    await good.call()
    (call,) = await server.calls(1)
    for junk in (bytes(range(256)) * 100, PREFACE[:-3] + b"XXX", PREFACE + bytes(1000), PREFACE + b"\xff" * 1000):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(junk)
        await asyncio.wait_for(reader.read(), 5)
        writer.close()
    call.send(b"fine")
    call.finish()
    await good.until(lambda c: c.messages(1) == [b"fine"])
    assert server.server.stats.connections == 1


async def test_metadata_counts_as_request_bytes_in_flight(serve: Starter, connect: Connector) -> None:
    """HPACK sends a field that is in its table as one byte; here it takes its length, for as long as its call lives."""
    server = await serve(Limits(max_buffered_bytes_per_connection=100_000))
    for extra in ("custom", "user-agent"):
        client = await connect(server)
        fields = [(extra, "x" * 3000)]
        for _ in range(40):
            block = client.headers(PACKAGE + "Raw", fields)
            await client.send(frame(HEADERS, END_HEADERS, client.stream(), block))
        await client.until(lambda c: sum(c.ended(stream) for stream in range(1, 81, 2)) == 9)
        assert client.trailers(79)["grpc-status"] == "8"
        assert 90_000 < server.server.stats.buffered_bytes <= 100_000
        await client.send(b"".join(frame(DATA, END_STREAM, stream, message(b"x")) for stream in (1, 3)))
        for call in (await server.calls(2))[:2]:
            call.finish()
        await client.finished(3)
        assert server.server.stats.buffered_bytes <= 94_000
        server.probe.open.clear()
        await client.close()
        await until(lambda: server.server.stats.buffered_bytes == 0)


async def test_a_call_whose_request_is_not_complete_gives_way(serve: Starter, connect: Connector) -> None:
    """Opened calls cost a client nothing; those that it completes are not in their way."""
    server = await serve(Limits(max_calls=3))
    idle, good = await connect(server), await connect(server)
    streams = [idle.stream() for _ in range(3)]
    await idle.send(b"".join(frame(HEADERS, END_HEADERS, stream, idle.headers()) for stream in streams))
    await until(lambda: server.server.stats.calls_open == 3)
    running = await good.call()
    assert len(await server.calls(1)) == 1
    assert "gave way" in (await idle.finished(streams[0]))["grpc-message"]
    assert (await good.finished(await good.call(PACKAGE + "Echo", b"x")))["grpc-status"] == "0"
    assert "gave way" in (await idle.finished(streams[1]))["grpc-message"]
    assert not idle.ended(streams[2])
    assert not good.ended(running)
    assert server.server.stats.refusals["call_gave_way"] == 2
    await idle.send(frame(DATA, END_STREAM, streams[2], message(b"")))
    await server.calls(2)
    await good.call()
    await server.calls(3)
    assert (await good.finished(await good.call(PACKAGE + "Echo", b"x")))["grpc-status"] == "8"
    assert not server.server.waiting


async def test_client_streaming_and_endless_calls(serve: Starter, connect: Connector) -> None:
    """A client decides how long they last, so that they have few of the places."""
    server = await serve(Limits(max_lasting_calls=2))
    client = await connect(server)
    await client.call(PACKAGE + "Endless")
    chat = client.stream()
    await client.send(frame(HEADERS, END_HEADERS, chat, client.headers(PACKAGE + "Chat")))
    trailers = await client.finished(await client.call(PACKAGE + "Endless"))
    assert trailers["grpc-status"] == "8"
    assert "limit of 2 client-streaming" in trailers["grpc-message"]
    assert (await client.finished(await client.call(PACKAGE + "Echo", b"x")))["grpc-status"] == "0"
    await client.send(frame(DATA, END_STREAM, chat, b""))
    await client.finished(chat)
    await client.call(PACKAGE + "Endless")
    await until(lambda: server.server.stats.calls_lasting == 2)
    await client.close()
    await until(lambda: server.server.stats.calls_lasting == 0)


async def test_answers_that_nobody_takes(serve: Starter, connect: Connector) -> None:
    """Too many of them, and a client with a part in it opens no more calls; others do."""
    server = await serve(Limits(max_lingering_calls=100))
    stats = server.server.stats
    rude, good = await connect(server, settings(window=1)), await connect(server)
    for _ in range(100):
        await rude.call(PACKAGE + "Echo", b"x")
    await until(lambda: stats.calls_lingering == 100)
    assert stats.calls_open == 0
    trailers = await rude.finished(await rude.call(PACKAGE + "Echo", b"x"))
    assert (trailers["grpc-status"], trailers["grpc-message"]) == ("8", "100 answers wait for this client to take them")
    assert await good.finished(await good.call(PACKAGE + "Echo", b"x")) == {"grpc-status": "0"}
    await rude.send(window_update(1, 100) + reset(3))
    assert await rude.finished(1) == {"grpc-status": "0"}
    await until(lambda: stats.calls_lingering == 98)
    stream = await rude.call(PACKAGE + "Raw")
    await server.calls(1)
    await rude.send(reset(stream))
    await until(lambda: len(server.probe.cancelled) == 1)
    assert stats.calls_lingering == 98
    await rude.close()
    await until(lambda: stats.calls_lingering == 0)
