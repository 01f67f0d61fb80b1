"""grpc.health.v1 as its clients see it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bridge.contracts.health import NOT_SERVING, SERVICE_UNKNOWN, SERVING, HealthService
from tests.grpc.conftest import Starter
from tests.grpc.serving import until

Request = health_pb2.HealthCheckRequest


@pytest.fixture
def health() -> HealthService:
    return HealthService()


@pytest.fixture
async def stub(serve: Starter, health: HealthService) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    running = await serve(services=[health])
    async with grpc.aio.insecure_channel(running.target) as channel:
        yield health_pb2_grpc.HealthStub(channel)


async def test_check_follows_the_status(stub: health_pb2_grpc.HealthStub, health: HealthService) -> None:
    assert (await stub.Check(Request())).status == NOT_SERVING
    health.set_status("", SERVING)
    assert (await stub.Check(Request())).status == SERVING
    assert health.status("") == SERVING


async def test_an_unknown_service_is_not_found(stub: health_pb2_grpc.HealthStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(Request(service="no.Such"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "no.Such" in caught.value.details()


async def test_list_names_every_service(stub: health_pb2_grpc.HealthStub, health: HealthService) -> None:
    health.set_status("a.B", SERVING)
    reply = await stub.List(health_pb2.HealthListRequest())
    assert {name: status.status for name, status in reply.statuses.items()} == {"": NOT_SERVING, "a.B": SERVING}


async def test_watch_tells_each_change_once(stub: health_pb2_grpc.HealthStub, health: HealthService) -> None:
    watch = stub.Watch(Request(service="a.B"))
    assert (await watch.read()).status == SERVICE_UNKNOWN
    for status in (SERVING, NOT_SERVING, SERVING):
        health.set_status("a.B", status)
        health.set_status("a.B", status)
        health.set_status("other", status)
        assert (await watch.read()).status == status
    watch.cancel()
    await until(lambda: not health._changed)
