"""Input in turns: however many connections flood, the loop waits for one turn of each, then for one of all together."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from bridge.grpc.connection import Connection
from bridge.grpc.inlet import SLICE_BYTES, SMALL_SLICE_BYTES, TURN_CALLS
from bridge.grpc.server import Server
from tests.grpc import raw
from tests.grpc.serving import PACKAGE, Probe
from tests.grpc.test_fuzz import Wire

REQUESTS = 400
CONNECTIONS = 30
REQUEST_BYTES = 29
"""The least that a small request's two frames take."""
IN_A_SLICE = SLICE_BYTES // REQUEST_BYTES
IN_A_SMALL_SLICE = SMALL_SLICE_BYTES // REQUEST_BYTES


class Clock:
    """A millisecond passes whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def flood() -> bytes:
    """The bytes of one connection with `REQUESTS` small requests."""
    client = raw.RawClient(asyncio.StreamReader(), None)  # type: ignore[arg-type]
    requests = (client.request(PACKAGE + "Raw", b"")[1] for _ in range(REQUESTS))
    return raw.PREFACE + raw.settings() + b"".join(requests)


async def end(server: Server, connections: list[Connection]) -> None:
    """The clients hang up."""
    for connection in connections:
        connection.connection_lost(None)
    await server.close()


async def test_a_read_with_many_requests_is_fed_over_many_iterations() -> None:
    server = Server([Probe()])
    connection = Connection(server)
    connection.connection_made(Wire())  # type: ignore[arg-type]
    connection.data_received(flood())
    seen = [server.stats.calls_total]
    while seen[-1] < REQUESTS:
        await asyncio.sleep(0)
        seen.append(server.stats.calls_total)
    assert seen[0] <= IN_A_SLICE
    assert max(after - before for before, after in pairwise(seen)) <= TURN_CALLS + IN_A_SMALL_SLICE
    await end(server, [connection])


async def test_connections_that_wait_share_one_turn() -> None:
    """With a turn of a millisecond and a clock that ticks a millisecond, one connection is fed in each iteration."""
    server = Server([Probe()], monotonic=Clock())
    connections = [Connection(server) for _ in range(CONNECTIONS)]
    for connection in connections:
        connection.connection_made(Wire())  # type: ignore[arg-type]
        connection.data_received(flood())
    fed = []
    while server.stats.calls_total < REQUESTS * CONNECTIONS:
        before = server.stats.calls_total
        await asyncio.sleep(0)
        fed.append(server.stats.calls_total - before)
    assert max(fed) <= IN_A_SLICE
    await end(server, connections)


async def test_waiting_input_is_dropped_with_its_connection() -> None:
    server = Server([Probe()])
    connection = Connection(server)
    connection.connection_made(Wire())  # type: ignore[arg-type]
    connection.data_received(flood())
    assert server.stats.calls_total < REQUESTS
    await end(server, [connection])
    total = server.stats.calls_total
    await asyncio.sleep(0.01)
    assert (server.stats.calls_total, server.stats.calls_open) == (total, 0)
