"""A service as it is served to everybody where administrators have a listener of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NoReturn

from bridge.grpc.call import Call
from bridge.grpc.service import Method, Service
from bridge.grpc.status import Code, GrpcError


class Unprivileged:
    """`service`, with its admin methods refused by name."""

    def __init__(self, service: Service) -> None:
        self.name = service.name
        self._service = service

    def methods(self) -> Iterable[Method]:
        for method in self._service.methods():
            yield _refused(method) if method.admin else method


def _refused(method: Method) -> Method:
    name = method.path.rpartition("/")[2]

    async def refuse(request: Any, call: Call) -> NoReturn:
        raise GrpcError(Code.PERMISSION_DENIED, f"{name} is served on the listener for administrators only")

    return dataclasses.replace(method, kind="unary", handler=refuse)
