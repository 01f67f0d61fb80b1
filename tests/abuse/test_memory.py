"""Large requests, and small ones that become large, beside 64 good streams; the memory they cost is the limits'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.abuse.arena import Arena
from tests.abuse.heavy import HEAVY, LIMIT_MIB, PACKED_MIB
from tests.abuse.hostile import Attack

BUFFERED_MIB = 32
GROWTH_MIB = 1.25 * BUFFERED_MIB + 4 * LIMIT_MIB + LIMIT_MIB + 8 * PACKED_MIB + 32
"""What is being received, with a growing buffer's room; two messages that are being inflated, in pieces and whole; one
that is being parsed, whole and parsed; and 2,024 open calls, with room."""


@pytest.fixture(scope="module")
def arena(folder: Path) -> Iterator[Arena]:
    flags = ("--max-message-mib", LIMIT_MIB, "--max-buffered-mib", BUFFERED_MIB, "--max-in-flight", 1000)
    with Arena(folder, *flags) as made:
        yield made


@pytest.mark.parametrize("attack", HEAVY, ids=lambda attack: attack.name)
def test_the_others_do_not_notice(arena: Arena, attack: Attack) -> None:
    window = arena.withstand(attack, growth_mib=GROWTH_MIB)
    assert window.tokens > 0 and not window.errors
    arena.must_keep_only_the_good()
