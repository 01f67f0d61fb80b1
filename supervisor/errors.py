"""What stops a start or ends a run: errors whose text is one line for people, and the exit code they end in."""

from __future__ import annotations

import sys
from collections.abc import Sequence

EXIT_REQUESTED = 0
"""Somebody asked for the stop."""
EXIT_UNREQUESTED = 1
"""The engine, the front end or the start failed. Engines' own exit codes mean nothing (vLLM exits 0 when it dies)."""
EXIT_USAGE = 2
"""What was asked for cannot be: an unknown engine, a model that is not there, a port in use."""


class SupervisorError(Exception):
    """Ends the run with `exit_code`. `tail` holds the last log lines of the process that failed, oldest first."""

    exit_code = EXIT_UNREQUESTED

    def __init__(self, reason: str, tail: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.tail = tuple(tail)


class UsageError(SupervisorError):
    """The configuration cannot work; nothing was started."""

    exit_code = EXIT_USAGE


class StartError(SupervisorError):
    """The tree was being brought up and a part of it failed or took too long."""


def tell(error: SupervisorError) -> int:
    """Print what ended the run to standard error, the log tail first; returns the exit code."""
    for line in error.tail:
        print(f"  | {line}", file=sys.stderr)
    print(f"headless-bridge: {error.reason}", file=sys.stderr)
    return error.exit_code
