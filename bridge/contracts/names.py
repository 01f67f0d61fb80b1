"""Which contracts exist and which one each engine speaks natively: the one table from names to services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bridge.supervisor.errors import UsageError

CONTRACTS: Mapping[str, str] = {"vllm.grpc.engine": "bridge.contracts.vllm_engine:VllmEngine"}
"""Contract name (its proto package) → module and class of its service."""

NATIVE: Mapping[str, str] = {"vllm": "vllm.grpc.engine", "sim": "vllm.grpc.engine"}
"""Engine name → the contract served when none is named."""


def contracts_for(engine: str, asked: Sequence[str]) -> list[str]:
    """The contract names to serve, each once; raises `UsageError` naming one that does not exist."""
    for name in asked:
        if name not in CONTRACTS:
            raise UsageError(f"--contract {name} does not exist; known: {', '.join(sorted(CONTRACTS))}")
    return list(dict.fromkeys(asked)) or [NATIVE[engine]]
