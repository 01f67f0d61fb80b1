"""Floods of everything HTTP/2 has, beside 64 good streams on the default limits."""

from __future__ import annotations

import pytest

from tests.abuse.arena import Arena
from tests.abuse.floods import FLOODS, calls_to_nobody
from tests.abuse.fuzz import fuzzed
from tests.abuse.hostile import Attack

FUZZ_S = 6.0
MANY_S = 6.0
"""48 threads of attackers on two cores delay everybody now and then: the twin's p99 of two seconds was 38 to 176 ms."""


@pytest.mark.parametrize("flood", FLOODS, ids=lambda attack: attack.name)
def test_the_others_do_not_notice(arena: Arena, flood: Attack) -> None:
    window = arena.withstand(flood)
    assert window.tokens > 0 and not window.errors
    arena.must_keep_only_the_good()


def test_many_attackers_share_one_turn(arena: Arena) -> None:
    window = arena.withstand(Attack(calls_to_nobody, connections=48), window_s=MANY_S)
    assert window.tokens > 0 and not window.errors


def test_malformed_conversations(arena: Arena) -> None:
    window = arena.withstand(Attack(fuzzed, connections=6), window_s=FUZZ_S)
    assert window.tokens > 0 and not window.errors
    arena.must_keep_only_the_good()
