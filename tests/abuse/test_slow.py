"""Slow and silent clients, all kinds at once, beside 64 good streams, on limits of about two seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest

from tests.abuse import slow
from tests.abuse.arena import Arena
from tests.abuse.hostile import Attack, under
from tests.abuse.target import Target

LIMIT_S = 2
PATIENCE_S = 60.0
"""For every client to be thrown out once: the limit, the check once a second, the second in which the other side may
still say something make four; the rest is for a busy machine."""
CLIENTS = 5

THROWN_OUT = (
    slow.says_nothing,
    slow.slow_preface,
    slow.preface_without_settings,
    slow.slow_headers,
    slow.slow_continuation,
    slow.half_a_frame,
    slow.deaf,
    slow.takes_no_answers,
)
"""The connection ends."""
REFUSED = (slow.slow_body, slow.no_body, slow.takes_no_end)
"""Their calls end; the connection may go on."""
UNREAD = (slow.deaf, slow.takes_no_answers)


@pytest.fixture(scope="module")
def arena(folder: Path) -> Iterator[Arena]:
    flags = ("--request-secs", LIMIT_S, "--slow-reader-secs", LIMIT_S, "--max-connections", 200)
    with Arena(folder, *flags, "--keepalive-secs", 1, "--keepalive-timeout-secs", 3) as made:
        yield made


def test_all_kinds_at_once(arena: Arena) -> None:
    """Each client that must be thrown out has to come back, again and again; nothing is left of any."""
    idle = arena.target.front_end.num_fds()
    attacks = {one.__name__: Attack(one, CLIENTS, reads=one not in UNREAD) for one in (*THROWN_OUT, *REFUSED)}
    with ExitStack() as stack:
        tolls = {name: stack.enter_context(under(attack, arena.target.port)) for name, attack in attacks.items()}
        until = time.monotonic() + PATIENCE_S
        thrown_out = {one.__name__ for one in THROWN_OUT}
        while any(tolls[name].connections < 2 * CLIENTS for name in thrown_out):
            came = {name: toll.connections for name, toll in tolls.items()}
            assert time.monotonic() < until, f"not all were thrown out: {came}"
            time.sleep(0.1)
        arena.crowd.must_be_right()
        arena.target.must_answer()
    arena.must_keep_only_the_good()
    arena.target.must_close(idle)


def test_the_others_do_not_notice(arena: Arena) -> None:
    window = arena.withstand(*(Attack(one, CLIENTS, reads=one not in UNREAD) for one in (*THROWN_OUT, *REFUSED)))
    assert window.tokens > 0 and not window.errors


def test_connections_that_are_held_give_way_to_new_ones(arena: Arena) -> None:
    """More idle connections than there may be: the good ones stay, and a newcomer is let in after ten seconds."""
    with under(Attack(slow.holds_on, connections=300, per_second=0.01), arena.target.port):
        until = time.monotonic() + PATIENCE_S
        while arena.target.answers():
            assert time.monotonic() < until, "there is room for all"
        assert arena.target.front_end.num_fds() < 300
        until = time.monotonic() + PATIENCE_S
        while not arena.target.answers():
            assert time.monotonic() < until, "no newcomer is let in"
            time.sleep(0.5)
    arena.crowd.must_be_right()
    arena.target.must_answer()


def test_tls_handshakes_that_are_not_finished(certificate: Path) -> None:
    """They are no connections yet, but they do not last, and nobody waits for them."""
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    with (
        TemporaryDirectory(prefix="abuse-") as path,
        Target(Path(path), "--tls-cert", certificate, "--request-secs", LIMIT_S, tls=credentials) as target,
    ):
        target.wait_until_serving()
        target.must_answer()
        idle = target.front_end.num_fds()
        attacks = [Attack(script, connections=50) for script in (slow.half_a_handshake, slow.half_of_the_handshake)]
        with ExitStack() as stack:
            tolls = [stack.enter_context(under(attack, target.port)) for attack in attacks]
            until = time.monotonic() + PATIENCE_S
            while any(toll.connections < 100 for toll in tolls):
                assert time.monotonic() < until, [toll.connections for toll in tolls]
                target.must_answer()
        target.must_close(idle)
