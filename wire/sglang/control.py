"""The engine's last word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DEATH = b"ENGINE_CORE_DEAD"
"""The only frame of the last message of a rank whose event loop ended; a killed one sends nothing."""


def is_death(frames: Sequence[Any]) -> bool:
    return len(frames) == 1 and len(frames[0]) == len(DEATH) and bytes(frames[0]) == DEATH
