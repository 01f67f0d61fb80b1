"""Two minutes of `make soak`."""

from __future__ import annotations

from pathlib import Path

from tests.soak.soak import run

SECONDS = 120.0


async def test_two_minutes_leave_nothing_behind(tmp_path: Path) -> None:
    report = await run(tmp_path, SECONDS)
    assert report.passed(), report.text()
