"""What happens when a part of the tree ends that nobody asked to end."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Part(enum.Enum):
    """Whose end it was."""

    REQUEST = "a stop request"
    ENGINE = "engine"
    FRONT_END = "front end"


@dataclass(frozen=True)
class End:
    """Why the run ends: `reason` is one line for people, `tail` the last log lines of the part, oldest first."""

    part: Part
    reason: str
    tail: Sequence[str] = ()

    @property
    def requested(self) -> bool:
        return self.part is Part.REQUEST


class Decision(enum.Enum):
    """What the supervisor does about an end."""

    EXIT = "exit"


def decide(end: End) -> Decision:
    """The one place that answers an end. Every end leads out: a supervisor above (systemd, Kubernetes) starts anew."""
    del end
    return Decision.EXIT
