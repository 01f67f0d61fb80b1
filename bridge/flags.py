"""Our command-line flags as one table: name, environment form, the peer's variable it falls back to, default, help.

The value of a flag comes from, in order: the command line, `BRIDGE_<FLAG>`, the peer servicer's variable for the engine
(`facts` of existing manifests), the default. Every other argument, and all after `--`, belongs to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.supervisor.errors import UsageError


def seconds(text: str) -> float:
    value = float(text)
    if value < 0:
        raise ValueError("must be 0 or more seconds")
    return value


def some_seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("must be more than 0 seconds")
    return value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be 1 or more")
    return value


def port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise ValueError("must be a port from 0 to 65535 (0 takes a free one)")
    return value


def level(text: str) -> str:
    value = text.lower()
    if value not in ("debug", "info", "warning", "error"):
        raise ValueError("must be debug, info, warning or error")
    return value


def log_format(text: str) -> str:
    if text not in ("text", "json"):
        raise ValueError("must be text or json")
    return text


def rate(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("must be 0 or more tokens a second; 0 is no extension")
    return value


def restart(text: str) -> str:
    if text not in ("never", "on-failure", "always"):
        raise ValueError("must be never, on-failure or always")
    return text


def warm_up(text: str) -> str:
    if text == "full" or ":" in text or text.isdigit():
        raise ValueError("is not supported: a warm-up is off or fast (one token)")
    if text not in ("off", "fast"):
        raise ValueError("must be off or fast")
    return text


@dataclass(frozen=True)
class Flag:
    """One flag. `parse` raises ValueError with what the value must be. `peer` is a variable name with E for the engine."""

    name: str
    default: Any
    help: str
    parse: Any = str
    metavar: str = "VALUE"
    peer: str = ""
    repeatable: bool = False

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def env(self) -> str:
        return "BRIDGE_" + self.key.upper()


@dataclass(frozen=True)
class Values:
    """Resolved flags: `values` and where each came from, by key; `rest` are the engine's arguments."""

    values: dict[str, Any]
    sources: dict[str, str]
    rest: list[str] = field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


LISTEN = (
    Flag("host", "127.0.0.1", "address the gRPC listener binds", metavar="ADDRESS"),
    Flag("port", 50051, "port the gRPC listener binds; 0 takes a free one", port, "PORT"),
    Flag(
        "admin-bind",
        "",
        "serve methods for administrators (flush, profile, pause, sleep, adapters) here only: HOST:PORT or unix:PATH",
        metavar="ADDRESS",
    ),
    Flag("uds", "", "serve on this unix socket instead of a port", metavar="PATH"),
)
CONTRACT = (
    Flag("served-model-name", "", "model name reported to gateways (default: the model argument)", metavar="NAME"),
    Flag(
        "contract",
        (),
        "gRPC contract to serve (repeatable; default: the engine's own)",
        metavar="NAME",
        repeatable=True,
    ),
    Flag("max-in-flight", 16384, "requests in flight before new ones are refused", positive, "N"),
)
TLS = (
    Flag("tls-cert", "", "serve TLS with this certificate chain (PEM)", metavar="FILE"),
    Flag("tls-key", "", "private key of --tls-cert (PEM; default: in the same file)", metavar="FILE"),
    Flag("tls-client-ca", "", "serve only clients with a certificate of this authority (PEM)", metavar="FILE"),
)
LIMITS = (
    Flag("max-message-mib", 64, "largest gRPC message accepted", positive, "MIB"),
    Flag(
        "max-buffered-mib", 512, "requests still arriving, all together; one connection may hold half", positive, "MIB"
    ),
    Flag("max-connections", 1024, "client connections; at the limit an idle one gives way", positive, "N"),
    Flag("max-streams-per-connection", 4096, "calls a connection may have open", positive, "N"),
    Flag("max-header-kib", 16, "largest metadata of a call", positive, "KIB"),
    Flag("max-resets-per-sec", 500, "calls a client may cancel on and on; all open ones at once too", positive, "N"),
    Flag("request-secs", 120.0, "longest a request may take to arrive", some_seconds, "S"),
    Flag("slow-reader-secs", 60.0, "longest a client may read nothing of what waits for it", some_seconds, "S"),
    Flag("keepalive-secs", 60.0, "silence of a client before it is pinged", some_seconds, "S"),
    Flag("keepalive-timeout-secs", 20.0, "silence after the ping before it is dropped", some_seconds, "S"),
    Flag("idle-connection-secs", 0.0, "a connection without calls is closed after this; 0 keeps it", seconds, "S"),
)
STATE = (
    Flag("state-dir", "", "private folder for sockets and state (default: a new one a run)", metavar="FOLDER"),
    Flag(
        "socket-dir",
        "",
        "private folder in which a run's new folder is made (default: a system one)",
        metavar="FOLDER",
        peer="SMG_ZMQ_SOCKET_DIR",
    ),
    Flag(
        "drain-secs", 5.0, "how long streams may finish after a stop signal", seconds, "S", "SMG_E_SERVICER_DRAIN_SECS"
    ),
)
LIFE = (
    Flag("restart", "on-failure", "an engine that ends is started again: never, on-failure, always", restart, "WHEN"),
    Flag("restart-limit", 5, "with on-failure: restarts in --restart-window-secs before the run ends", positive, "N"),
    Flag("restart-window-secs", 600.0, "restarts this long ago are forgotten", some_seconds, "S"),
    Flag("restart-delay-secs", 1.0, "before the first restart; each more waits twice as long", seconds, "S"),
    Flag("restart-max-delay-secs", 60.0, "the longest of those waits", seconds, "S"),
    Flag("liveness-secs", 5.0, "between calls that the engine's loop has to answer; 0 for none", seconds, "S"),
    Flag(
        "silence-secs",
        300.0,
        "an engine with work that answers nothing this long is dead",
        some_seconds,
        "S",
        "SMG_E_SERVICER_SILENCE_TIMEOUT_SECS",
    ),
    Flag(
        "prefill-tokens-per-sec",
        2000.0,
        "prompt tokens that wait extend --silence-secs at this rate; 0 for no extension",
        rate,
        "N",
        "SMG_E_SERVICER_PREFILL_TOKENS_PER_SEC",
    ),
    Flag(
        "warmup",
        "fast",
        "before serving: off, or fast (one token of every rank)",
        warm_up,
        "LEVEL",
        "SMG_E_SERVICER_WARMUP",
    ),
    Flag("upgrade-drain-secs", 600.0, "how long streams of a replaced front end may go on", seconds, "S"),
    Flag("stop-secs", 25.0, "the whole of a stop, --drain-secs included", some_seconds, "S"),
)
METRICS = (
    Flag(
        "metrics-port",
        None,
        "port of metrics and probes, over HTTP; 0 takes a free one (default: none)",
        port,
        "PORT",
        "SMG_E_SERVICER_METRICS_PORT",
    ),
    Flag(
        "metrics-host",
        "127.0.0.1",
        "address of the metrics listener",
        metavar="ADDRESS",
        peer="SMG_E_SERVICER_METRICS_HOST",
    ),
)
LOGGING = (
    Flag("log-level", "info", "debug, info, warning or error", level, "LEVEL"),
    Flag("log-format", "text", "text or json", log_format, "FORMAT"),
)
SERVE = (
    *LISTEN,
    *TLS,
    *CONTRACT,
    *LIMITS,
    *STATE,
    Flag("engine-python", "", "Python interpreter the engine is installed in (default: this one)", metavar="PATH"),
    Flag(
        "handshake-port", 0, "port the engine dials; 0 takes a free one", port, "PORT", "SMG_E_SERVICER_HANDSHAKE_PORT"
    ),
    Flag(
        "startup-timeout-secs",
        1800.0,
        "longest wait for a sign of life from a starting engine",
        seconds,
        "S",
        "SMG_E_SERVICER_STARTUP_TIMEOUT_SECS",
    ),
    Flag(
        "startup-ceiling-secs",
        14400.0,
        "the most a start may take however alive; 0 is no limit",
        seconds,
        "S",
        "SMG_E_SERVICER_STARTUP_CEILING_SECS",
    ),
    *LIFE,
    *METRICS,
    *LOGGING,
)
RELOAD = (STATE[0], STATE[1])
ATTACH = (
    *LISTEN,
    *TLS,
    *CONTRACT,
    *LIMITS,
    *STATE,
    Flag("listen-handshake", "tcp://127.0.0.1:29550", "address the engine dials", metavar="TCP_ADDRESS"),
    Flag("data-parallel-size", 1, "ranks that will dial", positive, "N"),
    *METRICS,
    *LOGGING,
)
FRONT_END = ("max_in_flight", "admin_bind", *(flag.key for flag in (*TLS, *LIMITS, *LOGGING)))
"""Keys of the flags that a front end under a supervisor is told."""

WITHOUT_MEANING = {
    "SMG_E_SERVICER_WORKER_THREADS": "one thread serves everything here",
    "SMG_E_SERVICER_KV_EVENTS": "the engine's KV publisher stays as its own arguments say",
}
"""Variables of the peer that this bridge accepts and does not need, and why."""


def without_meaning(environment: Mapping[str, str], engine: str) -> list[str]:
    """One line for each variable that is set and changes nothing here."""
    named = {name.replace("_E_", f"_{engine.upper()}_"): why for name, why in WITHOUT_MEANING.items()}
    return [f"{name} is set and ignored: {why}" for name, why in named.items() if environment.get(name)]


def resolve(flags: Sequence[Flag], arguments: Sequence[str], environment: Mapping[str, str], engine: str) -> Values:
    """Split `arguments` into our flags and the engine's, and fill in what is unset; raises `UsageError`."""
    by_option = {f"--{flag.name}": flag for flag in flags}
    given: dict[str, list[str]] = {}
    rest: list[str] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if argument == "--":
            rest.extend(arguments[position:])
            break
        option, equals, value = argument.partition("=")
        flag = by_option.get(option)
        if flag is None:
            rest.append(argument)
            continue
        if not equals:
            if position >= len(arguments):
                raise UsageError(f"{option} needs a value: {option} {flag.metavar}")
            value = arguments[position]
            position += 1
        given.setdefault(flag.key, []).append(value)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for flag in flags:
        values[flag.key], sources[flag.key] = _value(flag, given.get(flag.key), environment, engine)
    return Values(values, sources, rest)


def folders_of(values: Values) -> tuple[Path | None, Path | None]:
    """The state folder that was asked for, and where to make one otherwise; None is the default of either."""
    state, base = values["state_dir"], values["socket_dir"]
    return Path(state) if state else None, Path(base) if base else None


def _value(flag: Flag, given: list[str] | None, environment: Mapping[str, str], engine: str) -> tuple[Any, str]:
    if given is not None:
        texts, source = given, f"--{flag.name}"
    elif environment.get(flag.env):
        texts, source = _split(flag, environment[flag.env]), flag.env
    else:
        peer = flag.peer.replace("_E_", f"_{engine.upper()}_")
        if not peer or not environment.get(peer):
            return flag.default, "default"
        texts, source = _split(flag, environment[peer]), peer
    try:
        parsed = [flag.parse(text) for text in texts]
    except ValueError as error:
        raise UsageError(f"{source} is {texts[-1]!r}: {error}") from None
    return (tuple(parsed) if flag.repeatable else parsed[-1]), source


def _split(flag: Flag, text: str) -> list[str]:
    return [part for part in text.split(",") if part] if flag.repeatable else [text]


def describe(flags: Sequence[Flag]) -> str:
    """The flags as help text: one line each, with the default and the environment form."""
    lines = []
    for flag in flags:
        default = "" if flag.default in ("", (), None) else f" [{flag.default}]"
        lines.append(f"  --{flag.name + ' ' + flag.metavar:<30} {flag.help}{default}")
    lines.append("")
    lines.append(
        "Each flag has an environment form, BRIDGE_ and its name in capitals: --max-in-flight is BRIDGE_MAX_IN_FLIGHT."
    )
    return "\n".join(lines)
