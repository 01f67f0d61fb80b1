"""Refusals: errors people act on. Each names what was wrong, the value, the limit, and what to do."""

from __future__ import annotations

from typing import Any

from bridge.grpc.status import Code, GrpcError

SHOWN = 80
"""Characters of an offending value that a message repeats."""


class Refusal(GrpcError):
    """A request that is not sent to the engine, as the gRPC status its client gets."""

    refusal = True


def shown(value: Any) -> str:
    text = repr(value[:SHOWN] if isinstance(value, str | bytes) else value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def invalid(field: str, value: Any, limit: str) -> Refusal:
    """INVALID_ARGUMENT for a value outside its limit: `limit` reads after "must be"."""
    return Refusal(Code.INVALID_ARGUMENT, f"{field} is {shown(value)}; it must be {limit}")


def unsupported(field: str, value: Any, why: str) -> Refusal:
    """UNIMPLEMENTED for a feature this bridge or engine does not have."""
    return Refusal(Code.UNIMPLEMENTED, f"{field} is {shown(value)}; {why}")
