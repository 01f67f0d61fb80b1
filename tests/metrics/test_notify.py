"""What systemd hears, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.supervisor.notify import Notifier


class Listener:
    """systemd's side."""

    def __init__(self, path: Path | str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(5)

    def next(self) -> list[str]:
        return self.socket.recv(4096).decode().split("\n")


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path / "notify")
    yield listener
    listener.socket.close()


@contextlib.contextmanager
def told(listener: Listener, **more: str) -> Iterator[Notifier]:
    name = listener.socket.getsockname()
    address = "@" + name[1:].decode() if isinstance(name, bytes) else name
    notifier = Notifier({"NOTIFY_SOCKET": address, **more})
    yield notifier
    notifier.close()


def test_a_life_is_told_in_its_words(systemd: Listener) -> None:
    with told(systemd) as notifier:
        notifier.progress("loading\nthe model")
        assert systemd.next() == ["EXTEND_TIMEOUT_USEC=60000000", "STATUS=loading the model"]
        notifier.ready("serving m")
        assert systemd.next() == ["READY=1", "STATUS=serving m"]
        notifier.reloading()
        word, at, status = systemd.next()
        assert (word, status) == ("RELOADING=1", "STATUS=reloading")
        assert abs(int(at.removeprefix("MONOTONIC_USEC=")) - time.monotonic() * 1e6) < 5e6
        notifier.status("engine lost")
        assert systemd.next() == ["STATUS=engine lost"]
        notifier.stopping("asked for")
        assert systemd.next() == ["STOPPING=1", "STATUS=asked for"]


def test_abstract_sockets_work() -> None:
    name = f"headless-bridge-test-{os.getpid()}"
    listener = Listener("\0" + name)
    with told(listener) as notifier:
        notifier.ready("x")
    assert listener.next()[0] == "READY=1"
    listener.socket.close()


def test_children_do_not_inherit_the_variables(systemd: Listener) -> None:
    environment = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "OTHER": "stays"}
    Notifier(environment)
    assert environment == {"OTHER": "stays"}


async def test_the_watchdog_hears_from_the_loop_often_enough(systemd: Listener) -> None:
    with told(systemd, WATCHDOG_USEC="200000", WATCHDOG_PID=str(os.getpid())) as notifier:
        notifier.start_watchdog()
        await asyncio.sleep(0.5)
    systemd.socket.settimeout(0.1)
    beats = 0
    while True:
        try:
            assert systemd.next() == ["WATCHDOG=1"]
        except TimeoutError:
            break
        beats += 1
    assert beats >= 4


async def test_a_watchdog_of_another_process_is_not_ours(systemd: Listener) -> None:
    with told(systemd, WATCHDOG_USEC="100000", WATCHDOG_PID="1") as notifier:
        notifier.start_watchdog()
        await asyncio.sleep(0.1)
    systemd.socket.settimeout(0.1)
    with pytest.raises(TimeoutError):
        systemd.next()


def test_nobody_listens_nothing_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Notifier({}).ready("x")
    assert not caplog.records
    gone = Notifier({"NOTIFY_SOCKET": str(tmp_path / "nothing")})
    gone.ready("x")
    gone.ready("x")
    assert len(caplog.records) == 1
