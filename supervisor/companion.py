"""Runs the one-shot companion in the engine's Python and reads the facts it prints."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence

import msgspec

from bridge import __version__
from bridge.supervisor.errors import StartError
from bridge.supervisor.lifeline import Lifeline
from bridge.supervisor.process import Process
from bridge.wire.companion import Facts

STOP_GRACE_S = 2.0
OUTPUT_LIMIT_S = 5.0
"""For the rest of its output once it has exited."""


async def read_facts(
    engine: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    lifeline: Lifeline,
    on_line: Callable[[str], None],
) -> Facts:
    """Run `argv` to its end; `on_line` gets its log. Cancelling it stops the process.

    Raises `StartError` with the companion's last log lines when it fails, prints no facts, or is of another version.
    """
    process = Process.spawn(
        f"{engine} companion", argv, env=env, parent_death=signal.SIGTERM, capture=True, on_line=on_line
    )
    lifeline.watch(process)
    try:
        await process.exited.wait()
        await process.outputs_read(OUTPUT_LIMIT_S)
    finally:
        await process.stop(STOP_GRACE_S)
        lifeline.forget(process)
    if process.returncode != 0:
        raise StartError(_failure(engine, argv[0], process), list(process.tail)[:-1])
    lines = bytes(process.captured).strip().splitlines()
    try:
        facts = msgspec.json.decode(lines[-1] if lines else b"", type=Facts)
    except msgspec.MsgspecError as error:
        raise StartError(f"the companion of {engine} printed no facts: {error}", process.tail) from None
    if facts.bridge_version != __version__:
        raise StartError(
            f"{argv[0]} has headless-bridge {facts.bridge_version}, this is {__version__}: "
            f"install headless-bridge=={__version__} there too"
        )
    return facts


def _failure(engine: str, python: str, process: Process) -> str:
    if any("No module named 'bridge'" in line for line in process.tail):
        return f"headless-bridge is not installed in {python}: install headless-bridge=={__version__} there too"
    last = f": {process.tail[-1]}" if process.tail else ""
    return f"the companion of {engine} {process.describe_exit()}{last}"
