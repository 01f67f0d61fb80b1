"""What follows the end of an engine or a front end that nobody asked to end."""

from __future__ import annotations

import enum
from collections import deque
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


class Restart(enum.Enum):
    """Whether an engine that ended is started again. Every end that nobody asked for is a failure: engines' exit codes
    mean nothing (vLLM 0.32 exits 0 when it dies)."""

    NEVER = "never"
    ON_FAILURE = "on-failure"
    """At most `limit` times in `window_s`."""
    ALWAYS = "always"
    """As often as it takes."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When an engine is started again. The first of a row comes after `delay_s`, each more after twice as long, up to
    `max_delay_s`; a row is over when an engine has been up for `window_s`."""

    restart: Restart = Restart.ON_FAILURE
    limit: int = 5
    window_s: float = 600.0
    delay_s: float = 1.0
    max_delay_s: float = 60.0


class Restarts:
    """The restarts of one engine so far. Times are in seconds of one monotonic clock."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._ends: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """An engine ended at `now`: seconds until the next is started; None when none is."""
        policy = self._policy
        while self._ends and now - self._ends[0] > policy.window_s:
            self._ends.popleft()
        self._ends.append(now)
        count = len(self._ends)
        if policy.restart is Restart.NEVER or (policy.restart is Restart.ON_FAILURE and count > policy.limit):
            return None
        return float(min(policy.delay_s * 2 ** min(count - 1, 30), policy.max_delay_s))

    def describe(self) -> str:
        """Why there is no restart, for the end of a sentence."""
        policy = self._policy
        if policy.restart is Restart.NEVER:
            return "--restart never"
        return f"{policy.limit} restarts in {policy.window_s:g} s are the limit (--restart-limit)"


FRONT_END_LIMIT = 5
"""Front ends in a row that end before they serve, before the run ends."""
FRONT_END_DELAY_S = 0.25
FRONT_END_MAX_DELAY_S = 5.0


def front_end_delay(failures: int) -> float | None:
    """Seconds until the next front end after so many in a row that never served; None when there is no next.

    One that served is replaced at once: the engine works, and clients wait in the listener's queue.
    """
    if failures == 0:
        return 0.0
    if failures >= FRONT_END_LIMIT:
        return None
    return float(min(FRONT_END_DELAY_S * 2 ** (failures - 1), FRONT_END_MAX_DELAY_S))
