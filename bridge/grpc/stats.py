"""Counters of one server, read by metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class ServerStats:
    """Gauges are now; totals only grow."""

    connections: int = 0
    connections_total: int = 0
    calls_open: int = 0
    # Of them, client-streaming and endless ones.
    calls_lasting: int = 0
    calls_total: int = 0
    # Ended calls whose last bytes their client has not taken.
    calls_lingering: int = 0
    buffered_bytes: int = 0
    # Calls that ended before their handler finished them, by CancelReason name.
    cancelled: Counter[str] = field(default_factory=Counter)
    # Calls and connections refused or ended by a limit or a malformed request, by reason.
    refusals: Counter[str] = field(default_factory=Counter)
    # Calls that ended, by path and the name of the status they ended with.
    codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    # Of them, those a handler refused: nothing was done for them.
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
