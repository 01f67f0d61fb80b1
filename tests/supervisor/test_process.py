"""A process is relayed, watched, and stopped once and whole."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge.supervisor.errors import SupervisorError
from bridge.supervisor.process import MAX_LINE, TAIL_LINES, Lines, Process
from bridge.supervisor.vitals import Vitals
from tests.supervisor.children import STUBBORN, TREE, gone, lives, pid_in, python


async def until_line(lines: list[str], wanted: str, within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while wanted not in lines:
            await asyncio.sleep(0.01)


def test_lines_are_cut_at_newlines_and_carriage_returns() -> None:
    lines = Lines()
    assert lines.feed(b"one\ntw") == ["one"]
    assert lines.feed(b"o\r\nloading 10%\rloading 20%\r\n\n") == ["two", "loading 10%", "loading 20%"]
    assert lines.feed(b"no newline \xff") == []
    assert lines.end() == ["no newline \ufffd"]


def test_a_line_without_end_is_cut() -> None:
    lines = Lines()
    assert [len(line) for line in lines.feed(b"x" * (MAX_LINE + 5))] == [MAX_LINE]


async def test_output_is_relayed_and_the_tail_is_bounded() -> None:
    lines: list[str] = []
    code = "import sys\nfor i in range(100): print(i)\nprint('last', file=sys.stderr)"
    process = Process.spawn("child", python(code), on_line=lines.append)
    await process.exited.wait()
    await process.outputs_read(5)
    assert {*lines} == {*map(str, range(100)), "last"}
    assert len(process.tail) == TAIL_LINES
    assert process.describe_exit() == "exited with code 0"
    await process.stop(1)


async def test_standard_output_can_be_captured_beside_the_log() -> None:
    lines: list[str] = []
    code = "import sys\nprint('fact')\nprint('log', file=sys.stderr)"
    process = Process.spawn("child", python(code), capture=True, on_line=lines.append)
    await process.exited.wait()
    await process.outputs_read(5)
    assert (bytes(process.captured), lines) == (b"fact\n", ["log"])
    await process.stop(1)


async def test_an_exit_is_described_by_code_or_signal() -> None:
    process = Process.spawn("child", python("raise SystemExit(3)"))
    await process.exited.wait()
    assert process.describe_exit() == "exited with code 3"
    await process.stop(1)
    process = Process.spawn("child", python("import time; time.sleep(60)"))
    assert process.describe_exit() == "is running"
    os.kill(process.pid, signal.SIGKILL)
    await asyncio.wait_for(process.exited.wait(), 5)
    assert process.describe_exit() == "was killed by SIGKILL"
    await process.stop(1)


async def test_a_program_that_is_not_there_is_one_line() -> None:
    with pytest.raises(SupervisorError, match="cannot start child: /no/such/program: No such file"):
        Process.spawn("child", ["/no/such/program"])


async def test_stop_ends_the_leader_and_what_it_left_behind(tmp_path: Path) -> None:
    lines: list[str] = []
    process = Process.spawn("child", python(TREE, tmp_path / "pid"), on_line=lines.append)
    inner = pid_in(tmp_path / "pid")
    await until_line(lines, "up")
    assert {process.pid, inner} <= {*process.members()}
    await asyncio.gather(process.stop(5), process.stop(5))
    assert process.members() == [] and not lives(inner)
    assert process.describe_exit() == "was killed by SIGTERM"


async def test_stop_after_the_leader_died_ends_the_orphans(tmp_path: Path) -> None:
    process = Process.spawn("child", python(TREE, tmp_path / "pid"))
    inner = pid_in(tmp_path / "pid")
    os.kill(process.pid, signal.SIGKILL)
    await asyncio.wait_for(process.exited.wait(), 5)
    assert lives(inner)
    await process.stop(5)
    assert not lives(inner)


async def test_a_process_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    lines: list[str] = []
    process = Process.spawn("child", python(STUBBORN), on_line=lines.append)
    await until_line(lines, "up")
    started = time.monotonic()
    await process.stop(0.3)
    assert 0.3 <= time.monotonic() - started < 3
    assert process.describe_exit() == "was killed by SIGKILL"


async def test_kill_cuts_a_stop_short() -> None:
    lines: list[str] = []
    process = Process.spawn("child", python(STUBBORN), on_line=lines.append)
    await until_line(lines, "up")
    stopping = asyncio.ensure_future(process.stop(30))
    await asyncio.sleep(0.05)
    process.kill()
    await asyncio.wait_for(stopping, 5)
    assert process.describe_exit() == "was killed by SIGKILL" and process.members() == []


async def test_without_pidfd_a_thread_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    process = Process.spawn("child", python("raise SystemExit(4)"))
    await asyncio.wait_for(process.exited.wait(), 5)
    assert process.returncode == 4
    await process.stop(1)


def test_the_parent_death_signal_reaches_the_child(tmp_path: Path) -> None:
    code = """
import asyncio, os, signal, sys
from bridge.supervisor.process import Process

async def main():
    sleeper = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    Process.spawn("child", [sys.executable, "-I", "-S", "-c", sleeper, sys.argv[1]], parent_death=signal.SIGTERM)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "pid")])
    child = pid_in(tmp_path / "pid")
    parent.kill()
    parent.wait()
    assert gone(child, 2.0)


async def test_the_death_of_a_vital_member_is_told_and_of_another_not(tmp_path: Path) -> None:
    process = Process.spawn("child", python(TREE, tmp_path / "pid"))
    inner = pid_in(tmp_path / "pid")
    deaths: list[int] = []
    vitals = Vitals(process, lambda title: str(tmp_path) in title, lambda pid, title: deaths.append(pid))
    assert len(vitals.titles) == 1
    os.kill(inner, signal.SIGKILL)
    async with asyncio.timeout(5):
        while not deaths:
            await asyncio.sleep(0.01)
    assert deaths == [inner]
    vitals.close()
    await process.stop(5)
