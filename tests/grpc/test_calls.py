"""Calls as grpcio's clients see them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2

from bridge.grpc.call import Call
from bridge.grpc.server import Server
from bridge.grpc.service import Method
from bridge.grpc.status import Code, GrpcError
from tests.grpc.conftest import Starter
from tests.grpc.serving import PACKAGE, Running, start_on


@pytest.fixture
async def channel(server: Running) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.target) as channel:
        yield channel


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 70_000, 3_000_000])
async def test_unary_messages_of_any_size_come_back(channel: grpc.aio.Channel, size: int) -> None:
    request = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert await channel.unary_unary(PACKAGE + "Echo")(request) == request


async def test_many_unary_calls_at_once(server: Running, channel: grpc.aio.Channel) -> None:
    echo = channel.unary_unary(PACKAGE + "Echo")
    requests = [b"%d" % index for index in range(500)]
    assert await asyncio.gather(*(echo(request) for request in requests)) == requests
    assert server.server.stats.calls_open == 0


async def test_a_stream_delivers_everything_in_order(channel: grpc.aio.Channel) -> None:
    count = channel.unary_stream(PACKAGE + "Count")
    got = [int(reply.split()[0]) async for reply in count(b"3000 500")]
    assert got == list(range(3000))


async def test_a_raw_stream_is_driven_from_outside(server: Running, channel: grpc.aio.Channel) -> None:
    stream = channel.unary_stream(PACKAGE + "Raw")(b"go")
    (call,) = await server.calls(1)
    assert server.probe.requests == [b"go"]
    for index in range(3):
        call.send(b"%d" % index)
        server.server.flush()
        assert await stream.read() == b"%d" % index
    call.finish(trailers=(("x", "y"),))
    assert await stream.read() is grpc.aio.EOF
    assert ("x", "y") in tuple(await stream.trailing_metadata())
    assert not server.probe.cancelled


async def test_initial_metadata_of_a_silent_stream_comes_at_once(server: Running, channel: grpc.aio.Channel) -> None:
    stream = channel.unary_stream(PACKAGE + "Raw")(b"")
    await asyncio.wait_for(stream.initial_metadata(), 2)
    server.probe.open[0].finish()
    assert await stream.code() is grpc.StatusCode.OK


async def test_bidi_answers_each_request_as_it_comes(channel: grpc.aio.Channel) -> None:
    stream = channel.stream_stream(PACKAGE + "Chat")()
    for word in (b"a", b"bc", b""):
        await stream.write(word)
        assert await stream.read() == word.upper()
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_bidi_may_end_before_its_client(server: Running, channel: grpc.aio.Channel) -> None:
    stream = channel.stream_stream(PACKAGE + "Chat")()
    await stream.write(b"stop")
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK
    assert server.server.stats.calls_open == 0


async def test_metadata_both_ways_text_and_binary(channel: grpc.aio.Channel) -> None:
    sent = (("key", "value"), ("key", "again"), ("raw-bin", b"\x00\x01\xfe"), ("empty-bin", b""))
    call = channel.unary_unary(PACKAGE + "Metadata")(b"", metadata=sent)
    seen = (await call).decode()
    for pair in sent:
        assert repr(pair) in seen
    assert "user-agent" in seen
    assert "grpc-" not in seen.replace("grpc-python", "").replace("grpc-c", "")
    initial = dict(await call.initial_metadata())
    assert initial["initial-text"] == "first"
    assert initial["initial-bin"] == b"\x00\xff"
    trailing = dict(await call.trailing_metadata())
    assert trailing["trailing-text"] == "last"
    assert trailing["trailing-bin"] == b"\x01\x02\x03"


async def test_an_error_carries_its_message_details_and_trailers(channel: grpc.aio.Channel) -> None:
    text = "Zeile 1\nZeile 2: 100 % ü € 😀"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(PACKAGE + "Fail")(text.encode())
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details() == text
    trailing = dict(caught.value.trailing_metadata())
    assert trailing["grpc-status-details-bin"] == b"\x08\x09"
    assert trailing["why-bin"] == b"\x00"


async def test_a_long_error_message_still_reaches_the_client(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(PACKAGE + "Fail")(b"a" * 200_000)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details().startswith("aaaa")


async def test_a_handler_that_raises_is_internal_and_keeps_its_text_to_itself(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    for method in ("Crash", "RawCrash"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(PACKAGE + method)(b"")
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert caught.value.details() == "internal error: ZeroDivisionError"
    assert "secret text" in caplog.text


async def test_a_raw_handler_may_refuse(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(PACKAGE + "RawRefuse")(b"")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "max_tokens is 0"


async def test_a_stream_may_fail_after_messages_or_at_once(channel: grpc.aio.Channel) -> None:
    for messages in (0, 3):
        stream = channel.unary_stream(PACKAGE + "FailStream")(b"%d" % messages)
        got = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for reply in stream:
                got.append(reply)
        assert len(got) == messages
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS


async def test_an_unknown_method_is_unimplemented(server: Running, channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/no.Such/Method")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details() == "unknown method /no.Such/Method"
    assert server.server.stats.refusals["unknown_method"] == 1


class Typed:
    """A method with a protobuf request and reply."""

    name = "bridge.test.Typed"

    def methods(self) -> Iterator[Method]:
        yield Method("/bridge.test.Typed/Check", "unary", health_pb2.HealthCheckRequest, self.check)

    async def check(self, request: health_pb2.HealthCheckRequest, call: Call) -> health_pb2.HealthCheckResponse:
        if call.method != "/bridge.test.Typed/Check" or not call.peer.startswith("ipv4:127.0.0.1:"):
            raise GrpcError(Code.INTERNAL)
        return health_pb2.HealthCheckResponse(status=len(request.service))


async def test_protobuf_requests_are_parsed_and_replies_serialized(serve: Starter) -> None:
    running = await serve(services=[Typed()])
    async with grpc.aio.insecure_channel(running.target) as channel:
        check = channel.unary_unary("/bridge.test.Typed/Check")
        reply = await check(health_pb2.HealthCheckRequest(service="ab").SerializeToString())
        assert health_pb2.HealthCheckResponse.FromString(reply).status == 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(b"\x0a\xff")
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "cannot parse HealthCheckRequest" in caught.value.details()


async def test_the_blocking_client_works_too(server: Running) -> None:
    def use() -> list[object]:
        with grpc.insecure_channel(server.target) as channel:
            seen: list[object] = [channel.unary_unary(PACKAGE + "Echo")(b"hi", timeout=5)]
            seen.append([r.split()[0] for r in channel.unary_stream(PACKAGE + "Count")(b"5 3", timeout=5)])
            seen.append(list(channel.stream_stream(PACKAGE + "Chat")(iter([b"a", b"b"]), timeout=5)))
            seen.append(channel.stream_unary(PACKAGE + "Echo")(iter([b"one"]), timeout=5))
            try:
                channel.unary_unary(PACKAGE + "Fail")(b"no", timeout=5)
            except grpc.RpcError as error:
                seen.append((error.code(), error.details()))  # type: ignore[attr-defined]
            return seen

    assert await asyncio.to_thread(use) == [
        b"hi",
        [b"0", b"1", b"2", b"3", b"4"],
        [b"A", b"B"],
        b"one",
        (grpc.StatusCode.FAILED_PRECONDITION, "no"),
    ]


async def test_wait_for_ready_waits_for_the_listener(serve: Starter) -> None:
    first = await serve()
    port = first.port
    await first.server.close()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        waiting = asyncio.ensure_future(channel.unary_unary(PACKAGE + "Echo")(b"x", wait_for_ready=True, timeout=20))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        again = await start_on(socket.create_server(("127.0.0.1", port)))
        assert await waiting == b"x"
        await again.server.close()


def test_two_services_cannot_have_one_method() -> None:
    async def make() -> None:
        Server([Typed(), Typed()])

    with pytest.raises(ValueError, match="two services have the method"):
        asyncio.run(make())
