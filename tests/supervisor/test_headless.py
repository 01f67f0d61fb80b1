"""`python -m bridge.headless`: a supervised engine behind a handshake that somebody else binds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from bridge.wire.handshake import Handshake, HandshakeServer
from bridge.wire.link import Slot, slot_addresses
from tests.running import Running, gone_within, unused_port

HEADLESS = (sys.executable, "-m", "bridge.headless")


def headless(*arguments: object, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    command = [*HEADLESS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


class Gateway:
    """The gateway's side: a handshake and one slot."""

    def __init__(self, folder: Path, first_rank: int = 0) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.server = HandshakeServer(self.context, "tcp://127.0.0.1:*")
        self.slot = Slot(0, *slot_addresses(folder, 0))
        self.handshake = Handshake(
            inputs=[self.slot.input_address], outputs=[self.slot.output_address], first_rank=first_rank
        )
        self.heard: set[bytes] = set()
        """The identities that dialled."""

    def serve_until_up(self, process: Running, within_s: float = 20.0) -> None:
        end = time.monotonic() + within_s
        while not self.handshake.done:
            process.must_run("starting")
            assert time.monotonic() < end, process.output()
            self.answer()
            while (received := self.slot.receive_ready()) is not None:
                self.handshake.receive_ready_map(*received)
            time.sleep(0.01)

    def answer(self) -> bool:
        """Reply to what waits on the handshake; whether anything did."""
        got = False
        while (received := self.server.receive()) is not None:
            got = True
            self.heard.add(received[0])
            for reply in self.handshake.receive(*received):
                self.server.send(*reply)
        return got

    def close(self) -> None:
        self.slot.close()
        self.server.close()
        self.context.term()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    made = Gateway(tmp_path)
    yield made
    made.close()


def start(gateway: Gateway, folder: Path, *arguments: str) -> Running:
    command = [*HEADLESS, "--engine", "sim", "--zmq-handshake-address", gateway.server.address, *arguments]
    return Running(command, folder / "log")


def test_the_engine_dials_and_one_signal_stops_it_all(gateway: Gateway, tmp_path: Path) -> None:
    with start(gateway, tmp_path) as process:
        gateway.serve_until_up(process)
        process.wait_for(f"sim dialled {gateway.server.address}", 10)
        tree = process.tree()
        assert len(tree) == 3  # itself, the leash, the engine
        assert process.stop() == 0
        assert gone_within(tree, 0) == []


def test_the_engine_index_is_its_identity(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, first_rank=5)
    with start(gateway, tmp_path, "--zmq-engine-index", "5") as process:
        gateway.serve_until_up(process)
    gateway.close()
    assert gateway.heard == {b"\5\0"} and gateway.handshake.done


def test_kill_minus_nine_leaves_no_process(gateway: Gateway, tmp_path: Path) -> None:
    with start(gateway, tmp_path) as process:
        gateway.serve_until_up(process)
        tree = process.tree()
        os.kill(process.pid, signal.SIGKILL)
        assert gone_within(tree, 5.0) == []


def test_it_waits_for_a_gateway_that_comes_later(tmp_path: Path) -> None:
    port = unused_port()
    command = [*HEADLESS, "--engine", "sim", "--zmq-handshake-address", f"tcp://127.0.0.1:{port}"]
    with Running(command, tmp_path / "log") as process:
        process.wait_for(f"nobody listens at tcp://127.0.0.1:{port} yet", 10)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        server = HandshakeServer(context, f"tcp://127.0.0.1:{port}")
        process.wait_for("sim dialled", 10)
        assert process.stop() == 0
        server.close()
        context.term()


def test_an_engine_that_dies_is_explained(gateway: Gateway, tmp_path: Path) -> None:
    with start(gateway, tmp_path, "--die-while-loading", "--load-seconds", "1") as process:
        process.wait_for("dials", 10)
        while process.process.poll() is None:
            gateway.answer()
            time.sleep(0.01)
        assert process.process.returncode == 1
        *_, before, last = process.output().splitlines()
        assert last.startswith("headless-bridge: sim exited with code 1") and "die-while-loading" in before


def test_nobody_at_the_address_is_one_line() -> None:
    address = f"tcp://127.0.0.1:{unused_port()}"
    done = headless(
        "--engine", "sim", "--zmq-handshake-address", address, "--handshake-timeout", "1", "--log-level", "warning"
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert f"nobody listens at the handshake address {address} after 1 s" in done.stderr
    assert "--handshake-timeout" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "sim"], "--zmq-handshake-address is missing"),
        (["--engine", "nope", "--zmq-handshake-address", "tcp://h:1"], "unknown engine 'nope'"),
        (["--engine", "sim", "--zmq-handshake-address", "127.0.0.1:1"], "'127.0.0.1:1' is no address"),
        (["--engine", "sim", "--zmq-handshake-address", "tcp://127.0.0.1"], "is no address"),
        (["--engine", "sim", "--zmq-handshake-address", "tcp://h:1", "--zmq-engine-index", "-1"], "--zmq-engine-index"),
        (["--engine", "sim", "--zmq-handshake-address", "tcp://h:1", "/no/such"], "/no/such does not exist"),
    ],
)
def test_what_cannot_work_is_one_line(arguments: list[str], words: str) -> None:
    done = headless(*arguments)
    assert done.returncode == 2 and words in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_an_index_without_data_parallel_flags_is_refused_on_vllm(vllm_python: Path, tiny_llama: Path) -> None:
    address = ["--zmq-handshake-address", "tcp://127.0.0.1:1"]
    flags = ["--engine-python", vllm_python, "--zmq-engine-index", "1", tiny_llama]
    done = headless("--engine", "vllm", *address, *flags)
    assert done.returncode == 2 and "--data-parallel-size" in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_only_installed_engine_needs_no_name(vllm_python: Path, tiny_llama: Path) -> None:
    command = [vllm_python, "-m", "bridge.headless", "--zmq-handshake-address", "ipc:///x", tiny_llama]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and "headless vLLM dials tcp only" in done.stderr


def test_help_shows_how_to_run_it() -> None:
    done = headless("--help")
    assert done.returncode == 0 and "--zmq-handshake-address" in done.stdout and "--handshake-timeout" in done.stdout
