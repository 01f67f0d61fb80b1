"""Fixtures of the gRPC server's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvloop

from bridge.grpc.limits import Limits
from tests.grpc.raw import RawClient
from tests.grpc.serving import Running, start

Starter = Callable[..., Awaitable[Running]]
Connector = Callable[..., Awaitable[RawClient]]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every test here runs on both loops: front ends use uvloop, and asyncio where there is none."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def serve() -> AsyncIterator[Starter]:
    """Starts servers that end with the test."""
    running: list[Running] = []

    async def starter(limits: Limits | None = None, **options: object) -> Running:
        running.append(await start(limits, **options))  # type: ignore[arg-type]
        return running[-1]

    yield starter
    for each in running:
        await each.server.close()


@pytest.fixture
async def server(serve: Starter) -> Running:
    """A server with the default limits."""
    return await serve()


@pytest.fixture
async def connect() -> AsyncIterator[Connector]:
    """Opens raw connections that end with the test."""
    clients: list[RawClient] = []

    async def connector(running: Running, first: bytes | None = None) -> RawClient:
        clients.append(await RawClient.connect(running.port, first))
        return clients[-1]

    yield connector
    for client in clients:
        await client.close()
