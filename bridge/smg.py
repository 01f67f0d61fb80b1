"""`python -m bridge.smg serve …`: the installed `smg serve`, with our headless launcher for SGLang's zmq mode.

smg starts the peer's launcher for `--backend sglang --connection-mode zmq`; here it starts `bridge.headless` with the same
arguments. Everything else is smg's own: the command line, the other backends and modes, the router. Read against 1.13.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from bridge.supervisor.errors import UsageError

PEER = "smg_grpc_servicer.sglang.headless"
OURS = ("bridge.headless", "--engine", "sglang")
BACKEND = "sglang"

RENAMED = (("data_parallel_size", "dp_size"), ("tensor_parallel_size", "tp_size"))
"""(what smg 1.13.0 reads, what SGLang 0.5.23's parser calls it): without it `smg serve` ends with an AttributeError."""

USAGE = """usage: python -m bridge.smg serve --backend sglang --connection-mode zmq --model-path MODEL [smg and SGLang flags]

Runs the installed `smg serve`, which then starts SGLang by `python -m bridge.headless --engine sglang`. smg, SGLang and
headless-bridge share this Python; BRIDGE_ENGINE_PYTHON names another one for the engine."""


def our_command(command: Sequence[str]) -> list[str]:
    """smg's command line for a headless SGLang with our launcher in it; raises `UsageError` for one we do not know."""
    if list(command).count(PEER) != 1:
        raise UsageError(f"this smg starts SGLang by {' '.join(command)}, in which we know no place for our launcher")
    place = list(command).index(PEER)
    return [*command[:place], *OURS, *command[place + 1 :]]


def replaced(launcher: type[Any]) -> type[Any]:
    """smg's launcher of SGLang workers, headless by our launcher. Raises `UsageError` when it lacks what we replace."""
    if not callable(getattr(launcher, "_build_zmq_command", None)):
        raise UsageError("this smg's launcher of SGLang workers has no zmq command to replace; 1.13.0 is known to work")

    class Launcher(launcher):  # type: ignore[misc]
        def _build_zmq_command(self, *arguments: Any, **named: Any) -> list[str]:
            return our_command(super()._build_zmq_command(*arguments, **named))

    return Launcher


def parsed(parse: Callable[..., Any], argv: Sequence[str] | None = None) -> Any:
    """smg's (backend, arguments, backend arguments), with what it reads where SGLang's parser has other names for it."""
    backend, arguments, rest = parse(argv)
    for read, called in RENAMED:
        if not hasattr(arguments, read) and hasattr(arguments, called):
            setattr(arguments, read, getattr(arguments, called))
    return backend, arguments, rest


def prepare(serve: ModuleType) -> None:
    """Put our launcher in the place of the peer's in `smg.serve`; raises `UsageError`."""
    launchers = getattr(serve, "BACKEND_LAUNCHERS", None)
    if not isinstance(launchers, Mapping) or BACKEND not in launchers:
        raise UsageError("this smg has no table of launchers with SGLang in it; 1.13.0 is known to work")
    serve.BACKEND_LAUNCHERS = {**launchers, BACKEND: replaced(launchers[BACKEND])}  # type: ignore[attr-defined]
    serve.parse_serve_args = partial(parsed, serve.parse_serve_args)  # type: ignore[attr-defined]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; 2 for wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] != ["serve"]:
        print(USAGE, file=sys.stdout if given[:1] in (["--help"], ["-h"]) else sys.stderr)
        return 0 if given[:1] in (["--help"], ["-h"]) else 2
    try:
        try:
            serve = import_module("smg.serve")
        except ImportError as error:
            raise UsageError(f"smg is not installed in {sys.executable}: pip install smg ({error})") from None
        prepare(serve)
    except UsageError as error:
        print(f"headless-bridge: {error.reason}", file=sys.stderr)
        return error.exit_code
    serve.serve_main(given[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
