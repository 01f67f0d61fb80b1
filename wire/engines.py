"""Which codec speaks to which engine: the one table that maps an engine's name to its wire."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from bridge.wire.codec import Codec
from bridge.wire.errors import LayoutError

WIRES: Mapping[str, str] = {
    "vllm": "bridge.wire.vllm",
    "sim": "bridge.wire.vllm",
    "sglang": "bridge.wire.sglang",
}
"""Engine name → the package with its wire. The simulated engine speaks vLLM's."""


def codec_for(engine: str, ready: Mapping[str, Any], declared: Mapping[str, list[str]], client_index: int) -> Codec:
    """The codec for an engine that sent `ready`; `declared` are the layouts the companion read (empty when none did).

    Raises `LayoutError` when no layout fits the version or one lacks a field the bridge needs.
    """
    package = WIRES.get(engine)
    if package is None:
        raise LayoutError(f"no wire is known for the engine {engine!r}; known: {', '.join(sorted(WIRES))}")
    module = import_module(f"{package}.codec")
    return cast(Codec, module.from_ready(ready, declared, client_index))


def rules_for(engine: str) -> Any:
    """The module with that engine's request limits as data, read by the guard."""
    return import_module(f"{WIRES[engine]}.rules")


def operations_for(engine: str) -> Mapping[str, str]:
    """Neutral operation → what `engine` calls it, for `Codec.utility`; what an engine does not have is not in it."""
    module = import_module(f"{WIRES[engine]}.control")
    return cast(Mapping[str, str], getattr(module, "OPERATIONS", {}))
