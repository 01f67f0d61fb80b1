"""How the process ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import msgpack
import psutil
import pytest
import zmq

from bridge.plugins.sim.control import SimControl
from tests.running import gone_within
from tests.sim.conftest import Start
from tests.sim.front_end import ABORT, FINISH, OUTPUTS, ROOT, UTILITY, FrontEnd


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_it_within_a_second_and_without_terminals(start: Start, number: signal.Signals) -> None:
    front = start("--step-ms", "20")
    front.add("a", [5], {"max_tokens": 1000})
    front.receive()
    begun = time.monotonic()
    front.engine.process.send_signal(number)
    assert front.engine.process.wait(5) == 0
    assert time.monotonic() - begun < 1
    while (payload := front.receive_raw(0.2)) is not None:
        assert all(output[FINISH] is None for output in msgpack.unpackb(payload)[OUTPUTS])


def test_a_stop_signal_ends_it_while_it_waits_for_init_and_while_it_loads(start: Start) -> None:
    waiting = start(shake=False)
    waiting.receive_handshake()
    loading = start("--load-seconds", "60", shake=False)
    loading.receive_handshake()
    loading.send_init()
    loading.engine.wait_for("loading weights", 5)
    with SimControl(loading.control) as control:
        assert control.state()["phase"] == "loading"
    for front in (waiting, loading):
        begun = time.monotonic()
        assert front.engine.stop() == 0
        assert time.monotonic() - begun < 1


def test_a_shutdown_timeout_drains_and_refuses(start: Start) -> None:
    front = start("--step-ms", "20", "--shutdown-timeout", "10")
    front.add("a", [5], {"max_tokens": 30})
    front.receive()
    front.engine.process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    front.add("late", [5], {"max_tokens": 30})
    front.send(3, msgpack.packb([0, 9, "is_sleeping", []]))
    finishes = {}
    failure = None
    while (payload := front.receive_raw(1)) is not None:
        message = msgpack.unpackb(payload)
        failure = message[UTILITY][1] if message[UTILITY] else failure
        finishes.update({output[0]: output[FINISH] for output in message[OUTPUTS]})
    assert finishes == {"a": 1, "late": ABORT}
    assert failure == "Server shutting down"
    assert front.engine.process.wait(5) == 0


def test_a_shutdown_timeout_is_a_limit(start: Start) -> None:
    front = start("--step-ms", "20", "--shutdown-timeout", "0.3")
    front.add("a", [5], {"max_tokens": 1000})
    front.receive()
    begun = time.monotonic()
    assert front.engine.stop() == 0
    assert 0.2 < time.monotonic() - begun < 1.5


def test_it_ends_with_its_parent_when_asked(start: Start) -> None:
    front = start(shake=False)
    port = front.handshake.getsockopt_string(zmq.LAST_ENDPOINT)
    command = [sys.executable, "-m", "bridge.plugins.sim", "--zmq-handshake-address", port, "--exit-with-parent"]
    script = f"import subprocess,time; p=subprocess.Popen({command!r}); print(p.pid, flush=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout
    child = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.7)
    assert child.is_running()
    parent.kill()
    parent.wait(5)
    parent.stdout.close()
    assert not gone_within([child], 2)


def test_a_front_end_that_comes_back_gets_what_was_generated_meanwhile(start: Start) -> None:
    front = start("--step-ms", "5")
    front.add("a", [5], {"max_tokens": 100})
    front.receive()
    rebind(front)
    time.sleep(0.3)
    count, finish = 1, None
    while finish is None:
        for output in front.receive()[OUTPUTS]:
            count, finish = count + len(output[1]), output[FINISH]
    assert count >= 95  # what arrives between the last look and the close is lost with the sockets
    front.add("b", [5], {"max_tokens": 1})
    assert front.until(lambda message: bool(message[OUTPUTS]))[OUTPUTS][0][0] == "b"


def rebind(front: FrontEnd) -> None:
    """Drop the sockets as a dying front end does (what it had received is lost) and bind them again."""
    kept: list[bytes] = []
    while (payload := front.receive_raw(0)) is not None:
        kept.append(payload)
    for socket in (*front.inputs, *front.outputs):
        socket.close(0)
    front.inputs = [front.bound(zmq.ROUTER, "i0")]
    front.outputs = [front.bound(zmq.PULL, "o0")]
