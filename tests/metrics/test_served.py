"""The whole tree as operators see it: figures that outlive a front end, readiness, systemd's words, `top`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.top import Series
from tests.running import Worker, unused_port

README = Path(__file__).resolve().parent.parent.parent / "README.md"


class Served(Worker):
    """`serve sim` with a metrics listener and a systemd that listens."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.state = folder / "state"
        port, self.metrics = unused_port(), unused_port()
        self.ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ear.bind(str(folder / "notify"))
        self.ear.setblocking(False)
        self.words: list[str] = []
        command = [sys.executable, "-m", "bridge", "serve", "sim", "--port", port, "--metrics-port", self.metrics]
        command += ["--restart", "on-failure"]
        environment = {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "1000000"}
        super().__init__([*command, "--state-dir", self.state, *arguments], port, folder / "log", environment)

    def probe(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def series(self) -> Series:
        return Series(self.probe("/metrics")[1], time.monotonic())

    def ask(self, tokens: int) -> None:
        params = pb.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        ids = pb.TokenizedInput(input_ids=[5, 6, 7])
        list(self.stub.Generate(pb.GenerateRequest(tokenized=ids, sampling_params=params, stream=True), timeout=60))

    def heard(self) -> list[str]:
        """Every word to systemd so far."""
        while True:
            try:
                self.words.append(self.ear.recv(4096).decode())
            except BlockingIOError:
                return self.words

    def part(self, words: str) -> int:
        return next(one.pid for one in self.tree() if words in " ".join(one.cmdline()))

    def top(self, *arguments: object) -> str:
        command = [sys.executable, "-m", "bridge", "top", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.05)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, "--restart", "on-failure", "--restart-delay-secs", 0.5) as worker:
        worker.wait_until_serving(30)
        # The front end serves a moment before the supervisor has heard of it: an engine that dies between ends the run.
        until(lambda: worker.probe("/readyz")[0] == 200)
        yield worker
    worker.ear.close()


def test_figures_outlive_a_killed_front_end(served: Served) -> None:
    served.ask(30)
    until(lambda: served.series().total("output_tokens_total") == 30)
    first = served.part("bridge.frontend")
    os.kill(first, signal.SIGKILL)
    until(lambda: served.series().by("restarts_total", "part")["front_end"] == 1)
    until(lambda: served.probe("/readyz") == (200, "ready\n"))
    assert served.part("bridge.frontend") != first
    assert served.series().total("output_tokens_total") == 30
    served.ask(5)
    until(lambda: served.series().total("output_tokens_total") == 35)
    assert served.series().by("requests_total", "finish") == {"length": 2}


def test_figures_outlive_an_upgrade_and_systemd_hears_of_it(served: Served) -> None:
    served.ask(30)
    served.process.send_signal(signal.SIGHUP)
    until(lambda: served.series().by("restarts_total", "part")["upgrade"] == 1)
    until(lambda: any("bridge.frontend" not in word and word.startswith("RELOADING=1") for word in served.heard()))
    until(lambda: served.words[-1] == "WATCHDOG=1" or bool(served.heard()))
    served.ask(5)
    until(lambda: served.series().total("output_tokens_total") == 35)
    told = [word for word in served.heard() if word != "WATCHDOG=1"]
    reload = next(index for index, word in enumerate(told) if word.startswith("RELOADING=1"))
    assert told[reload + 1].startswith("READY=1")


def test_readiness_turns_while_the_engine_is_restarted(served: Served) -> None:
    os.kill(served.part("bridge.plugins.sim"), signal.SIGKILL)
    until(lambda: served.probe("/readyz")[0] == 503, 5)
    assert served.probe("/readyz")[1].startswith("not ready: restarting")
    assert served.probe("/livez")[0] == 200, "the supervisor does what kubelet would do, only sooner"
    until(lambda: served.probe("/readyz")[0] == 200, 20)
    assert served.series().by("restarts_total", "part")["engine"] == 1


def test_systemd_hears_of_the_start_the_watchdog_and_the_stop(served: Served) -> None:
    time.sleep(1.0)
    told = served.heard()
    start = next(index for index, word in enumerate(told) if word.startswith("READY=1"))
    assert any(word.startswith("EXTEND_TIMEOUT_USEC=") for word in told[:start])
    assert told[start] == "READY=1\nSTATUS=serving sim"
    assert told.count("WATCHDOG=1") >= 2
    assert served.stop() == 0
    assert any(word.startswith("STOPPING=1\nSTATUS=SIGTERM") for word in served.heard())


def test_children_know_nothing_of_systemd(served: Served) -> None:
    for process in served.tree()[1:]:
        assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & process.environ().keys()


def test_not_ready_while_the_engine_loads(tmp_path: Path) -> None:
    with Served(tmp_path, "--load-seconds", "3") as worker:
        until(lambda: "metrics and probes on" in worker.output())
        status, why = worker.probe("/readyz")
        assert status == 503 and why.startswith("not ready: loading")
        assert worker.probe("/livez") == (200, "alive: loading\n")
        assert worker.series().only("state", "state") == "loading"
        worker.wait_until_serving(30)
        until(lambda: worker.probe("/readyz")[0] == 200)
    worker.ear.close()


def test_top_reads_the_listener_and_the_state_folder(served: Served) -> None:
    served.ask(30)
    until(lambda: served.series().total("output_tokens_total") == 30)
    for where in ([f"127.0.0.1:{served.metrics}"], ["--state-dir", served.state]):
        shown = served.top(*where, "--count", 2, "--interval-secs", 0.2)
        assert "sim · serving" in shown.splitlines()[0]
        assert "ended      1 length" in shown and "rank        running  waiting" in shown


def test_the_readme_lists_every_family_and_no_other(served: Served) -> None:
    shown = set(re.findall(r"^# TYPE headless_bridge_(\w+)", served.probe("/metrics")[1], re.MULTILINE))
    table = re.findall(r"^\| (`.*?) \|", README.read_text().partition("## Operating it")[2], re.MULTILINE)
    listed = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    assert listed == shown


def test_a_taken_metrics_port_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "bridge", "serve", "sim", "--port", "0", "--metrics-port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and f"port {port} on 127.0.0.1 is already in use" in done.stderr
    assert "--metrics-port" in done.stderr
