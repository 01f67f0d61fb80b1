"""What a run shows of itself in each state, over HTTP and to systemd."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from asyncio import to_thread
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.supervisor.listeners import bind_metrics
from bridge.supervisor.measures import COUNTER, Family, single
from bridge.supervisor.notify import Notifier
from bridge.supervisor.operations import PROGRESS_INTERVAL_S, Operations
from tests.metrics.test_measures import read


class Source:
    """Front ends that this test speaks for."""

    why = ""

    asked = 0

    async def refresh(self) -> None:
        self.asked += 1

    def measured(self) -> list[Family]:
        return [single("x_total", COUNTER, "x", self.asked)]

    def unserved(self) -> str:
        return self.why


class Run:
    """Operations, systemd's ear, and the clock."""

    def __init__(self, folder: Path) -> None:
        self.ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ear.bind(str(folder / "notify"))
        self.ear.setblocking(False)
        self.now = 0.0
        self.restarts = {"engine": 0, "front_end": 0}
        notifier = Notifier({"NOTIFY_SOCKET": str(folder / "notify")})
        self.operations = Operations(notifier, engine="sim", counts=lambda: self.restarts, clock=lambda: self.now)

    def heard(self) -> list[str]:
        words = []
        while True:
            try:
                words.append(self.ear.recv(4096).decode())
            except BlockingIOError:
                return words

    def series(self, name: str, **labels: str) -> float:
        return read(self.operations.exposition())["headless_bridge_" + name, tuple(sorted(labels.items()))]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.operations.close()
    made.ear.close()


def test_a_start_is_told_when_it_says_something_new_and_now_and_then(run: Run) -> None:
    run.operations.loading("importing", 1)
    run.operations.loading("importing", 2)
    run.operations.loading("loading the model", 3)
    run.now += PROGRESS_INTERVAL_S
    run.operations.loading("loading the model", 13)
    assert [word.rpartition("STATUS=")[2] for word in run.heard()] == [
        "sim is importing, 1 s",
        "sim is loading the model, 3 s",
        "sim is loading the model, 13 s",
    ]
    assert run.operations.unready() == "loading: loading the model"


def test_readiness_follows_the_state_and_the_front_ends(run: Run) -> None:
    operations = run.operations
    operations.serving("m")
    assert operations.unready() == "no front end"
    operations.source = source = Source()
    assert operations.unready() == "" and run.series("ready") == 1
    source.why = "draining"
    assert operations.unready() == "draining" and run.series("ready") == 0
    source.why = ""
    operations.reloading()
    assert operations.unready() == "" and run.series("state", state="reloading") == 1, "an upgrade serves on"
    operations.reloaded()
    assert run.series("state", state="serving") == 1
    operations.restarting("sim was ended by SIGKILL")
    assert operations.unready() == "restarting: sim was ended by SIGKILL"
    operations.loading("importing", 0.5)
    assert operations.unready() == "restarting: importing"
    operations.stopping("SIGTERM asked for it")
    assert operations.unready() == "stopping: SIGTERM asked for it"


def test_the_state_is_one_series_of_several(run: Run) -> None:
    run.operations.serving("m")
    run.restarts["engine"] = 2
    states = {state: run.series("state", state=state) for state in ("loading", "serving", "restarting", "stopping")}
    assert states == {"loading": 0, "serving": 1, "restarting": 0, "stopping": 0}
    assert run.series("restarts_total", part="engine") == 2
    assert abs(run.series("start_time_seconds") - time.time()) < 60
    assert "serving m" in run.heard()[0]


async def test_probes_and_scrapes_over_http(run: Run) -> None:
    listener = bind_metrics("127.0.0.1", 0)
    await run.operations.serve(listener)
    listener.close()

    async def get(path: str) -> tuple[int, str, str]:
        def once() -> tuple[int, str, str]:
            try:
                with urllib.request.urlopen(f"http://{listener.address}{path}", timeout=10) as answer:
                    return answer.status, answer.read().decode(), answer.headers["Content-Type"]
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read().decode(), error.headers["Content-Type"]

        return await to_thread(once)

    assert (await get("/livez"))[:2] == (await get("/healthz"))[:2] == (200, "alive: loading\n")
    assert (await get("/readyz"))[:2] == (503, "not ready: loading\n")
    run.operations.source = Source()
    run.operations.serving("m")
    assert (await get("/readyz"))[:2] == (200, "ready\n")
    status, text, content_type = await get("/metrics")
    assert status == 200 and content_type.startswith("text/plain; version=0.0.4")
    found = read(text)
    assert found["x_total", ()] == 1
    assert found["headless_bridge_info", (("engine", "sim"), ("model", "m"), ("version", "0.1.0"))] == 1
