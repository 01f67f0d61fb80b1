"""How each engine is launched: one `Launcher` an engine, found by name.

A launcher is data and small functions. It never imports its engine and starts nothing.

    spec = LaunchSpec(python=…, model=…, args=…)
    launch = launcher(NAME).launch(spec, "tcp://127.0.0.1:41234")      # argv, environment defaults, ranks
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol

from bridge.supervisor.errors import UsageError

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
"""Engines this bridge can launch: the modules of this package, each with a `LAUNCHER`."""

PROBE_LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """What to launch. `args` are the engine's own, without the model.

    `first_rank` None launches the whole data-parallel group here (`serve`); a number launches the part that starts at
    that rank, for somebody else's handshake (`bridge.headless`).
    """

    python: str
    model: str | None
    args: tuple[str, ...]
    first_rank: int | None = None


@dataclass(frozen=True)
class Launch:
    """A command line, environment variables to set where the user has not, and the global ranks that will dial."""

    argv: list[str]
    first_rank: int = 0
    rank_count: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


class Launcher(Protocol):
    """One engine. `package` is the import name that shows it is installed, None when it is part of the bridge."""

    name: str
    package: str | None
    install: str
    """The command that installs it."""

    def split_model(self, args: Sequence[str]) -> tuple[str | None, list[str]]:
        """Take the model argument, in each form users write it, out of the engine's arguments."""
        ...

    def check(self, spec: LaunchSpec) -> None:
        """Raises `UsageError` for arguments that cannot work, before anything is bound or started."""
        ...

    def launch(self, spec: LaunchSpec, handshake: str) -> Launch:
        """The engine, headless, dialling `handshake`; raises `UsageError` for an address it cannot dial."""
        ...

    def companion(self, spec: LaunchSpec) -> list[str]:
        """The one-shot that prints the facts as one line of JSON, the only one on its standard output."""
        ...

    def resident(self, spec: LaunchSpec, socket: str) -> list[str] | None:
        """The companion that prints the facts and then checks constraints on the unix socket at that path.

        None for an engine without one.
        """
        ...

    def vital(self, title: str) -> bool:
        """Whether a process of the tree, by its command line, is one the engine cannot live without once it is up."""
        ...


def launcher(name: str) -> Launcher:
    """Raises `UsageError` for an unknown engine."""
    if name not in NAMES:
        raise UsageError(f"unknown engine {name!r}; this bridge knows: {', '.join(NAMES)}")
    found: Launcher = import_module(f"bridge.supervisor.engines.{name}").LAUNCHER
    return found


def find_python(engine: Launcher, override: str | None) -> str:
    """The interpreter to run the engine in: `override`, else this one. Raises `UsageError` if the engine is not there.

    Looks the package up without importing it.
    """
    if override:
        python = _executable(override)
        _probe(engine, python)
        return python
    if engine.package is not None and not installed(engine):
        raise UsageError(
            f"{engine.name} is not installed in {sys.executable}: {engine.install}, "
            "or name the interpreter that has it with --engine-python"
        )
    return sys.executable


def installed(engine: Launcher) -> bool:
    """Whether this interpreter could import the engine."""
    return engine.package is not None and importlib.util.find_spec(engine.package) is not None


def only_installed() -> Launcher:
    """The one real engine in this interpreter; raises `UsageError` when there is none, or a choice.

    An engine that is part of the bridge (the simulated one) never counts: it is everywhere, and serving it by accident
    would look like success.
    """
    found = [engine for engine in map(launcher, NAMES) if installed(engine)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"no engine is installed in {sys.executable}; name one with --engine: {', '.join(NAMES)}")
    raise UsageError(f"several engines are installed here; choose with --engine: {', '.join(e.name for e in found)}")


def _executable(path: str) -> str:
    found = shutil.which(os.path.expanduser(path))
    if found is None:
        raise UsageError(f"--engine-python {path} is no program that can be run")
    return os.path.abspath(found)  # not its real path: a virtual environment's python is a link


def _probe(engine: Launcher, python: str) -> None:
    """Ask the other interpreter what it can import."""
    names = [name for name in ("bridge", engine.package) if name]
    code = "import importlib.util as u,sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"
    try:
        done = subprocess.run(
            [python, "-c", code, *names], capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--engine-python {python} does not run: {error}") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise UsageError(f"--engine-python {python} is no working Python: {last[0]}")
    missing = done.stdout.split()
    if engine.package in missing:
        raise UsageError(f"{engine.name} is not installed in {python}: {engine.install}")
    if "bridge" in missing:
        raise UsageError(
            f"headless-bridge is not installed in {python}; its companion runs there, so install it there too"
        )
