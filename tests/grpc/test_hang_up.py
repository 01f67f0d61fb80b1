"""How the server leaves a client that it has given up: nothing is kept for it, and little more is read from it."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from itertools import pairwise

import pytest

from bridge.grpc.connection import CANCELLED_AT_ONCE, LINGER_S
from tests.grpc.conftest import Connector
from tests.grpc.raw import PING, PREFACE, frame, settings, window_update
from tests.grpc.serving import Running, until


async def connected(server: Running) -> socket.socket:
    """A blocking socket whose preface and SETTINGS the server has seen."""
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall(PREFACE + settings(window=2**31 - 1) + window_update(0, 2**31 - 65536))
    await until(lambda: any(one.settled for one in server.server._connections))
    return sock


async def test_a_dropped_client_is_reset_and_its_unsent_bytes_are_gone(server: Running) -> None:
    sock = await connected(server)
    (connection,) = server.server._connections
    assert connection._transport is not None
    connection._transport.write(bytes(32 << 20))
    assert connection.unsent() > 1 << 20
    connection.drop("slow_reader")
    await until(lambda: server.server.stats.connections == 0)
    with pytest.raises(ConnectionResetError):
        while sock.recv(1 << 20):
            pass
    sock.close()


async def test_a_client_that_goes_on_sending_is_not_heard_for_long(server: Running) -> None:
    sock = await connected(server)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(OSError):
        while True:
            await loop.sock_sendall(sock, frame(PING, 0, 0, bytes(8)) * 10_000)
    await until(lambda: server.server.stats.connections == 0)
    assert loop.time() - started < LINGER_S
    sock.close()


async def test_a_lost_connections_streams_do_not_wait_for_the_garbage_collector(server: Running) -> None:
    sock = await connected(server)
    (connection,) = server.server._connections
    session = connection._h2
    connection.ping()
    del connection
    gc.disable()
    try:
        sock.close()
        await until(lambda: server.server.stats.connections == 0)
        await asyncio.sleep(0.01)
        assert sys.getrefcount(session) == 2
    finally:
        gc.enable()


async def test_many_calls_of_a_lost_connection_end_over_many_iterations(server: Running, connect: Connector) -> None:
    client = await connect(server)
    await client.send(b"".join(client.request()[1] for _ in range(200)))
    calls = await server.calls(200)
    (connection,) = server.server._connections
    cancelled = server.probe.cancelled
    connection.drop("slow_reader")
    seen = []
    while server.server._connections:
        await asyncio.sleep(0)
        seen.append(len(cancelled))
        for call in calls:
            call.send(b"late")
    assert max(after - before for before, after in pairwise([0, *seen])) == CANCELLED_AT_ONCE
    assert [call for call, _ in cancelled] == calls
    assert (server.server.stats.calls_open, server.server.stats.connections) == (0, 0)


async def test_a_refused_connections_calls_end_before_its_lingering_does(server: Running, connect: Connector) -> None:
    client = await connect(server)
    await client.send(b"".join(client.request()[1] for _ in range(200)))
    await server.calls(200)
    (connection,) = server.server._connections
    connection.refuse("reset_flood")
    await until(lambda: server.server.stats.calls_open == 0)
    assert server.server.stats.connections == 1
    assert not connection.calls
    await client.close()
    await until(lambda: server.server.stats.connections == 0)
