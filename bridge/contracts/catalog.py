"""Makes a contract's service from its name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from bridge.contracts.context import Context
from bridge.contracts.names import CONTRACTS
from bridge.grpc.service import Service


def service(name: str, context: Context) -> Service:
    """The service of a contract in `CONTRACTS`; its module is imported only here."""
    module, _, attribute = CONTRACTS[name].partition(":")
    return cast(Service, getattr(import_module(module), attribute)(context))
