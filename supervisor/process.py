"""One process of the tree: spawned in its own session, watched by pidfd, its log relayed, stopped once and whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from bridge.supervisor.errors import SupervisorError
from bridge.supervisor.leash import session_members, signal_session

TAIL_LINES = 40
"""Log lines kept for the error when a process fails; a Python traceback through an engine fits."""
MAX_LINE = 8 << 10
"""Characters of one relayed line; the rest of a longer one is cut."""
MAX_CAPTURE = 4 << 20
READ_SIZE = 64 << 10
LEFTOVER_GRACE_S = 2.0
"""For processes that outlived their leader, between SIGTERM and SIGKILL."""
KILL_WAIT_S = 5.0
REST_LIMIT_S = 5.0
"""For the rest of a captured output once the process has exited."""

_log = logging.getLogger(__name__)


class Lines:
    """Cuts a log stream into lines. A carriage return ends one too, so that progress bars are lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        *complete, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > MAX_LINE:
            complete.append(self._rest)
            self._rest = b""
        return [text for text in map(_text, complete) if text]

    def end(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [text for text in [_text(rest)] if text]


def _text(line: bytes) -> str:
    return line[:MAX_LINE].decode("utf-8", "replace").rstrip()


class Pipe:
    """The read end of a child's output: bytes go to `take` as they come; `closed` is set when no process holds it."""

    def __init__(self, fd: int, take: Callable[[bytes], None], at_end: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self.closed = asyncio.Event()
        self._fd = fd
        self._take = take
        self._at_end = at_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._readable)

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._take(data)
        else:
            self.close()

    def close(self) -> None:
        if self.closed.is_set():
            return
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self.closed.set()
        self._at_end()


class Process:
    """A child of the supervisor, the leader of its own session. Everything runs on the event loop's thread."""

    def __init__(self, name: str, child: subprocess.Popen[bytes], on_line: Callable[[str], None] | None) -> None:
        self.name = name
        self.pid = child.pid
        self.started_at = time.monotonic()
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.captured = bytearray()
        """Standard output of a process spawned with `capture`, its last `MAX_CAPTURE` bytes."""
        self.exited = asyncio.Event()
        self._line_captured = asyncio.Event()
        self._child = child
        self._on_line = on_line
        self._loop = asyncio.get_running_loop()
        self._pipes: list[Pipe] = []
        self._stopping: asyncio.Task[None] | None = None

    @classmethod
    def spawn(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
        parent_death: signal.Signals | None = None,
        relay: bool = True,
        capture: bool = False,
        on_line: Callable[[str], None] | None = None,
    ) -> Process:
        """Start `argv`. Call it on the main thread: the parent-death signal follows the thread that forked.

        `relay`: its output (standard error alone with `capture`) goes line by line to `on_line` and the tail; else it
        inherits ours. `parent_death` is sent to it when the supervisor dies. Raises `SupervisorError`.
        """
        command = list(argv)
        if parent_death is not None:
            wrapper = str(Path(__file__).with_name("parent_death.py"))
            command = [sys.executable, "-I", "-S", wrapper, str(os.getpid()), str(int(parent_death)), *command]
        try:
            child = subprocess.Popen(
                command,
                env=dict(env) if env is not None else None,
                pass_fds=pass_fds,
                stdin=stdin,
                stdout=subprocess.PIPE if relay or capture else None,
                stderr=(subprocess.PIPE if capture else subprocess.STDOUT) if relay else None,
                start_new_session=True,
            )
        except OSError as error:
            raise SupervisorError(f"cannot start {name}: {argv[0]}: {error.strerror}") from None
        process = cls(name, child, on_line)
        process._watch()
        if capture:
            process._read(child.stdout, process._capture, lambda: None)
        if relay:
            lines = Lines()
            process._read(
                child.stderr if capture else child.stdout,
                lambda data: process._relay(lines.feed(data)),
                lambda: process._relay(lines.end()),
            )
        return process

    @property
    def returncode(self) -> int | None:
        """As `subprocess` gives it: negative for a signal; None while the process lives."""
        return self._child.returncode

    @property
    def alive(self) -> bool:
        return not self.exited.is_set()

    def describe_exit(self) -> str:
        """How it ended, for a sentence after its name: `exited with code 1`, `was killed by SIGKILL`."""
        code = self._child.returncode
        if code is None:
            return "is running"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
            return f"was killed by signal {-code}"
        return f"exited with code {code}"

    async def outputs_read(self, limit_s: float) -> None:
        """Wait until all its output was read, at most `limit_s`: its descendants may hold the pipes open."""
        waits = [pipe.closed.wait() for pipe in self._pipes]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), limit_s)

    async def first_line(self) -> bytes | None:
        """The first line on its standard output, without its end; None when it exits without one. Needs `capture`."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._line_captured, self.exited)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not self._line_captured.is_set():
            await self.outputs_read(REST_LIMIT_S)
        line, end, _ = bytes(self.captured).partition(b"\n")
        return line if end else None

    def members(self) -> list[int]:
        """Pids of its session that live, itself included."""
        return session_members(self.pid)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to the leader, `grace_s`, then SIGKILL to whoever is left of its session. Once: later calls join."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop(grace_s))
        await asyncio.shield(self._stopping)

    def kill(self) -> None:
        """SIGKILL to its whole session, now; cuts a `stop` that waits short."""
        if self._stopping is None or not self._stopping.done():  # after it, the id may be somebody else's
            signal_session(self.pid, signal.SIGKILL)

    async def _stop(self, grace_s: float) -> None:
        if self.alive:
            self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.exited.wait(), grace_s)
            if self.alive:
                _log.warning("%s did not stop within %g s of SIGTERM; killing it", self.name, grace_s)
                self.kill()
        elif self.members():
            signal_session(self.pid, signal.SIGTERM)
        if not await self._empty(LEFTOVER_GRACE_S if self.returncode is not None else 0.0):
            end = time.monotonic() + KILL_WAIT_S
            while self.members() and time.monotonic() < end:
                self.kill()
                await self._empty(0.1)
            if left := self.members():
                _log.error("%s: processes %s survive SIGKILL", self.name, left)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.exited.wait(), KILL_WAIT_S)
        await self.outputs_read(0.5)
        for pipe in self._pipes:
            pipe.close()

    async def _empty(self, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while self.members():
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(0.02)
        return True

    def _watch(self) -> None:
        try:
            pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or a kernel or sandbox without pidfd
            threading.Thread(target=self._wait_in_thread, name=f"wait-{self.name}", daemon=True).start()
            return
        self._loop.add_reader(pidfd, self._on_pidfd, pidfd)

    def _on_pidfd(self, pidfd: int) -> None:
        if self._child.poll() is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
            self.exited.set()

    def _wait_in_thread(self) -> None:
        self._child.wait()
        with contextlib.suppress(RuntimeError):  # the loop may be closed by then
            self._loop.call_soon_threadsafe(self.exited.set)

    def _read(self, stream: IO[bytes] | None, take: Callable[[bytes], None], at_end: Callable[[], None]) -> None:
        assert stream is not None  # spawned with PIPE
        fd = os.dup(stream.fileno())
        stream.close()
        self._pipes.append(Pipe(fd, take, at_end))

    def _capture(self, data: bytes) -> None:
        self.captured += data
        if b"\n" in data:
            self._line_captured.set()
        del self.captured[:-MAX_CAPTURE]

    def _relay(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.tail.append(line)
            if self._on_line is not None:
                self._on_line(line)
