"""The supervisor's end of the leash: a pipe whose closing, by whatever death, ends every session told to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path

from bridge.supervisor.errors import SupervisorError
from bridge.supervisor.process import Process

RESTART_DELAY_S = 1.0

_log = logging.getLogger(__name__)


class Lifeline:
    """Keeps one leash process running and tells it what to end. A leash that dies is replaced and told all again."""

    def __init__(self) -> None:
        self._sessions: set[int] = set()
        self._folders: set[str] = set()
        self.leash, self._pipe = _spawn()
        self._keeper = asyncio.ensure_future(self._keep())

    def watch(self, process: Process) -> None:
        """End this process's session when the supervisor dies."""
        self._sessions.add(process.pid)
        self._tell(f"watch {process.pid}")

    def forget(self, process: Process) -> None:
        """Its session is empty: the id may be somebody else's from now on."""
        self._sessions.discard(process.pid)
        self._tell(f"forget {process.pid}")

    def remove_later(self, folder: Path) -> None:
        """Remove a folder of sockets and small files when the supervisor dies."""
        self._folders.add(str(folder))
        self._tell(f"folder {folder}")

    async def close(self) -> None:
        """Let the leash go: everything it watched has been stopped."""
        self._keeper.cancel()
        self._tell("release")
        os.close(self._pipe)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.leash.exited.wait(), 2.0)
        if self.leash.alive:
            self.leash.kill()
        await self.leash.stop(0.0)

    def _tell(self, command: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it just died; the next one is told everything
            os.write(self._pipe, f"{command}\n".encode())

    async def _keep(self) -> None:
        while True:
            await self.leash.exited.wait()
            _log.warning("the leash %s; starting another", self.leash.describe_exit())
            await self.leash.stop(0.0)
            await asyncio.sleep(RESTART_DELAY_S)
            try:
                leash, pipe = _spawn()
            except SupervisorError as error:
                _log.error("%s; trying again", error)
                continue
            os.close(self._pipe)
            self.leash, self._pipe = leash, pipe
            for sid in self._sessions:
                self._tell(f"watch {sid}")
            for folder in self._folders:
                self._tell(f"folder {folder}")


def _spawn() -> tuple[Process, int]:
    read_end, write_end = os.pipe()
    try:
        script = str(Path(__file__).with_name("leash.py"))
        return Process.spawn("leash", [sys.executable, "-I", "-S", script], stdin=read_end, relay=False), write_end
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
