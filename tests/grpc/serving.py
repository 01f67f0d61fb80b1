"""A real server on a loopback socket with a service whose behaviour tests choose."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable

from bridge.grpc.call import Call
from bridge.grpc.limits import Limits
from bridge.grpc.server import Server
from bridge.grpc.service import Method, Service
from bridge.grpc.status import CancelReason, Code, GrpcError

PACKAGE = "/bridge.test.Probe/"


class Probe:
    """Answers as its method says; raw streams are kept in ``open`` for the test to drive."""

    name = "bridge.test.Probe"

    def __init__(self) -> None:
        self.open: list[Call] = []
        self.requests: list[bytes] = []
        self.cancelled: list[tuple[Call, CancelReason]] = []
        self.task_ends: list[str] = []

    def methods(self) -> Iterable[Method]:
        yield Method(PACKAGE + "Echo", "unary", None, self.echo)
        yield Method(PACKAGE + "Packed", "unary", None, self.echo, compress=True)
        yield Method(PACKAGE + "Metadata", "unary", None, self.metadata)
        yield Method(PACKAGE + "Fail", "unary", None, self.fail)
        yield Method(PACKAGE + "Crash", "unary", None, self.crash)
        yield Method(PACKAGE + "Sleep", "unary", None, self.sleep)
        yield Method(PACKAGE + "Count", "stream", None, self.count)
        yield Method(PACKAGE + "PackedCount", "stream", None, self.count, compress=True)
        yield Method(PACKAGE + "FailStream", "stream", None, self.fail_stream)
        yield Method(PACKAGE + "Endless", "stream", None, self.endless, endless=True)
        yield Method(PACKAGE + "Raw", "raw_stream", None, self.raw)
        yield Method(PACKAGE + "RawRefuse", "raw_stream", None, self.raw_refuse)
        yield Method(PACKAGE + "RawCrash", "raw_stream", None, self.raw_crash)
        yield Method(PACKAGE + "Chat", "bidi", None, self.chat)

    async def echo(self, request: bytes, call: Call) -> bytes:
        return request

    async def metadata(self, request: bytes, call: Call) -> bytes:
        call.send_initial_metadata((("initial-text", "first"), ("initial-bin", b"\x00\xff")))
        call.send(repr(sorted(call.metadata.items(), key=str)).encode())
        call.finish(trailers=(("trailing-text", "last"), ("trailing-bin", b"\x01\x02\x03")))
        return b""

    async def fail(self, request: bytes, call: Call) -> bytes:
        raise GrpcError(Code.FAILED_PRECONDITION, request.decode(), b"\x08\x09", (("why-bin", b"\x00"),))

    async def crash(self, request: bytes, call: Call) -> bytes:
        raise ZeroDivisionError("secret text")

    async def sleep(self, request: bytes, call: Call) -> bytes:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.task_ends.append("cancelled")
            raise
        return b""

    async def count(self, request: bytes, call: Call) -> AsyncGenerator[bytes, None]:
        """``request`` is "messages size"."""
        messages, size = map(int, request.split())
        try:
            for index in range(messages):
                yield b"%d " % index + b"." * size
        finally:
            self.task_ends.append("closed")

    async def fail_stream(self, request: bytes, call: Call) -> AsyncGenerator[bytes, None]:
        for index in range(int(request)):
            yield b"%d" % index
        raise GrpcError(Code.DATA_LOSS, "lost")

    async def endless(self, request: bytes, call: Call) -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            await asyncio.sleep(3600)
        finally:
            self.task_ends.append("closed")

    def raw(self, request: bytes, call: Call) -> None:
        self.requests.append(request)
        self.open.append(call)
        call.on_cancel = lambda reason: self.cancelled.append((call, reason))

    def raw_refuse(self, request: bytes, call: Call) -> None:
        raise GrpcError(Code.INVALID_ARGUMENT, "max_tokens is 0")

    def raw_crash(self, request: bytes, call: Call) -> None:
        raise ZeroDivisionError

    async def chat(self, requests: AsyncIterator[bytes], call: Call) -> AsyncGenerator[bytes, None]:
        try:
            async for request in requests:
                if request == b"stop":
                    return
                yield request.upper()
        finally:
            self.task_ends.append("closed")


class Running:
    """A serving server."""

    def __init__(self, server: Server, probe: Probe, port: int) -> None:
        self.server = server
        self.probe = probe
        self.port = port
        self.target = f"127.0.0.1:{port}"

    async def calls(self, count: int) -> list[Call]:
        """The raw streams, once there are ``count``."""
        await until(lambda: len(self.probe.open) >= count)
        return self.probe.open


async def start(
    limits: Limits | None = None,
    tls: ssl.SSLContext | None = None,
    services: Iterable[Service] = (),
    host: str = "127.0.0.1",
) -> Running:
    """A server with a Probe on a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return await start_on(socket.create_server((host, 0), family=family), limits, tls, services)


async def start_on(
    sock: socket.socket,
    limits: Limits | None = None,
    tls: ssl.SSLContext | None = None,
    services: Iterable[Service] = (),
) -> Running:
    """A server with a Probe on a socket that is already bound."""
    probe = Probe()
    server = Server([probe, *services], limits, tls)
    port = sock.getsockname()[1] if sock.family != socket.AF_UNIX else 0
    await server.serve(sock)
    return Running(server, probe, port)


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.005)
