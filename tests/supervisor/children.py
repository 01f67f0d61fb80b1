"""Small real child processes, to show what the supervisor does with processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

TREE = """
import subprocess, sys, time
inner = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
subprocess.Popen([sys.executable, '-I', '-S', '-c', inner, sys.argv[1]], stdout=sys.stdout)
print('up', flush=True)
time.sleep(60)
"""
"""A leader with one child of its own, whose pid goes to the file named by the argument."""

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
time.sleep(60)
"""
"""Ignores SIGTERM."""


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]


def lives(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def gone(pid: int, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while lives(pid):
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.02)
    return True


def pid_in(file: Path, within_s: float = 10.0) -> int:
    """The pid that a child wrote to `file`."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if file.exists() and (text := file.read_text()):
            return int(text)
        time.sleep(0.02)
    raise AssertionError(f"{file} was not written within {within_s} s")
