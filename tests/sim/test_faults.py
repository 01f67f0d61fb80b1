"""Faults on demand, each by the way that fits it: a flag, the utility call, the control socket, a signal."""

from __future__ import annotations

import signal
import time

import msgpack
import pytest

from bridge.plugins.sim import faults
from bridge.plugins.sim.control import ControlError, SimControl
from bridge.plugins.sim.tokens import expected_tokens
from tests.sim.conftest import Start
from tests.sim.front_end import EVENTS, OUTPUTS, REQUEST_ID, STATS, TOKENS


def test_exit_is_silent_and_keeps_its_code(start: Start) -> None:
    front = start("--fault", "exit:7@requests:2")
    front.generate([5], {"max_tokens": 2}, "a")
    front.add("b", [5], {"max_tokens": 500})
    assert front.engine.process.wait(5) == 7
    raw = []
    while (payload := front.receive_raw(0.2)) is not None:
        raw.append(payload)
    assert b"ENGINE_CORE_DEAD" not in raw


def test_kill_after_steps_leaves_what_was_sent(start: Start) -> None:
    front = start("--fault", "kill@steps:10")
    front.add("a", [5], {"max_tokens": 500})
    assert front.engine.process.wait(5) == -signal.SIGKILL
    tokens: list[int] = []
    while (payload := front.receive_raw(0.2)) is not None:
        for output in msgpack.unpackb(payload)[OUTPUTS]:
            tokens += output[1]
    assert tokens == expected_tokens([5], 10)


def test_a_death_frame_by_utility_call_comes_after_its_answer(start: Start) -> None:
    front = start(pairs=2)
    assert front.value("sim_fault", "death_frame") is None
    assert front.dies() == 0


def test_a_fault_by_signal(start: Start) -> None:
    front = start("--fault", "exit:3@signal")
    front.generate([5], {"max_tokens": 2})
    front.engine.process.send_signal(signal.SIGUSR1)
    assert front.engine.process.wait(5) == 3


def test_a_wedged_engine_answers_nobody_but_the_control_socket(start: Start) -> None:
    front = start()
    with SimControl(front.control) as control:
        control.fault("wedge")
        front.engine.wait_for("fault: wedge", 5)
        front.add("a", [5], {"max_tokens": 2})
        front.send(3, msgpack.packb([0, 1, "is_sleeping", []]))
        assert front.arrivals() == []
        assert control.state()["running"] == 0
    begun = time.monotonic()
    assert front.engine.stop() == 0
    assert time.monotonic() - begun < 1, "a stop signal still works"


def test_a_hanging_loop_goes_on_afterwards(start: Start) -> None:
    front = start("--fault", "hang_loop:0.6@requests:1")
    begun = time.monotonic()
    assert front.generate([5], {"max_tokens": 2}).tokens == expected_tokens([5], 2)
    assert time.monotonic() - begun >= 0.5


def test_a_dead_input_thread_lets_running_requests_end(start: Start) -> None:
    front = start("--step-ms", "10", "--fault", "wedge_input@steps:1")
    assert front.generate([5], {"max_tokens": 20}).tokens == expected_tokens([5], 20)


def test_a_dead_output_thread_sends_nothing(start: Start) -> None:
    front = start("--fault", "wedge_output@steps:3")
    front.add("a", [5], {"max_tokens": 20})
    steps = [front.receive()[OUTPUTS] for _ in range(3)]
    assert [token for outputs in steps for output in outputs for token in output[TOKENS]] == expected_tokens([5], 3)
    assert front.arrivals() == []
    assert front.engine.process.poll() is None, "it runs on in silence"


def test_messages_are_dropped_garbled_and_doubled(start: Start) -> None:
    plain = expected_tokens([5], 20)
    front = start("--fault", "drop:2@steps:3", "--fault", "garble@steps:8", "--fault", "duplicate@steps:12")
    front.add("a", [5], {"max_tokens": 20})
    tokens: list[int] = []
    garbled = 0
    while (payload := front.receive_raw(0.5)) is not None:
        try:
            message = msgpack.unpackb(payload)
        except (ValueError, msgpack.exceptions.FormatError):
            garbled += 1
            continue
        for output in message[OUTPUTS]:
            tokens += output[1]
    assert tokens == [*plain[:3], *plain[5:8], *plain[9:12], plain[12], *plain[12:]]
    assert garbled == 1


def test_outputs_for_nobodys_request(start: Start) -> None:
    front = start("--fault", "unknown_ids:2@steps:1")
    front.add("a", [5], {"max_tokens": 5})
    front.until(lambda message: message[OUTPUTS] == [])
    ids = [[output[REQUEST_ID] for output in message[OUTPUTS]] for message in front.messages]
    assert [len(step) for step in ids] == [1, 2, 2, 1, 1, 0]
    assert ids[1][0] == "a" != ids[1][1]


def test_tokens_per_step_pace_and_statistics_change_while_it_runs(start: Start) -> None:
    front = start()
    front.value("sim_fault", "tokens_per_step", 3)
    front.value("sim_fault", "stats", "off")
    front.value("sim_fault", "step_ms", 30)
    front.engine.wait_for("fault: step_ms", 5)
    begun = time.monotonic()
    answer = front.generate([5], {"max_tokens": 15})
    assert time.monotonic() - begun >= 0.14
    assert answer.tokens == expected_tokens([5], 15) and len(answer.outputs) == 5
    assert all(output[EVENTS] is None for output in answer.outputs)
    assert all(message[STATS] is None for message in front.messages)


@pytest.mark.parametrize(
    "text", ["", "kill:3", "drop:x", "drop:-1", "tokens_per_step:0", "kill@never", "kill@steps:x", "kill@signal:2"]
)
def test_a_fault_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        faults.parse(text)


def test_every_kind_is_in_the_module_docstring() -> None:
    assert faults.__doc__
    assert all(f"| {kind} |" in faults.__doc__ for kind in faults.DEFAULTS)


def test_the_control_socket_names_what_is_wrong(start: Start) -> None:
    front = start()
    with SimControl(front.control) as control:
        with pytest.raises(ControlError, match="explode"):
            control.fault("explode")
        with pytest.raises(ControlError, match="no method 'stop'"):
            control._call("stop")
    with SimControl(front.control + "-nobody", timeout_s=0.2) as nobody, pytest.raises(ControlError, match="no answer"):
        nobody.state()
