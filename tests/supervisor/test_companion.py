"""The companion as the supervisor keeps it: facts first, another in a dead one's place, gone with the tree."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

import bridge.supervisor.companion
from bridge.supervisor.companion import Companion
from bridge.supervisor.errors import StartError
from bridge.supervisor.lifeline import Lifeline
from tests.companion.toy import FACTS
from tests.conftest import ROOT
from tests.supervisor.children import gone

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def toy(path: Path) -> list[str]:
    return [sys.executable, "-m", "tests.companion.toy", str(path)]


@pytest.fixture
async def lifeline() -> AsyncIterator[Lifeline]:
    line = Lifeline()
    yield line
    await line.close()


def companion(argv: list[str], lifeline: Lifeline, *, stays: bool = True) -> Companion:
    return Companion("toy", argv, ENVIRONMENT, lifeline, lambda line: None, stays=stays)


def running(path: Path) -> list[psutil.Process]:
    """The companions on that socket, workers aside."""
    found = [one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [])[1:] == toy(path)[1:]]
    return [one for one in found if one.ppid() not in {other.pid for other in found}]


async def another(path: Path, dead: psutil.Process, within_s: float = 15.0) -> psutil.Process:
    until = time.monotonic() + within_s
    while not (found := [one for one in running(path) if one.pid != dead.pid]):
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    return found[0]


async def answers(path: Path, within_s: float = 15.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            reader, writer = await asyncio.open_unix_connection(str(path))
        except OSError:
            await asyncio.sleep(0.05)
            continue
        greeting = await reader.read(4)
        writer.close()
        return len(greeting) == 4
    return False


async def test_it_tells_the_facts_and_stays_until_it_is_closed(lifeline: Lifeline, tmp_path: Path) -> None:
    path = tmp_path / "c"
    one = companion(toy(path), lifeline)
    assert await one.start() == FACTS
    (process,) = running(path)
    assert os.getsid(process.pid) == process.pid and await answers(path)
    await one.close()
    assert running(path) == []


async def test_one_that_dies_is_replaced(lifeline: Lifeline, tmp_path: Path) -> None:
    path = tmp_path / "c"
    one = companion(toy(path), lifeline)
    await one.start()
    (process,) = running(path)
    process.kill()
    await another(path, process)
    assert await answers(path)
    await one.close()
    assert running(path) == []


async def test_one_that_hangs_is_ended_and_replaced(lifeline: Lifeline, tmp_path: Path) -> None:
    path = tmp_path / "c"
    one = companion(toy(path), lifeline)
    await one.start()
    (process,) = running(path)
    process.suspend()
    one.restart("does not answer")
    await another(path, process)
    assert await answers(path)
    await one.close()


async def test_one_that_keeps_dying_is_started_ever_less_often(
    lifeline: Lifeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge.supervisor.companion, "FIRST_DELAY_S", 0.1)
    starts = tmp_path / "starts"
    code = f"open({str(starts)!r}, 'a').write('x'); print('''{_line()}''')"
    one = companion([sys.executable, "-I", "-S", "-c", code], lifeline)
    assert await one.start() == FACTS
    await asyncio.sleep(2.5)
    await one.close()
    assert 3 <= len(starts.read_text()) <= 6  # at 0, 0.1, 0.3, 0.7, 1.5 s, and what each start takes


async def test_a_one_shot_is_gone_once_it_told_the_facts(lifeline: Lifeline) -> None:
    one = companion([sys.executable, "-I", "-S", "-c", f"print('''{_line()}''')"], lifeline, stays=False)
    assert await one.start() == FACTS
    await one.close()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "import sys; print('error: no such model', file=sys.stderr); sys.exit(1)",
            "exited with code 1: error: no such",
        ),
        ("pass", "exited with code 0"),
        ("print('facts!')", "printed no facts: JSON is malformed"),
        ('print(\'{"engine": "toy"}\')', "printed no facts: Object missing required field"),
        ("import sys; sys.exit(\"No module named 'bridge'\")", "headless-bridge is not installed in"),
    ],
)
async def test_a_start_without_facts_says_why(lifeline: Lifeline, code: str, says: str) -> None:
    one = companion([sys.executable, "-I", "-S", "-c", code], lifeline)
    with pytest.raises(StartError) as error:
        await one.start()
    assert says in error.value.reason
    await one.close()


async def test_another_version_is_told(lifeline: Lifeline) -> None:
    line = _line().replace(f'"bridge_version":"{FACTS.bridge_version}"', '"bridge_version":"0.0.1"')
    one = companion([sys.executable, "-I", "-S", "-c", f"print('''{line}''')"], lifeline, stays=False)
    with pytest.raises(StartError, match=r"has headless-bridge 0.0.1, this is .* install headless-bridge=="):
        await one.start()
    await one.close()


async def test_a_start_that_is_cancelled_leaves_nothing(lifeline: Lifeline, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    one = companion([sys.executable, "-I", "-S", "-c", code], lifeline)
    starting = asyncio.ensure_future(one.start())
    while not pid.exists() or not pid.read_text():
        await asyncio.sleep(0.02)
    starting.cancel()
    await one.close()
    assert gone(int(pid.read_text()), 2.0)


def _line() -> str:
    return msgspec.json.encode(FACTS).decode()
