"""`top`: what two scrapes say, and the screen it says it on."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import time
from collections.abc import Iterator

import pytest

from bridge.metrics import FIRST_TOKEN_S
from bridge.supervisor.errors import SupervisorError, UsageError
from bridge.supervisor.measures import COUNTER, GAUGE, HISTOGRAM, Family, Histogram, Sample, exposition
from bridge.top import Screen, Series, View, address, quantile, watch

PREFIX = "headless_bridge_"


def scrape(*, tokens: float, first_tokens: list[float], at: float, **more: float) -> Series:
    """A scrape of a run that has sent so many tokens, with these times to the first token."""
    histogram = Histogram(FIRST_TOKEN_S)
    for value in first_tokens:
        histogram.observe(value)
    families = [
        Family(PREFIX + "state", GAUGE, "", [Sample(["loading"], 0), Sample(["serving"], 1)], ["state"]),
        Family(PREFIX + "info", GAUGE, "", [Sample(["1.0", "sim", 'a "model"\\'], 1)], ["version", "engine", "model"]),
        Family(PREFIX + "output_tokens_total", COUNTER, "", [Sample([], tokens)]),
        Family(
            PREFIX + "time_to_first_token_seconds", HISTOGRAM, "", [histogram.sample(["s"])], ["s"], list(FIRST_TOKEN_S)
        ),
        Family(PREFIX + "engine_running", GAUGE, "", [Sample(["10"], 3), Sample(["2"], 1)], ["rank"]),
        Family(PREFIX + "engine_kv_cache_usage", GAUGE, "", [Sample(["10"], 0.5), Sample(["2"], 0)], ["rank"]),
        *(Family(PREFIX + name, COUNTER, "", [Sample(["X"], value)], ["code"]) for name, value in more.items()),
    ]
    return Series(exposition(families), at)


def shown(*readings: Series) -> str:
    view = View()
    for reading in readings:
        view.add(reading)
    return "\n".join(view.lines())


def test_rates_are_between_the_last_two_scrapes() -> None:
    text = shown(
        scrape(tokens=0, first_tokens=[], at=0), scrape(tokens=100, first_tokens=[], at=1),
        scrape(tokens=700, first_tokens=[], at=3),
    )  # fmt: skip
    assert re.search(r"^tokens +300/s out.*700 out in all$", text, re.MULTILINE)


def test_a_run_that_started_anew_has_no_negative_rate() -> None:
    text = shown(scrape(tokens=700, first_tokens=[], at=0), scrape(tokens=30, first_tokens=[], at=1))
    assert re.search(r"^tokens +30/s out", text, re.MULTILINE)


def test_latencies_are_those_since_the_oldest_scrape() -> None:
    old = scrape(tokens=0, first_tokens=[9.0] * 100, at=0)
    new = scrape(tokens=0, first_tokens=[9.0] * 100 + [0.02] * 90 + [0.2] * 10, at=1)
    assert quantile(new, old, "time_to_first_token_seconds", 0.5) == 0.025
    assert quantile(new, old, "time_to_first_token_seconds", 0.95) == 0.25
    assert quantile(old, old, "time_to_first_token_seconds", 0.5) is None
    assert "first      p50 ≤ 25 ms  p95 ≤ 250 ms  p99 ≤ 250 ms" in shown(old, new)


def test_the_head_and_the_ranks_in_their_order() -> None:
    lines = shown(scrape(tokens=0, first_tokens=[], at=0)).splitlines()
    assert lines[0].startswith('headless-bridge 1.0 · sim · a "model"\\ · serving')
    start = next(index for index, line in enumerate(lines) if line.startswith("rank"))
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == ["2", "10"]
    assert lines[start + 2].endswith("[##########          ] 50%")


def test_trouble_shows_only_where_there_is_some() -> None:
    assert "refused" not in shown(scrape(tokens=0, first_tokens=[], at=0, refusals_total=0))
    assert "refused    2 X" in shown(scrape(tokens=0, first_tokens=[], at=0, refusals_total=2))


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:9090", "http://127.0.0.1:9090/metrics"),
        ("http://worker:9090", "http://worker:9090/metrics"),
        ("http://[::1]:9090/figures", "http://[::1]:9090/figures"),
    ],
)
def test_addresses(given: str, url: str) -> None:
    assert address(given) == url


@pytest.mark.parametrize("given", ["grpc://127.0.0.1:50051", "http://", "/etc/passwd"])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(UsageError):
        address(given)


def test_a_run_that_goes_away_is_told_and_waited_for() -> None:
    readings: Iterator[str | None] = iter(["x 1\n", None, "x 1\n"])
    out = io.StringIO()

    def read() -> str:
        text = next(readings)
        if text is None:
            raise SupervisorError("no figures from there: Connection refused")
        return text

    watch(read, Screen(out), 0.01, 3)
    assert out.getvalue().count("headless-bridge") == 3
    assert out.getvalue().count("no figures from there: Connection refused") == 1


def test_nothing_to_read_ends_it() -> None:
    def read() -> str:
        raise SupervisorError("nobody there")

    with pytest.raises(SupervisorError):
        watch(read, Screen(io.StringIO()), 0.01, 3)


def test_a_terminal_is_given_back_as_it_was() -> None:
    """`top` in a real pseudo-terminal, ended by q."""
    pid, master = pty.fork()
    if pid == 0:
        code = "from bridge.top import *; watch(lambda: 'x 1', Screen(sys.stdout), 30.0, None)"
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-c", code])
    got = b""
    until = time.monotonic() + 20
    while b"rank" not in got:
        assert time.monotonic() < until, got
        got += os.read(master, 4096)
    os.write(master, b"q")
    while True:
        try:
            more = os.read(master, 4096)
        except OSError:
            break
        if not more:
            break
        got += more
    os.close(master)
    assert os.waitpid(pid, 0)[1] == 0
    assert got.startswith(b"\x1b[?1049h\x1b[?25l") and got.endswith(b"\x1b[?25h\x1b[?1049l")
