"""The table of docs/reliability.md: one row a case, measured while 64 streams run."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path

HEAD = """# Reliability

What happens to 64 continuous streams when a part dies, hangs or is replaced. Made by `make chaos` (tests/chaos), which
fails when a row breaks its limit; `make test` measures the same and leaves this file alone.

- *ended*: seconds from the event until every call then in flight had its terminal or UNAVAILABLE; in brackets the limit.
- *lost*: calls that ended with UNAVAILABLE, of those in flight.
- *served again*: seconds from the event until a call that began after it was answered whole. An engine that has to load
  again takes its own start-up time (here a two-layer model on the CPU), as the policy of `--restart` says.
- *hung*: calls without an end. *orphans*: processes of the old part, or generations in the engine nobody waits for.
"""

FOOT = """
What a client sees: UNAVAILABLE with `the engine is gone: …` or a closed connection; gateways retry both. An
upgrade shows GOAWAY alone: a call that races it may fail once a connection, with UNAVAILABLE, for a client without retries.
Behind SMG 1.13 at its defaults 50 upgrades in a row failed nothing. One thing to know there: its client (tonic) fails every
call that it hands to a connection in the instant in which it finds the GOAWAY, so a gateway that sends many calls in step may
see more than one, each retried; after ten of them SMG takes a worker out of service for a while.
"""


@dataclass
class Row:
    """One case. Times in seconds; `again_s` None where nothing is meant to serve again."""

    what: str
    engine: str
    ended_s: float
    limit_s: float
    lost: int
    in_flight: int
    again_s: float | None
    hung: int
    orphans: int
    note: str = ""

    def cells(self) -> list[str]:
        again = "-" if self.again_s is None else f"{self.again_s:.2f}"
        limit = "" if self.limit_s == float("inf") else f" (≤ {self.limit_s:g})"
        numbers = [
            f"{self.ended_s:.2f}{limit}",
            f"{self.lost} of {self.in_flight}",
            again,
            str(self.hung),
            str(self.orphans),
        ]
        return [self.what, self.engine, *numbers, self.note]


@dataclass
class Table:
    """The rows of one run."""

    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Keep a row, and hold it to its limits."""
        self.rows.append(row)
        assert row.ended_s <= row.limit_s, row
        assert row.hung == 0 and row.orphans == 0, row

    def write(self, path: Path) -> None:
        names = ["case", "engine", "ended", "lost", "served again", "hung", "orphans", ""]
        lines = [
            f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *(row.cells() for row in self.rows))
        ]
        system = f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
        where = f"\n{system}, 2 cores shared with other work.\n\n"
        path.write_text(HEAD + where + "\n".join(lines) + "\n" + FOOT)
