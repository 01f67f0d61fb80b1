"""Watches the processes of an engine's tree that it cannot live without, so that a killed one is noticed at once.

vLLM's launcher notices the death of an engine core, and exits, up to five seconds later; a pidfd tells in a
millisecond. Linux only: elsewhere the launcher's own exit is what tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from bridge.supervisor.process import Process


class Vitals:
    """Pidfds of the vital members of one process's session, from now until `close`."""

    def __init__(self, process: Process, vital: Callable[[str], bool], on_death: Callable[[int, str], None]) -> None:
        """`vital` is asked with each member's title; `on_death(pid, title)` is called when one ends."""
        self._loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._fds: dict[int, tuple[int, str]] = {}
        for pid in process.members():
            title = _title(pid)
            if pid != process.pid and vital(title):
                with contextlib.suppress(AttributeError, OSError):  # no pidfd here, or it just ended
                    fd = os.pidfd_open(pid)
                    self._fds[fd] = (pid, title)
                    self._loop.add_reader(fd, self._ended, fd)

    @property
    def titles(self) -> list[str]:
        return [title for _, title in self._fds.values()]

    def close(self) -> None:
        for fd in list(self._fds):
            self._drop(fd)

    def _ended(self, fd: int) -> None:
        pid, title = self._drop(fd)
        self._on_death(pid, title)

    def _drop(self, fd: int) -> tuple[int, str]:
        self._loop.remove_reader(fd)
        os.close(fd)
        return self._fds.pop(fd)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""
