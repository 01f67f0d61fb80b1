"""Compressed messages, both ways, and messages that are too large."""

from __future__ import annotations

import gzip
import random
import time
import zlib

import grpc
import pytest

from bridge.grpc.limits import Limits
from tests.grpc.conftest import Connector, Starter
from tests.grpc.raw import DATA, END_HEADERS, END_STREAM, HEADERS, frame, message
from tests.grpc.serving import PACKAGE, Running, until

TEXT = b"the same words again and again " * 3000


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("size", [10, 100_000, 4_000_000])
async def test_compressed_requests(server: Running, compression: grpc.Compression, size: int) -> None:
    request = (TEXT * (size // len(TEXT) + 1))[:size]
    async with grpc.aio.insecure_channel(server.target, compression=compression) as channel:
        assert await channel.unary_unary(PACKAGE + "Echo")(request) == request
        assert await channel.stream_unary(PACKAGE + "Echo")(iter([request])) == request


async def test_compressed_bidi_requests(server: Running) -> None:
    async with grpc.aio.insecure_channel(server.target, compression=grpc.Compression.Gzip) as channel:
        stream = channel.stream_stream(PACKAGE + "Chat")()
        for _ in range(3):
            await stream.write(TEXT)
            assert await stream.read() == TEXT.upper()


async def test_replies_are_compressed_for_clients_that_accept_it(server: Running, connect: Connector) -> None:
    client = await connect(server)
    stream = await client.call(PACKAGE + "Packed", TEXT, grpc_accept_encoding="identity, gzip")
    await client.finished(stream)
    assert dict(client.of(HEADERS, stream)[0].headers)["grpc-encoding"] == "gzip"
    body = client.body(stream)
    assert body[0] == 1
    assert len(body) < 2000
    assert gzip.decompress(body[5:]) == TEXT
    for path, request in ((PACKAGE + "Packed", TEXT[:500]), (PACKAGE + "Echo", TEXT[:2000])):
        stream = await client.call(path, request, grpc_accept_encoding="identity, gzip")
        await client.finished(stream)
        assert client.messages(stream) == [request]
        assert client.body(stream)[0] == 0
    stream = await client.call(PACKAGE + "Packed", TEXT[:2000])
    await client.finished(stream)
    assert client.messages(stream) == [TEXT[:2000]]


async def test_grpcio_reads_compressed_replies(server: Running) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        assert await channel.unary_unary(PACKAGE + "Packed")(TEXT) == TEXT
        replies = [r async for r in channel.unary_stream(PACKAGE + "PackedCount")(b"20 5000")]
        assert [len(reply) for reply in replies] == [5000 + len(b"%d " % i) for i in range(20)]


async def test_an_unknown_encoding_is_unimplemented_and_names_the_known(server: Running, connect: Connector) -> None:
    client = await connect(server)
    trailers = await client.finished(await client.call(PACKAGE + "Echo", b"x", grpc_encoding="snappy"))
    assert trailers["grpc-status"] == "12"
    assert "snappy" in trailers["grpc-message"]
    assert trailers["grpc-accept-encoding"] == "identity,deflate,gzip"


async def call_packed(server: Running, connect: Connector, packed: bytes) -> tuple[dict[str, str], list[bytes]]:
    client = await connect(server)
    stream = client.stream()
    await client.send(frame(HEADERS, END_HEADERS, stream, client.headers(PACKAGE + "Raw", grpc_encoding="gzip")))
    body = message(packed, flag=1)
    for at in range(0, len(body), 16384):
        await client.send(frame(DATA, END_STREAM if at + 16384 >= len(body) else 0, stream, body[at : at + 16384]))
    return await client.finished(stream), client.messages(stream)


@pytest.mark.parametrize("size", [101, 300_000, 50_000_000])
async def test_a_compression_bomb_is_refused_at_the_limit(serve: Starter, connect: Connector, size: int) -> None:
    limit = 100 if size < 1000 else 200_000 if size < 1_000_000 else 1_000_000
    server = await serve(Limits(max_message_bytes=limit))
    trailers, _ = await call_packed(server, connect, gzip.compress(bytes(size)))
    assert trailers["grpc-status"] == "8"
    assert str(limit) in trailers["grpc-message"]
    assert not server.probe.requests
    assert server.server.stats.refusals["resource_exhausted"] == 1


@pytest.mark.parametrize(
    "packed", [b"", b"not gzip", gzip.compress(b"abc")[:-3], gzip.compress(b"abc") + b"more", zlib.compress(b"abc")]
)
async def test_corrupt_compressed_data_is_internal(server: Running, connect: Connector, packed: bytes) -> None:
    trailers, _ = await call_packed(server, connect, packed)
    assert trailers["grpc-status"] == "13"
    assert "decompress" in trailers["grpc-message"]


async def test_a_large_inflation_does_not_hold_the_loop(server: Running, connect: Connector) -> None:
    packed = gzip.compress(bytes(60_000_000))
    client = await connect(server)
    stream = client.stream()
    body = message(packed, flag=1)
    out = frame(HEADERS, END_HEADERS, stream, client.headers(PACKAGE + "Raw", grpc_encoding="gzip"))
    for at in range(0, len(body), 16384):
        out += frame(DATA, END_STREAM if at + 16384 >= len(body) else 0, stream, body[at : at + 16384])
    await client.send(out)
    other = await connect(server)
    waits = []
    while not server.probe.requests:
        started = time.perf_counter()
        await other.finished(await other.call(PACKAGE + "Echo"))
        waits.append(time.perf_counter() - started)
    assert len(server.probe.requests[0]) == 60_000_000
    assert len(waits) > 2


async def test_a_message_above_the_limit_is_refused_before_it_has_arrived(serve: Starter, connect: Connector) -> None:
    server = await serve(Limits(max_message_bytes=1000))
    client = await connect(server)
    stream = client.stream()
    await client.send(frame(HEADERS, END_HEADERS, stream, client.headers()))
    await client.send(frame(DATA, 0, stream, message(bytes(5000))[:100]))
    trailers = await client.finished(stream)
    assert trailers["grpc-status"] == "8"
    assert trailers["grpc-message"] == "request message is larger than 1000 bytes"
    assert (await client.finished(await client.call(PACKAGE + "Echo", bytes(1000))))["grpc-status"] == "0"
    assert (await client.finished(await client.call(PACKAGE + "Echo", bytes(1001))))["grpc-status"] == "8"
    assert server.server.stats.buffered_bytes == 0


async def test_grpcio_sees_resource_exhausted(serve: Starter) -> None:
    server = await serve(Limits(max_message_bytes=1 << 20))
    async with grpc.aio.insecure_channel(server.target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(PACKAGE + "Echo")(bytes(8 << 20))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await channel.unary_unary(PACKAGE + "Echo")(b"ok") == b"ok"


async def test_large_requests_that_wait_to_be_inflated_are_bounded(serve: Starter) -> None:
    """They are complete, but not handed over: they still count as request bytes in flight."""
    server = await serve(Limits(max_buffered_bytes=2_500_000))
    stats, text = server.server.stats, random.Random(1).randbytes(450_000).hex().encode()  # half a megabyte of gzip
    async with grpc.aio.insecure_channel(server.target, compression=grpc.Compression.Gzip) as channel:
        async with server.server.inflating, server.server.inflating:
            calls = []
            for count in range(1, 7):
                calls.append(channel.unary_unary(PACKAGE + "Echo")(text, timeout=20))
                await until(lambda: stats.calls_total == count)  # noqa: B023
                await until(lambda: stats.buffered_bytes // 500_000 + stats.refusals["buffered_bytes"] == count)  # noqa: B023
            assert stats.refusals["buffered_bytes"] == 2
            calls[0].cancel()
            await until(lambda: stats.buffered_bytes < 2_000_000)
        codes = [await call.code() for call in calls]
    assert [code.name for code in codes] == ["CANCELLED", "OK", "OK", "OK", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]
    assert (stats.buffered_bytes, stats.calls_open) == (0, 0)
