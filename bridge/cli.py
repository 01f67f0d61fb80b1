"""`headless-bridge`: serve | attach | reload | top | chat | sim | doctor.

Nothing heavy is imported before the subcommand is known: `--help` stays under 200 ms.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bridge import __version__
from bridge.flags import ATTACH, FRONT_END, RELOAD, SERVE, Flag, Values, describe, folders_of, resolve, without_meaning
from bridge.supervisor.engines import NAMES
from bridge.supervisor.errors import EXIT_REQUESTED, SupervisorError, UsageError, tell

USAGE = f"""headless-bridge {__version__}: runs an LLM engine headless and serves it to gateways over gRPC

usage:
  headless-bridge serve ENGINE [MODEL] [flags] [any engine flag]   start an engine and serve it
  headless-bridge attach ENGINE MODEL_DIR [flags]                  serve an engine that somebody else starts
  headless-bridge reload [--state-dir FOLDER]                      replace the front end, e.g. by newly installed code
  headless-bridge top [http://HOST:PORT]                           state and load of a run, once a second
  headless-bridge chat grpc://HOST:PORT [flags]                    talk to a worker
  headless-bridge sim --zmq-handshake-address ADDRESS [flags]      a simulated engine behind anybody's gateway
  headless-bridge doctor [ENGINE [MODEL] [flags]]                  versions, layouts, ports, and what would run

engines: {", ".join(NAMES)}

`headless-bridge COMMAND --help` tells more. `python -m bridge.headless --help` runs an engine behind another handshake."""

SERVE_HELP = """usage: headless-bridge serve ENGINE [MODEL] [flags] [any engine flag] [-- engine flags]

Starts ENGINE headless, completes its handshake and serves gRPC. Arguments that are not listed here, and all after
`--`, go to the engine as they are, its model argument included.

  headless-bridge serve vllm Qwen/Qwen3-0.6B --port 50051 --max-model-len 4096
  headless-bridge serve sim --port 50051

flags:
"""

ATTACH_HELP = """usage: headless-bridge attach ENGINE MODEL_DIR [flags]

Serves an engine that somebody else starts and that dials --listen-handshake. Facts come from MODEL_DIR; the engine
does not have to be installed here.

  headless-bridge attach vllm ./SmolLM2-135M-Instruct --listen-handshake tcp://127.0.0.1:29550 --port 50051
  vllm serve ./SmolLM2-135M-Instruct --headless --data-parallel-address 127.0.0.1 --data-parallel-rpc-port 29550

flags:
"""

RELOAD_HELP = """usage: headless-bridge reload [flags]

Replaces the front end of a running `serve` by one that runs the code installed now, on the same engine and listeners;
SIGHUP to the supervisor does the same. Returns once the old front end has finished its streams.

flags:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code: 0 done or stopped on request, 1 failed, 2 wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = given.pop(0) if given else "--help"
    try:
        match command:
            case "-h" | "--help" | "help":
                print(USAGE)
                return EXIT_REQUESTED
            case "-V" | "--version":
                print(__version__)
                return EXIT_REQUESTED
            case "serve":
                return serve(given)
            case "attach":
                return attach(given)
            case "reload":
                return reload(given)
            case "top":
                from bridge.top import main as top

                return top(given)
            case "chat":
                from bridge.chat import main as chat

                return chat(given)
            case "sim":
                os.execv(sys.executable, [sys.executable, "-m", "bridge.plugins.sim", *given])
            case "doctor":
                from bridge.doctor import main as doctor

                return doctor(given)
        raise UsageError(
            f"{command!r} is no command; choose serve, attach, reload, top, chat, sim or doctor (--help tells more)"
        )
    except SupervisorError as error:
        return tell(error)
    except KeyboardInterrupt:
        return 130


def serve(arguments: list[str]) -> int:
    """`serve ENGINE [MODEL] …`: the supervisor and everything under it."""
    if asks_help(arguments):
        print(SERVE_HELP + describe(SERVE))
        return EXIT_REQUESTED
    engine, values = parse("serve", SERVE, arguments)
    import uvloop

    from bridge.contracts.names import contracts_for
    from bridge.exposure import tls_of
    from bridge.supervisor.config import WarmUpLevel
    from bridge.supervisor.liveness import LivenessLimits
    from bridge.supervisor.logs import configure
    from bridge.supervisor.policy import Restart, RestartPolicy
    from bridge.supervisor.tree import ServeConfig, Supervisor

    configure(values["log_level"], values["log_format"])
    tell_ignored(engine)
    tls_of(values.values)  # what is wrong with the files is told before anything starts
    state_dir, socket_dir = folders_of(values)
    config = ServeConfig(
        engine=engine,
        arguments=values.rest,
        engine_python=values["engine_python"],
        host=values["host"],
        port=values["port"],
        uds=Path(values["uds"]) if values["uds"] else None,
        admin_bind=values["admin_bind"],
        served_model_name=values["served_model_name"],
        contracts=contracts_for(engine, values["contract"]),
        state_dir=state_dir,
        socket_dir=socket_dir,
        handshake_port=values["handshake_port"],
        startup_timeout_s=values["startup_timeout_secs"],
        startup_ceiling_s=values["startup_ceiling_secs"],
        drain_s=values["drain_secs"],
        stop_s=values["stop_secs"],
        upgrade_drain_s=values["upgrade_drain_secs"],
        warm_up=WarmUpLevel(values["warmup"]),
        restart=RestartPolicy(
            restart=Restart(values["restart"]),
            limit=values["restart_limit"],
            window_s=values["restart_window_secs"],
            delay_s=values["restart_delay_secs"],
            max_delay_s=values["restart_max_delay_secs"],
        ),
        liveness=LivenessLimits(
            interval_s=values["liveness_secs"],
            silence_s=values["silence_secs"],
            prefill_tps=values["prefill_tokens_per_sec"],
        ),
        metrics_host=values["metrics_host"],
        metrics_port=values["metrics_port"],
        options={key: values[key] for key in FRONT_END},
    )
    return uvloop.run(Supervisor(config).run())


def attach(arguments: list[str]) -> int:
    """`attach ENGINE MODEL_DIR …`: a front end without a supervisor."""
    if asks_help(arguments):
        print(ATTACH_HELP + describe(ATTACH))
        return EXIT_REQUESTED
    engine, values = parse("attach", ATTACH, arguments)
    if len(values.rest) != 1 or values.rest[0].startswith("-"):
        raise UsageError(
            f"attach takes one model folder, not {' '.join(values.rest) or 'none'}; "
            "the engine's own flags go where the engine is started"
        )
    from bridge import attach as attached
    from bridge.supervisor.logs import configure

    configure(values["log_level"], values["log_format"])
    tell_ignored(engine)
    return attached.run(engine, values.rest[0], values)


def tell_ignored(engine: str) -> None:
    """Name the settings of another servicer that change nothing here."""
    import logging

    for line in without_meaning(os.environ, engine):
        logging.getLogger(__name__).warning("%s", line)


def reload(arguments: list[str]) -> int:
    """`reload`: a new front end beside the old one, on the same engine and listeners."""
    if "--help" in arguments or "-h" in arguments:
        print(RELOAD_HELP + describe(RELOAD))
        return EXIT_REQUESTED
    values = resolve(RELOAD, arguments, os.environ, "")
    if values.rest:
        raise UsageError(f"reload takes no {values.rest[0]}; the engine and its flags stay as they are")
    from bridge.supervisor.commands import find_folder, order

    for line in order(find_folder(*folders_of(values)), "reload"):
        print(line, flush=True)
    print("the old front end is gone")
    return EXIT_REQUESTED


def asks_help(arguments: Sequence[str]) -> bool:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return not arguments or "--help" in own or "-h" in own


def parse(command: str, flags: Sequence[Flag], arguments: list[str]) -> tuple[str, Values]:
    """The engine's name (the first argument) and the resolved flags; raises `UsageError`."""
    engine = arguments[0]
    if engine not in NAMES:
        raise UsageError(
            f"{engine!r} is no engine this bridge knows; use: headless-bridge {command} ENGINE …, "
            f"where ENGINE is {' or '.join(NAMES)}"
        )
    return engine, resolve(flags, arguments[1:], os.environ, engine)


if __name__ == "__main__":
    sys.exit(main())
