"""`headless-bridge doctor`: what is installed, what would run, and what would stand in the way."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from bridge import __version__
from bridge.flags import SERVE, Values, folders_of, resolve, without_meaning
from bridge.supervisor.engines import NAMES, LaunchSpec, find_python, installed, launcher
from bridge.supervisor.errors import SupervisorError
from bridge.supervisor.listeners import BoundListener, bind_metrics, bind_tcp, bind_unix
from bridge.supervisor.state import StateFolder
from bridge.wire.redaction import redacted_command

PACKAGES = (
    "msgspec",
    "pyzmq",
    "ngh2",
    "uvloop",
    "protobuf",
    "smg-grpc-proto",
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "tokenizers",
    "psutil",
)
GROUPS = ("vllm.general_plugins", "sglang.srt.plugins")
"""Entry-point groups through which engines load our code."""

HELP = """usage: headless-bridge doctor [ENGINE [MODEL] [flags as for serve]]

Shows versions, installed engines and the layouts known for them, sockets and memory, and with ENGINE also where each
flag's value comes from and the command that would run. Starts nothing. Exit code 1 when something is in the way.
"""


class Report:
    """Rows of text under headings; `problems` counts the rows that say something is in the way."""

    def __init__(self) -> None:
        self.problems = 0

    def heading(self, text: str) -> None:
        print(f"\n{text}")

    def row(self, name: str, value: str, note: str = "") -> None:
        print(f"  {name:<26} {value:<34} {note}".rstrip())

    def problem(self, name: str, text: str) -> None:
        self.problems += 1
        print(f"  {name:<26} PROBLEM: {text}")


def main(arguments: Sequence[str]) -> int:
    """Print the report; returns 1 when something is in the way, else 0."""
    if "--help" in arguments or "-h" in arguments:
        print(HELP)
        return 0
    report = Report()
    print(f"headless-bridge {__version__} on {platform.python_implementation()} {platform.python_version()}")
    _versions(report)
    _engines(report)
    _machine(report)
    if arguments:
        _would_run(report, arguments[0], resolve(SERVE, arguments[1:], os.environ, arguments[0]))
    print(f"\n{report.problems} problem(s)" if report.problems else "\nnothing in the way")
    return 1 if report.problems else 0


def _versions(report: Report) -> None:
    report.heading("packages")
    report.row("interpreter", sys.executable)
    for name in PACKAGES:
        try:
            report.row(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            report.problem(name, "not installed; reinstall headless-bridge")


def _engines(report: Report) -> None:
    from bridge.wire.vllm.layouts import TABLE

    report.heading("engines in this interpreter")
    for name in NAMES:
        engine = launcher(name)
        if engine.package is None:
            report.row(name, "part of the bridge")
        elif installed(engine):
            report.row(name, _version(engine.package))
        else:
            report.row(name, "not installed", engine.install)
    report.heading("layouts")
    known = [".".join(map(str, version)) for version in sorted(TABLE)]
    report.row("vllm", f"table for {known[0]} to {known[-1]}", "the installed engine's own declaration wins")
    report.heading("entry points")
    for group in GROUPS:
        names = [point.name for point in metadata.entry_points(group=group)]
        report.row(group, ", ".join(names) or "none")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "installed, without package metadata"


def _machine(report: Report) -> None:
    report.heading("machine")
    report.row("processors", str(os.cpu_count()))
    try:
        usage = shutil.disk_usage("/dev/shm")
        report.row("/dev/shm free", f"{usage.free / 2**20:.0f} MiB")
        if usage.free < 64 << 20:
            report.problem("/dev/shm", "under 64 MiB free; engines pass tensors between their processes through it")
    except OSError:
        report.row("/dev/shm", "not on this system")


def _would_run(report: Report, name: str, values: Values) -> None:
    report.heading("flags")
    for flag in SERVE:
        shown = values[flag.key]
        report.row(
            f"--{flag.name}", str(shown) if shown not in ("", (), None) else "-", f"from {values.sources[flag.key]}"
        )
    for line in without_meaning(os.environ, name):
        report.row("ignored", line)
    report.heading("sockets")
    checks = [("gRPC listener", _listener), ("state folder", _state)]
    if values["metrics_port"] is not None:
        checks.insert(1, ("metrics listener", _metrics))
    for label, check in checks:
        try:
            report.row(label, check(values))
        except SupervisorError as error:
            report.problem(label, error.reason)
    report.heading("would run")
    try:
        engine = launcher(name)
        model, rest = engine.split_model(values.rest)
        python = find_python(engine, values["engine_python"] or None)
        port = values["handshake_port"] or "PORT"
        spec = LaunchSpec(python=python, model=model, args=tuple(rest))
        engine.check(spec)
        launch = engine.launch(spec, f"tcp://127.0.0.1:{port}")
        print("  " + shlex.join(redacted_command(launch.argv)))
        print("  " + shlex.join(redacted_command(engine.companion(spec))))
        report.row("ranks", f"{launch.rank_count} from {launch.first_rank}")
    except SupervisorError as error:
        report.problem(name, error.reason)


def _listener(values: Values) -> str:
    return _free(bind_unix(Path(values["uds"])) if values["uds"] else bind_tcp(values["host"], values["port"]))


def _metrics(values: Values) -> str:
    return _free(bind_metrics(values["metrics_host"], values["metrics_port"]))


def _free(bound: BoundListener) -> str:
    try:
        return f"{bound.address} is free" + ("" if bound.loopback else "; other machines can reach it")
    finally:
        bound.close()


def _state(values: Values) -> str:
    state = StateFolder.open(*folders_of(values))
    try:
        return f"{state.path} can be made and locked"
    finally:
        state.close()
