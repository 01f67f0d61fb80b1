"""SGLang's scheduler ranks without its servers, dialling a handshake. Run in SGLang's own Python:

    python -m bridge.plugins.sglang.launcher --zmq-handshake-address ADDRESS --zmq-engine-index N [SGLang arguments]

The ranks are spawned by SGLang's own spawner, with its own preparations, in which this process stands where the tokenizer
manager would. It then only waits: it ends when a rank does, and takes all of them with it. Exit code 0 after a stop signal.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from types import FrameType
from typing import Any

import psutil

from bridge.plugins.sglang.entry import ENGINE_INDEX_ENV, HANDSHAKE_ENV, PLUGIN_NAME

GROUP = "sglang.srt.plugins"
SCHEDULER_TITLE = "sglang::scheduler"
STOP_GRACE_S = 3.0
"""For the ranks between SIGTERM and SIGKILL: they say their last word and go."""
POLL_S = 0.25
"""Between two looks at the ranks where there are no pidfds."""

_log = logging.getLogger("bridge.plugins.sglang.launcher")


class LaunchError(Exception):
    """Why the ranks cannot be started; one line."""


class Stopped(BaseException):
    """A stop signal, raised wherever the main thread is."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """SIGTERM and SIGINT ask for the stop; SIGQUIT is SGLang's word for a rank that failed. Only the first one raises."""

    def __init__(self) -> None:
        self._seen = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._seen:
            self._seen = True
            raise Stopped(number)


def split(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our arguments, and SGLang's."""
    parser = argparse.ArgumentParser(prog="python -m bridge.plugins.sglang.launcher", allow_abbrev=False)
    parser.add_argument("--zmq-handshake-address", required=True)
    parser.add_argument("--zmq-engine-index", type=int, default=0)
    return parser.parse_known_args(argv)


def name_the_plugin() -> None:
    """Make sure that SGLang will load our plugin in the ranks; raises `LaunchError`."""
    if PLUGIN_NAME not in {point.name for point in entry_points(group=GROUP)}:
        raise LaunchError(
            f"headless-bridge is not among the plugins ({GROUP}) of {sys.executable}: install it there again"
        )
    chosen = os.environ.get("SGLANG_PLUGINS")
    if chosen and PLUGIN_NAME not in chosen.split(","):
        os.environ["SGLANG_PLUGINS"] = f"{chosen},{PLUGIN_NAME}"


def spawn(arguments: list[str]) -> None:
    """Spawn the ranks and wait until every one is up; raises what SGLang raises."""
    from sglang.srt.entrypoints import engine
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, prepare_server_args
    from sglang.srt.utils import configure_logger

    from bridge.plugins.sglang.hooks import missing_seams

    missing = missing_seams()
    if missing:
        raise LaunchError(f"this SGLang has no {', '.join(missing)}; known to work: 0.5.18 to 0.5.23")
    server_args = prepare_server_args(arguments)
    configure_logger(server_args)
    _prepare(server_args, engine, load_plugins)
    Signals()  # SGLang's preparations put handlers of their own in place
    init, _ = engine.Engine._launch_scheduler_processes(
        server_args, PortArgs.init_new(server_args), run_scheduler_process
    )
    init.wait_for_ready()


def _prepare(server_args: Any, engine: Any, load_plugins: Any) -> None:
    """What SGLang's engine does before it spawns; the parts that a release lacks it does elsewhere."""
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    engine._set_envs_and_config(server_args)
    load_plugins()
    server_args.check_server_args()
    resolve_parsers = getattr(engine, "resolve_auto_parsers", None)
    if resolve_parsers is not None:
        resolve_parsers(server_args)
    try:
        from sglang.srt.runtime_context import publish
    except ImportError:
        return
    publish(server_args, role="tokenizer")


def ranks() -> list[psutil.Process]:
    """The processes below this one that SGLang named."""
    return [child for child in below() if _command(child).startswith("sglang::")]


def below() -> list[psutil.Process]:
    """All processes below this one but Python's resource tracker, which ignores signals and ends when we do."""
    return [child for child in psutil.Process().children(recursive=True) if "resource_tracker" not in _command(child)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_for_an_end(watched: Sequence[psutil.Process]) -> psutil.Process:
    """The first of these processes that ends."""
    if not hasattr(os, "pidfd_open"):
        while True:
            for process in watched:
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    return process
            time.sleep(POLL_S)
    with selectors.DefaultSelector() as selector:
        for process in watched:
            try:
                selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, process)
            except ProcessLookupError:
                return process
        ended: psutil.Process = selector.select()[0][0].data
        return ended


def end_all() -> None:
    """End every process below this one. The schedulers first: they have a last word, and die at once with their parent."""
    everybody = below()
    schedulers = [one for one in everybody if _command(one).startswith(SCHEDULER_TITLE)]
    for group in (schedulers, [one for one in everybody if one not in schedulers]):
        for process in group:
            _signal(process, signal.SIGTERM)
        _, left = psutil.wait_procs(group, STOP_GRACE_S)
        for process in left:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(left, STOP_GRACE_S)


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def run(argv: Sequence[str]) -> int:
    ours, arguments = split(argv)
    os.environ[HANDSHAKE_ENV] = ours.zmq_handshake_address
    os.environ[ENGINE_INDEX_ENV] = str(ours.zmq_engine_index)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        Signals()
        name_the_plugin()
        spawn(arguments)
        watched = ranks()
        _log.info("%d processes are up", len(watched))
        ended = wait_for_an_end(watched)
        _log.error("lost process %d", ended.pid)
        return 1
    except Stopped as stop:
        if stop.number == signal.SIGQUIT:
            _log.error("a rank failed")
            return 1
        return 0
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        end_all()


if __name__ == "__main__":
    code = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left below; taking torch down in order would cost another second and a half
