"""`python -m bridge.headless`: an engine, headless and supervised, that dials somebody else's handshake.

For gateways that bind the handshake themselves (SMG's zmq mode). The engine gets what it gets under `serve`: its own
session, the leash, a parent-death signal, its log relayed, one clean stop. Nothing is served here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from bridge.flags import LOGGING, Flag, describe, resolve, seconds
from bridge.supervisor.engine_run import STOP_GRACE_S
from bridge.supervisor.engines import LaunchSpec, find_python, launcher, only_installed
from bridge.supervisor.errors import EXIT_REQUESTED, StartError, SupervisorError, UsageError, tell
from bridge.supervisor.lifeline import Lifeline
from bridge.supervisor.logs import RELAYED, configure
from bridge.supervisor.process import Process
from bridge.supervisor.ready import Progress, StartPhase

PROBE_INTERVAL_S = 0.25
LAST_LINES_S = 0.3
"""For the last log lines of an engine that just ended."""
TIMEOUT_FLAG = "handshake-timeout"

HELP = """usage: python -m bridge.headless [--engine ENGINE] --zmq-handshake-address ADDRESS [flags] [any engine flag]

Starts ENGINE headless so that it dials ADDRESS, where a gateway listens. Arguments that are not listed here, and all
after `--`, go to the engine as they are, its model included (MODEL first, --model M or --model-path M). --engine may be
left out where one engine is installed; the simulated one must be named.

  python -m bridge.headless --engine vllm --zmq-handshake-address tcp://127.0.0.1:29550 ./model --max-model-len 4096

flags:
"""


def index(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise ValueError("must be a rank from 0 to 65535")
    return value


FLAGS = (
    Flag("engine", "", "the engine to start", metavar="ENGINE"),
    Flag("zmq-handshake-address", "", "where the gateway's handshake listens", metavar="ADDRESS"),
    Flag(
        "zmq-engine-index",
        0,
        "the engine's identity; on vLLM its data-parallel start rank: one rank runs here, or --data-parallel-size-local",
        index,
        "N",
    ),
    Flag(TIMEOUT_FLAG, 60.0, "longest wait for somebody to listen at the address", seconds, "S"),
    Flag("engine-python", "", "Python interpreter the engine is installed in (default: this one)", metavar="PATH"),
    *LOGGING,
)

_log = logging.getLogger("bridge.headless")
_relayed = logging.getLogger(RELAYED)


@dataclass(frozen=True)
class Endpoint:
    """An address that engines dial."""

    text: str
    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """`tcp://HOST:PORT` or `ipc://PATH`; raises `UsageError`."""
        if text.startswith("ipc://") and len(text) > len("ipc://"):
            return cls(text, path=text.removeprefix("ipc://"))
        host, _, port = text.removeprefix("tcp://").rpartition(":")
        if not text.startswith("tcp://") or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(f"--zmq-handshake-address {text!r} is no address; give tcp://HOST:PORT")
        return cls(text, host=host.strip("[]"), port=int(port))

    async def answers(self, limit_s: float) -> bool:
        """Whether somebody listens there now."""
        try:
            async with asyncio.timeout(limit_s):
                if self.path:
                    _, writer = await asyncio.open_unix_connection(self.path)
                else:
                    _, writer = await asyncio.open_connection(self.host, self.port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True


class Headless:
    """One engine behind somebody else's handshake."""

    def __init__(self, engine: str, spec: LaunchSpec, endpoint: Endpoint, *, timeout_s: float) -> None:
        self._launcher = launcher(engine)
        self._launch = self._launcher.launch(spec, endpoint.text)
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._stop = asyncio.Event()
        self._process: Process | None = None

    async def run(self) -> int:
        """Until a stop is asked for; returns 0 then. Raises `SupervisorError` when nobody listens or the engine ends."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        async with contextlib.AsyncExitStack() as owned:
            stop = asyncio.ensure_future(self._stop.wait())
            running = asyncio.ensure_future(self._run(owned))
            await asyncio.wait({stop, running}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            running.cancel()
            stop.cancel()
            await asyncio.gather(running, return_exceptions=True)
        _log.info("stopped")
        return EXIT_REQUESTED

    async def _run(self, owned: contextlib.AsyncExitStack) -> None:
        await self._wait_for_listener()
        lifeline = Lifeline()
        owned.push_async_callback(lifeline.close)
        name = self._launcher.name
        process = self._process = Process.spawn(
            name,
            self._launch.argv,
            env={**self._launch.environment, **os.environ},
            parent_death=signal.SIGTERM,
            on_line=lambda line: _relayed.info("[%s] %s", name, line),
        )
        lifeline.watch(process)
        owned.push_async_callback(process.stop, STOP_GRACE_S)
        _log.info("started %s, process %d, to dial %s", name, process.pid, self._endpoint.text)
        progress = Progress(name, process, timeout_s=0, ceiling_s=0)
        showing = asyncio.ensure_future(progress.show(lambda phase, elapsed_s: self._look(process, progress, showing)))
        owned.callback(showing.cancel)
        await process.exited.wait()
        showing.cancel()
        await process.outputs_read(LAST_LINES_S)
        raise SupervisorError(
            f"{name} {process.describe_exit()}, {progress.elapsed_s:.0f} s after its start, though nobody stopped it",
            process.tail,
        )

    async def _wait_for_listener(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout_s
        told = False
        while not await self._endpoint.answers(max(end - loop.time(), PROBE_INTERVAL_S)):
            if loop.time() >= end:
                raise StartError(
                    f"nobody listens at the handshake address {self._endpoint.text} after {self._timeout_s:g} s: start the "
                    f"gateway, correct the address, or wait longer with --{TIMEOUT_FLAG}"
                )
            if not told:
                told = True
                _log.info("nobody listens at %s yet; waiting %g s for it", self._endpoint.text, self._timeout_s)
            await asyncio.sleep(PROBE_INTERVAL_S)

    def _look(self, process: Process, progress: Progress, showing: asyncio.Task[None]) -> None:
        """Stop showing progress once the engine has dialled: the gateway's own log tells the rest."""
        if not _dialled(process.members(), self._endpoint.port):
            return
        progress.advance(StartPhase.LOADING)
        _log.info("%s dialled %s after %.1f s", process.name, self._endpoint.text, progress.elapsed_s)
        showing.cancel()

    def _on_signal(self, number: signal.Signals) -> None:
        """The first asks for the stop, another kills the engine."""
        if not self._stop.is_set():
            _log.info("stopping: %s asked for it", number.name)
            self._stop.set()
        elif self._process is not None:
            self._process.kill()


def _dialled(pids: Sequence[int], port: int) -> bool:
    """Whether one of the processes is connected to that TCP port, or to any unix socket.

    The handshake may be over between two looks; its data sockets, ipc where engine and gateway share a machine, stay.
    """
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(pid).net_connections(kind="all"):
                if connection.family == socket.AF_UNIX and connection.type == socket.SOCK_STREAM:
                    return True
                if connection.status == psutil.CONN_ESTABLISHED and connection.raddr.port == port:
                    return True
    return False


def run(arguments: Sequence[str]) -> int:
    """Parse the command line and run it; raises `SupervisorError`."""
    values = resolve(FLAGS, arguments, os.environ, "")
    engine = launcher(values["engine"]) if values["engine"] else only_installed()
    if not values["zmq_handshake_address"]:
        raise UsageError("--zmq-handshake-address is missing: whom shall the engine dial?")
    endpoint = Endpoint.parse(values["zmq_handshake_address"])
    model, engine_arguments = engine.split_model(values.rest)
    python = find_python(engine, values["engine_python"] or None)
    spec = LaunchSpec(python=python, model=model, args=tuple(engine_arguments), first_rank=values["zmq_engine_index"])
    engine.check(spec)
    configure(values["log_level"], values["log_format"])
    headless = Headless(engine.name, spec, endpoint, timeout_s=values["handshake_timeout"])
    return asyncio.run(headless.run())


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 stopped on request, 1 failed, 2 wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or "--help" in given or "-h" in given:
        print(HELP + describe(FLAGS))
        return EXIT_REQUESTED
    try:
        return run(given)
    except SupervisorError as error:
        return tell(error)


if __name__ == "__main__":
    sys.exit(main())
