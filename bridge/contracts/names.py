"""Which contracts exist and which one each engine speaks natively: the one table from names to services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bridge.supervisor.errors import UsageError

CONTRACTS: Mapping[str, str] = {
    "vllm.grpc.engine": "bridge.contracts.vllm_engine:VllmEngine",
    "vllm.Inference": "bridge.contracts.vllm_inference:VllmInference",
    "vllm.Control": "bridge.contracts.vllm_control:VllmControl",
    "sglang.grpc.scheduler": "bridge.contracts.sglang_scheduler:SglangScheduler",
    "vllm.engine.v1": "bridge.contracts.vllm_engine_v1:VllmEngineV1",
}
"""Contract name (its proto package, or its service where the package has several) → module and class of its service."""

NATIVE: Mapping[str, str] = {"vllm": "vllm.grpc.engine", "sim": "vllm.grpc.engine", "sglang": "sglang.grpc.scheduler"}
"""Engine name → the contract served when none is named."""

BRINGS: Mapping[str, str] = {"vllm.Inference": "vllm.Control"}
"""Contract → the one its gateways call as well, which comes with it."""

ONLY_FOR: Mapping[str, str] = {"sglang.grpc.scheduler": "sglang"}
"""Contract → the one engine it can be served for: it says what no other engine is asked."""

SMG_KINDS = ("vllm.grpc.engine", "sglang.grpc.scheduler")
"""Contracts that SMG generates with. It asks a worker for the health of each at once and takes the first that answers
(1.13.0), so a listener serves one of them at most."""


def contracts_for(engine: str, asked: Sequence[str]) -> list[str]:
    """The contract names to serve, each once; raises `UsageError` for one that does not exist, or two that collide."""
    for name in asked:
        if name not in CONTRACTS:
            raise UsageError(f"--contract {name} does not exist; known: {', '.join(sorted(CONTRACTS))}")
        if ONLY_FOR.get(name, engine) != engine:
            raise UsageError(f"--contract {name} is served for {ONLY_FOR[name]} only, not for {engine}")
    names: list[str] = []
    for name in asked or [NATIVE[engine]]:
        names += [name, BRINGS[name]] if name in BRINGS else [name]
    kinds = sorted(set(names) & set(SMG_KINDS))
    if len(kinds) > 1:
        raise UsageError(
            f"--contract {' and --contract '.join(kinds)} cannot share a listener: SMG asks for all of its kinds at once "
            "and takes the first that answers; name one"
        )
    return list(dict.fromkeys(names))
