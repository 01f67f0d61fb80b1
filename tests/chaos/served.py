"""`serve` with a simulated engine that answers questions past the bridge, and what its tree is made of."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from bridge.plugins.sim.control import ControlError, SimControl
from tests.running import Worker, unused_port

QUICK = ("--liveness-secs", "0.5", "--restart", "on-failure", "--restart-delay-secs", "0.2")
"""An engine that dies is back soon, and one that hangs is asked often."""


class Served(Worker):
    """`serve sim` in a folder of its own; `python` starts the supervisor, in `cwd` when it is given."""

    def __init__(
        self, folder: Path, *arguments: object, step_ms: float = 40.0, command: Sequence[str] = (sys.executable,)
    ) -> None:
        self._short = TemporaryDirectory(prefix="hb-")  # ipc paths have 107 bytes
        self.state = Path(self._short.name) / "s"
        self.control_address = f"ipc://{self._short.name}/control"
        port = unused_port()
        flags = ["--port", str(port), "--state-dir", str(self.state), "--control-address", self.control_address]
        flags += ["--step-ms", str(step_ms), "--max-num-seqs", "256", "--per-request-ms", "0"]
        super().__init__([*command, "-m", "bridge", "serve", "sim", *flags, *map(str, arguments)], port, folder / "log")

    def stop(self, timeout: float = 30.0) -> int:
        code = super().stop(timeout)
        self._short.cleanup()
        return code

    def part(self, words: str) -> psutil.Process:
        """The process whose command line holds `words`."""
        found = self.parts(words)
        assert len(found) == 1, (words, [one.pid for one in found])
        return found[0]

    def parts(self, words: str) -> list[psutil.Process]:
        found = []
        for one in self.tree():
            try:
                if words in " ".join(one.cmdline()):
                    found.append(one)
            except psutil.NoSuchProcess:
                continue
        return found

    @property
    def engine(self) -> psutil.Process:
        return self.part("bridge.plugins.sim ")

    @property
    def front_end(self) -> psutil.Process:
        return self.part("bridge.frontend")

    def engine_state(self) -> dict[str, Any]:
        """What the engine itself says it runs."""
        with SimControl(self.control_address) as control:
            return control.state()

    def fault(self, kind: str, value: float | str | None = None) -> None:
        with SimControl(self.control_address) as control:
            control.fault(kind, value)

    async def engine_is_busy(self, count: int = 33, within_s: float = 10.0) -> set[str]:
        """Until the engine has that many requests at once; their wire ids."""
        until = time.monotonic() + within_s
        while True:
            state = self.engine_state()
            ids = {*state["running_ids"], *state["waiting_ids"]}
            if len(ids) >= count:
                return ids
            assert time.monotonic() < until, f"{len(ids)} requests in the engine after {within_s} s"
            await asyncio.sleep(0.02)

    async def engine_runs(self, ids: set[str], within_s: float) -> None:
        """Until the engine has no request but those of `ids`."""
        until = time.monotonic() + within_s
        while True:
            try:
                state = self.engine_state()
                left = {*state["running_ids"], *state["waiting_ids"]} - ids
            except ControlError:
                left = {"no answer"}
            if not left:
                return
            assert time.monotonic() < until, f"still in the engine after {within_s} s: {sorted(left)[:10]}"
            await asyncio.sleep(0.05)

    def order(self, word: str, within_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """`headless-bridge WORD` to its end."""
        command = [sys.executable, "-m", "bridge", word, "--state-dir", str(self.state)]
        return subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
