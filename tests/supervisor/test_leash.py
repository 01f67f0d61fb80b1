"""The leash ends what the supervisor started when the supervisor is gone, and nothing otherwise."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge.supervisor import leash
from bridge.supervisor.lifeline import Lifeline
from bridge.supervisor.process import Process
from tests.supervisor.children import STUBBORN, TREE, gone, lives, pid_in, python


def start_leash() -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", leash.__file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)


def tell(process: subprocess.Popen[str], *commands: str) -> None:
    assert process.stdin is not None
    process.stdin.write("".join(f"{command}\n" for command in commands))
    process.stdin.flush()


def end_of_input(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def test_the_end_of_its_input_ends_every_session_and_folder(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "i0").touch()
    leaders = [
        subprocess.Popen(python(TREE, tmp_path / name), stdout=subprocess.DEVNULL, start_new_session=True)
        for name in ("one", "two")
    ]
    inner = [pid_in(tmp_path / name) for name in ("one", "two")]
    process = start_leash()
    tell(process, *(f"watch {leader.pid}" for leader in leaders), f"folder {folder}")
    end_of_input(process)
    assert process.wait(10) == 0
    assert [leader.wait(1) for leader in leaders] == [-signal.SIGTERM] * 2
    assert not any(map(lives, inner)) and not folder.exists()


def test_a_session_that_ignores_sigterm_is_killed_within_the_limit() -> None:
    stubborn = subprocess.Popen(python(STUBBORN), stdout=subprocess.PIPE, start_new_session=True)
    assert stubborn.stdout is not None and stubborn.stdout.readline() == b"up\n"
    process = start_leash()
    tell(process, f"watch {stubborn.pid}")
    started = time.monotonic()
    end_of_input(process)
    assert process.wait(10) == 0
    assert leash.TERM_GRACE_S <= time.monotonic() - started < leash.TERM_GRACE_S + 1.5
    assert stubborn.wait(1) == -signal.SIGKILL
    stubborn.stdout.close()


@pytest.mark.parametrize("last", ["release", "forget"])
def test_released_or_forgotten_sessions_live_on(last: str, tmp_path: Path) -> None:
    leader = subprocess.Popen(python(TREE, tmp_path / "pid"), stdout=subprocess.DEVNULL, start_new_session=True)
    inner = pid_in(tmp_path / "pid")
    process = start_leash()
    tell(process, f"watch {leader.pid}", "release" if last == "release" else f"forget {leader.pid}")
    end_of_input(process)
    assert process.wait(10) == 0
    assert leader.poll() is None and lives(inner)
    leash.end_sessions({leader.pid})
    leader.wait(1)


def test_signals_do_not_end_it() -> None:
    process = start_leash()
    tell(process, "watch 999999999")
    time.sleep(0.3)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    time.sleep(0.1)
    assert process.poll() is None
    end_of_input(process)
    assert process.wait(10) == 0


def test_a_leash_that_dies_is_replaced_and_told_again(tmp_path: Path) -> None:
    code = """
import asyncio, os, signal, sys
from bridge.supervisor import lifeline
from bridge.supervisor.process import Process

async def main():
    lifeline.RESTART_DELAY_S = 0.05
    life = lifeline.Lifeline()
    sleeper = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    life.watch(Process.spawn("child", [sys.executable, "-I", "-S", "-c", sleeper, sys.argv[1]]))
    first = life.leash.pid
    os.kill(first, signal.SIGKILL)
    while life.leash.pid == first:
        await asyncio.sleep(0.02)
    print("replaced", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    command = [sys.executable, "-c", code, str(tmp_path / "pid")]
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert supervisor.stdout is not None and supervisor.stdout.readline() == b"replaced\n"
    child = pid_in(tmp_path / "pid")
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    assert gone(child, 5.0)


async def test_close_lets_the_leash_go_and_nothing_else(tmp_path: Path) -> None:
    life = Lifeline()
    process = Process.spawn("child", python(TREE, tmp_path / "pid"))
    life.watch(process)
    await life.close()
    assert life.leash.describe_exit() == "exited with code 0"
    assert process.alive
    await process.stop(5)


def test_it_imports_nothing_of_ours() -> None:
    code = "import runpy, sys; sys.stdin.close(); sys.argv = ['leash']\n"
    code += f"sys.stdin = open('/dev/null'); runpy.run_path({leash.__file__!r}, run_name='__main__')\n"
    code += (
        "print(sorted(n for n in sys.modules if n.startswith('bridge') or n in ('asyncio', 'logging', 'subprocess')))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
