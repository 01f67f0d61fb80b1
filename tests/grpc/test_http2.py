"""The frames themselves: what an HTTP/2 client sees that gRPC libraries hide."""

from __future__ import annotations

import asyncio

import h2.config
import h2.connection
import h2.events
import pytest

from tests.grpc.conftest import Connector, Starter
from tests.grpc.raw import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    frame,
    message,
)
from tests.grpc.serving import PACKAGE, Running


async def test_an_immediate_error_is_one_header_block(server: Running, connect: Connector) -> None:
    client = await connect(server)
    for path in (PACKAGE + "RawRefuse", PACKAGE + "Fail", PACKAGE + "FailStream", "/no.Such/Method"):
        stream = await client.call(path, b"0")
        await client.finished(stream)
        (only,) = client.of(HEADERS, stream)
        assert only.flags & END_STREAM
        names = [name for name, _ in only.headers]
        assert names[:3] == [":status", "content-type", "grpc-status"]
        assert not client.of(DATA, stream)


async def test_response_headers_of_a_raw_stream_precede_its_first_message(server: Running, connect: Connector) -> None:
    client = await connect(server)
    stream = await client.call()
    await client.until(lambda c: bool(c.of(HEADERS, stream)))
    (first,) = client.of(HEADERS, stream)
    assert first.headers == [(":status", "200"), ("content-type", "application/grpc")]
    assert not first.flags & END_STREAM


async def test_a_reply_is_headers_message_trailers(server: Running, connect: Connector) -> None:
    client = await connect(server)
    stream = await client.call(PACKAGE + "Echo", b"abc")
    assert await client.finished(stream) == {"grpc-status": "0"}
    assert [f.kind for f in client.frames if f.stream_id == stream] == [HEADERS, DATA, HEADERS]
    assert client.body(stream) == message(b"abc")


async def test_a_step_is_one_write(server: Running, connect: Connector) -> None:
    client = await connect(server)
    streams = [await client.call() for _ in range(100)]
    calls = await server.calls(100)
    await client.quiet()
    writes = count_writes(server)
    for step in range(3):
        for call in calls:
            call.send(b"step %d" % step)
        server.server.flush()
    assert len(writes) == 3
    await client.until(lambda c: all(len(c.messages(stream)) == 3 for stream in streams))


async def test_many_requests_in_one_read_are_answered_in_few_writes(server: Running, connect: Connector) -> None:
    client = await connect(server)
    await client.quiet()
    writes = count_writes(server)
    requests = [client.request(PACKAGE + "Echo", b"x") for _ in range(20)]
    await client.send(b"".join(request for _, request in requests))
    await client.until(lambda c: all(c.ended(stream) for stream, _ in requests))
    assert len(writes) == 1


def count_writes(server: Running) -> list[int]:
    """The sizes of what the (only) connection's transport is given from now on."""
    (connection,) = server.server._connections
    transport, sizes = connection._transport, []
    assert transport is not None

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(transport, name)

        def write(self, data: bytes) -> None:
            sizes.append(len(data))
            transport.write(data)

    connection._transport = Counting()  # type: ignore[assignment]
    return sizes


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/grpc-web", "application/json", "application/grpcx"]
)
async def test_another_content_type_is_http_415(server: Running, connect: Connector, content_type: str) -> None:
    client = await connect(server)
    stream = await client.call(PACKAGE + "Echo", content_type=content_type)
    assert await client.finished(stream) == {":status": "415"}
    assert server.server.stats.refusals["content_type"] == 1


@pytest.mark.parametrize("content_type", ["application/grpc+proto", "application/grpc;charset=utf-8"])
async def test_variants_of_the_content_type_are_accepted(
    server: Running, connect: Connector, content_type: str
) -> None:
    client = await connect(server)
    stream = await client.call(PACKAGE + "Echo", content_type=content_type)
    assert await client.finished(stream) == {"grpc-status": "0"}


@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS"])
async def test_another_http_method_is_405(server: Running, connect: Connector, method: str) -> None:
    client = await connect(server)
    stream = await client.call(PACKAGE + "Echo", method=method)
    assert await client.finished(stream) == {":status": "405", "allow": "POST"}


async def test_a_client_without_te_trailers_is_served(server: Running, connect: Connector) -> None:
    client = await connect(server)
    block = client._encoder.encode(
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", PACKAGE + "Echo"),
            (":authority", "x"),
            ("content-type", "application/grpc"),
        ]
    )
    stream = client.stream()
    await client.send(frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, message(b"")))
    assert await client.finished(stream) == {"grpc-status": "0"}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "missing"),
        (b"\0\0\0", "truncated"),
        (message(b"abc")[:-1], "truncated"),
        (message(b"abc") + message(b"d"), "followed by another"),
        (message(b"abc", flag=1), "identity"),
        (message(b"abc", flag=7), "flag 7"),
    ],
)
async def test_a_malformed_request_is_internal(server: Running, connect: Connector, body: bytes, problem: str) -> None:
    client = await connect(server)
    stream = client.stream()
    block = client.headers(PACKAGE + "Echo")
    if body:
        await client.send(frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, body))
    else:
        await client.send(frame(HEADERS, END_HEADERS | END_STREAM, stream, block))
    trailers = await client.finished(stream)
    assert trailers["grpc-status"] == "13"
    assert problem in trailers["grpc-message"]


async def test_request_trailers_end_a_request(server: Running, connect: Connector) -> None:
    client = await connect(server)
    stream = client.stream()
    await client.send(frame(HEADERS, END_HEADERS, stream, client.headers(PACKAGE + "Echo")))
    await client.send(frame(DATA, 0, stream, message(b"abc")))
    await client.send(frame(HEADERS, END_HEADERS | END_STREAM, stream, client._encoder.encode([("x", "y")])))
    assert await client.finished(stream) == {"grpc-status": "0"}
    assert client.messages(stream) == [b"abc"]


async def test_a_client_still_sending_is_told_to_stop_after_the_answer(server: Running, connect: Connector) -> None:
    client = await connect(server)
    for path in ("/no.Such/Method", PACKAGE + "Chat"):
        stream = client.stream()
        await client.send(frame(HEADERS, END_HEADERS, stream, client.headers(path)))
        await client.send(frame(DATA, 0, stream, message(b"stop")))
        await client.until(lambda c: bool(c.of(RST_STREAM, stream)))  # noqa: B023
        assert client.of(RST_STREAM, stream)[0].payload == bytes(4)
        kinds = [f.kind for f in client.frames if f.stream_id == stream]
        assert kinds[-2:] == [HEADERS, RST_STREAM]
        assert "grpc-status" in client.trailers(stream)


async def test_pings_are_answered_on_an_idle_connection(server: Running, connect: Connector) -> None:
    client = await connect(server)
    for index in range(50):
        await client.send(frame(PING, 0, 0, b"%08d" % index))
        await asyncio.sleep(0.002)
    await client.until(lambda c: len(c.of(PING)) == 50)
    assert all(f.flags & ACK for f in client.of(PING))
    assert not client.of(GOAWAY)


async def test_the_settings_carry_the_limits(server: Running, connect: Connector) -> None:
    client = await connect(server)
    await client.until(lambda c: bool(c.of(SETTINGS)))
    payload = client.of(SETTINGS)[0].payload
    pairs = {
        int.from_bytes(payload[at : at + 2], "big"): int.from_bytes(payload[at + 2 : at + 6], "big")
        for at in range(0, len(payload), 6)
    }
    assert pairs[3] == 4096
    assert pairs[4] == 1 << 20
    assert pairs[6] == 16384


async def test_http1_on_the_port_is_ended_and_counted(server: Running) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
    await writer.drain()
    await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert server.server.stats.refusals["http2_error"] == 1


async def test_h2_finds_no_fault_with_the_frames(serve: Starter) -> None:
    """Python's h2 checks every frame of a mixed conversation against its own state machine."""
    running = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    oracle = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    oracle.initiate_connection()
    wanted = {}
    for index in range(60):
        stream = oracle.get_next_available_stream_id()
        method = ("Echo", "Count", "Fail", "FailStream", "Nope", "RawRefuse")[index % 6]
        fields = [(":method", "POST"), (":scheme", "http"), (":path", PACKAGE + method), (":authority", "x")]
        oracle.send_headers(stream, [*fields, ("te", "trailers"), ("content-type", "application/grpc")])
        body = message({"Count": b"40 900", "FailStream": b"3"}.get(method, b"%d" % index))
        oracle.send_data(stream, body, end_stream=True)
        wanted[stream] = method
    writer.write(oracle.data_to_send())
    statuses: dict[int, str] = {}
    sizes: dict[int, int] = {}
    ended = 0
    while ended < 60:
        for event in oracle.receive_data(await asyncio.wait_for(reader.read(65536), 5)):
            if isinstance(event, h2.events.DataReceived):
                sizes[event.stream_id] = sizes.get(event.stream_id, 0) + len(event.data)
                oracle.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
                status = dict(event.headers).get("grpc-status")
                if status is not None:
                    statuses[event.stream_id] = status
            elif isinstance(event, h2.events.StreamEnded):
                ended += 1
            assert not isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated)
        writer.write(oracle.data_to_send())
    expected = {"Echo": "0", "Count": "0", "Fail": "9", "FailStream": "15", "Nope": "12", "RawRefuse": "3"}
    assert statuses == {stream: expected[method] for stream, method in wanted.items()}
    count = next(stream for stream, method in wanted.items() if method == "Count")
    assert sizes[count] == sum(5 + len(b"%d " % index) + 900 for index in range(40))
    writer.close()
