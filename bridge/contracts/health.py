"""grpc.health.v1.Health: Check, List, and Watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

from grpc_health.v1 import health_pb2

from bridge.grpc.call import Call
from bridge.grpc.service import Method
from bridge.grpc.status import Code, GrpcError

UNKNOWN = health_pb2.HealthCheckResponse.UNKNOWN
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService:
    """The health of the server ("") and of each service, as its owner sets it."""

    name = "grpc.health.v1.Health"

    def __init__(self) -> None:
        self._status: dict[str, int] = {"": NOT_SERVING}
        self._changed: set[asyncio.Event] = set()

    def set_status(self, service: str, status: int) -> None:
        """Set ``service`` ("" is the server) to SERVING or NOT_SERVING, and tell its watchers."""
        if self._status.get(service) != status:
            self._status[service] = status
            for event in self._changed:
                event.set()

    def status(self, service: str) -> int | None:
        """The status of ``service``; None if it was never set."""
        return self._status.get(service)

    def methods(self) -> Iterable[Method]:
        """Check, List and Watch."""
        request = health_pb2.HealthCheckRequest
        yield Method(f"/{self.name}/Check", "unary", request, self._check)
        yield Method(f"/{self.name}/List", "unary", health_pb2.HealthListRequest, self._list)
        yield Method(f"/{self.name}/Watch", "stream", request, self._watch, endless=True)

    async def _check(self, request: health_pb2.HealthCheckRequest, call: Call) -> health_pb2.HealthCheckResponse:
        status = self._status.get(request.service)
        if status is None:
            raise GrpcError(Code.NOT_FOUND, f"unknown service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def _list(self, request: health_pb2.HealthListRequest, call: Call) -> health_pb2.HealthListResponse:
        statuses = {service: health_pb2.HealthCheckResponse(status=status) for service, status in self._status.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def _watch(
        self, request: health_pb2.HealthCheckRequest, call: Call
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        changed = asyncio.Event()
        self._changed.add(changed)
        last = None
        try:
            while True:
                changed.clear()
                status = self._status.get(request.service, SERVICE_UNKNOWN)
                if status != last:
                    last = status
                    yield health_pb2.HealthCheckResponse(status=status)
                else:
                    await changed.wait()
        finally:
            self._changed.discard(changed)
