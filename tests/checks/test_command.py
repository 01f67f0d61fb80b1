"""The command answers at once."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

COMMAND = Path(sys.executable).with_name("headless-bridge")
LIMIT_S = 0.2
RUNS = 7


def cpu_seconds(*arguments: str) -> float:
    """User and system time of one run; waiting for a busy machine does not count."""
    process = subprocess.Popen([COMMAND, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_help_takes_less_than_200_ms() -> None:
    cpu_seconds("--help")  # the first run compiles
    assert statistics.median(cpu_seconds("--help") for _ in range(RUNS)) < LIMIT_S


def test_help_names_every_command() -> None:
    text = subprocess.run([COMMAND, "--help"], capture_output=True, text=True, check=True).stdout
    for command in ("serve", "attach", "reload", "top", "chat", "sim", "doctor"):
        assert f"headless-bridge {command}" in text
