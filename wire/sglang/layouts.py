"""The field order of the requests that SGLang's scheduler reads, as its ready map declares it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.wire.errors import LayoutError
from bridge.wire.layout import READY_MESSAGE, Layouts

DECLARED = "positional_layouts"
"""Key of the ready map: struct name → field names in order, the tag not counted."""

VERSION_PREFIX = "sglang-"


def layouts_of(ready: Mapping[str, Any]) -> Layouts:
    """The declared layouts; raises `LayoutError` when there are none: no release can be told by its number alone."""
    declared = ready.get(DECLARED)
    if not isinstance(declared, dict) or not declared:
        raise LayoutError(
            f"the engine's ready map declares no {DECLARED}; start the engine with this bridge's plugin or SMG's"
        )
    return Layouts(declared, READY_MESSAGE)


def version_of(ready: Mapping[str, Any]) -> str:
    """SGLang's version, which the ready map gives as `sglang-0.5.23`; raises `LayoutError` for anything else."""
    version = ready.get("vllm_version")
    if not isinstance(version, str) or not version.startswith(VERSION_PREFIX):
        raise LayoutError(f"the engine's ready map says version {version!r}; an SGLang engine says sglang-<version>")
    return version.removeprefix(VERSION_PREFIX)
