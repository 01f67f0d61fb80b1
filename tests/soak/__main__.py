"""`python -m tests.soak [--minutes N]`: the simulated engine behind the bridge under mixed load for long, then what grew.

Streams come and go, some are cancelled, some aborted by id, some refused; connections open and close. Fails when the
supervisor's or the front end's memory grows by a megabyte a minute or more, when descriptors are left over, or when the
engine still runs something at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.soak.soak import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        report = asyncio.run(run(Path(folder), given.minutes * 60))
    print(report.text())
    return 0 if report.passed() else 1


if __name__ == "__main__":
    sys.exit(main())
