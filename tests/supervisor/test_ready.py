"""A start shows how it goes, and its limits name the leg, the limit and the flag."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from bridge.supervisor import ready
from bridge.supervisor.errors import StartError
from bridge.supervisor.process import Process
from bridge.supervisor.ready import Progress, StartPhase
from bridge.supervisor.status_line import StatusLine
from tests.supervisor.children import python


@pytest_asyncio.fixture
async def process() -> AsyncIterator[Process]:
    """A child that has written one line and sleeps."""
    child = Process.spawn("engine", python("import time; print('loading shard 1', flush=True); time.sleep(60)"))
    async with asyncio.timeout(10):
        while not child.tail:
            await asyncio.sleep(0.01)
    yield child
    await child.stop(5)


def ignore(phase: StartPhase, elapsed_s: float) -> None:
    del phase, elapsed_s


async def test_silence_over_the_limit_names_leg_limit_and_flag(process: Process) -> None:
    progress = Progress("engine", process, timeout_s=0.2, ceiling_s=0)
    progress.advance(StartPhase.LOADING)
    with pytest.raises(StartError) as error:
        await asyncio.wait_for(progress.show(ignore), 5)
    assert error.value.reason == (
        "engine gave no sign of life for 0.2 s while loading the model (limit: --startup-timeout-secs 0.2)"
    )
    assert error.value.tail == ("loading shard 1",)


async def test_signs_of_life_keep_it_going_up_to_the_ceiling(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "TICK_S", 0.02)
    progress = Progress("engine", process, timeout_s=0.2, ceiling_s=0.6)
    with pytest.raises(StartError, match=r"not up 0.6 s after its start, still importing .*--startup-ceiling-secs 0.6"):
        await asyncio.wait_for(progress.show(lambda phase, elapsed_s: progress.sign()), 5)


async def test_progress_is_told_and_printed(
    process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ready, "TICK_S", 0.02)
    monkeypatch.setattr(ready, "LINE_INTERVAL_S", 0.1)
    caplog.set_level(logging.INFO)
    told: list[StartPhase] = []
    progress = Progress("engine", process, timeout_s=0, ceiling_s=0)
    showing = asyncio.ensure_future(progress.show(lambda phase, elapsed_s: told.append(phase)))
    await asyncio.sleep(0.15)
    progress.advance(StartPhase.LOADING)
    await asyncio.sleep(0.15)
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)
    assert {*told} == {StartPhase.SPAWNED, StartPhase.IMPORTING, StartPhase.LOADING}
    line = caplog.messages[-1]
    assert line.startswith("engine is loading the model: 0 s") and f"process {process.pid} alive" in line
    assert line.endswith("last log: loading shard 1") and len(caplog.messages) <= 4


async def test_a_phase_never_goes_back(process: Process) -> None:
    progress = Progress("engine", process, timeout_s=0, ceiling_s=0)
    progress.advance(StartPhase.FACTS)
    progress.advance(StartPhase.IMPORTING)
    assert progress.phase is StartPhase.FACTS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_is_rewritten_and_records_print_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    handler = logging.StreamHandler(terminal)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        line = StatusLine(terminal)
        line.show("loading 1 s")
        line.show("loading 2 s")
        root.warning("a record")
        line.show("loading 3 s")
        line.close()
        root.warning("after")
    finally:
        root.removeHandler(handler)
    clear = "\r\x1b[K"
    expected = [f"{clear}loading 1 s", f"{clear}loading 2 s", f"{clear}a record\n", f"{clear}loading 3 s", clear]
    assert terminal.getvalue() == "".join(expected) + "after\n"


def test_elsewhere_the_line_is_off() -> None:
    assert not StatusLine(io.StringIO()).enabled
