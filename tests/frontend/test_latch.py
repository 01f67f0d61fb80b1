"""What enforces constraints is one thing for an engine's life, and open again for the next engine."""

from __future__ import annotations

from pathlib import Path

from bridge.companion import Latch


def test_the_first_backend_holds_for_all_front_ends_until_another_engine_starts(tmp_path: Path) -> None:
    file = tmp_path / "backend"
    one, other = Latch(str(file)), Latch(str(file))
    assert one.take("xgrammar") == "xgrammar"
    assert other.take("guidance") == "xgrammar"
    file.unlink()
    for latch in (one, other):
        latch.open()
        assert latch.backend == ""
    assert other.take("guidance") == "guidance" and one.take("xgrammar") == "guidance"
