"""What wedges or kills vLLM must do the same here, so that a bridge that lets it through is found out."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import msgpack
import pytest
import zmq

from bridge.plugins.sim.tokens import expected_tokens
from tests.sim.conftest import Start
from tests.sim.front_end import DEAD, ERROR, FINISHED, OUTPUTS, FrontEnd, add_request


class Aftermath(NamedTuple):
    """What an engine did after a message that wedges its input thread."""

    tokens: list[int]
    """Of the request that ran."""
    refusal: str
    """What ZMQ says to the next request; empty when the engine's socket is still there."""
    arrivals: list[Any]
    """Messages after that."""
    exit_code: int | None


def aftermath(front: FrontEnd, running: str = "runs") -> Aftermath:
    tokens = front.collect(running)[running].tokens
    front.engine.wait_for("the input thread died", 5)
    front.receive()
    return Aftermath(tokens, refusal_of_more(front), front.arrivals(), front.engine.process.poll())


def refusal_of_more(front: FrontEnd, within_s: float = 5.0) -> str:
    """Add requests until ZMQ refuses one: the ROUTER notices a moment after the engine closed."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            front.add("later", [5], {"max_tokens": 1})
        except zmq.ZMQError as error:
            return str(error)
        time.sleep(0.01)
    return ""


WEDGED = Aftermath(tokens=expected_tokens([5], 30), refusal="Host unreachable", arrivals=[], exit_code=None)
"""The request that runs ends well; the process lives, its input socket is gone."""


@pytest.mark.parametrize("sampling", [{"temperature": -1}, {"top_p": 0.0}, {"max_tokens": 0}], ids=repr)
def test_sampling_values_the_decoder_rejects_wedge_the_input(start: Start, sampling: dict[str, Any]) -> None:
    front = start()
    front.add("runs", [5], {"max_tokens": 30})
    front.add("bad", [5], sampling)
    assert aftermath(front) == WEDGED


@pytest.mark.parametrize(
    "payload",
    [
        [9, b"\xc0"],
        [0, b"\xc1"],
        [0],
        [0, msgpack.packb(["only an id"])],
        [3, msgpack.packb([0, 1, "is_sleeping"])],
        [1, b"\xc1"],
    ],
    ids=repr,
)
def test_messages_the_input_thread_cannot_read_wedge_it(start: Start, payload: list[Any]) -> None:
    front = start()
    front.add("runs", [5], {"max_tokens": 30})
    front.send(*payload)
    assert aftermath(front) == WEDGED


def test_a_client_index_without_a_socket_silences_the_engine(start: Start) -> None:
    front = start()
    front.add("a", [5], {"max_tokens": 3}, client=1)
    front.engine.wait_for("the output thread died", 5)
    front.add("b", [5], {"max_tokens": 3})
    front.send(3, msgpack.packb([0, 1, "is_sleeping", []]))
    assert front.arrivals() == []
    assert front.engine.process.poll() is None, "it lives, and says nothing"


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([], {}),
        ([5, 32000], {}),
        ([5, -1], {}),
        ([5] * 101, {}),
        ([5], {"logit_bias": {32000: 1.0}}),
        ([5], {"allowed_token_ids": [1, 32000]}),
        ([5], {"min_tokens": 1, "stop_token_ids": [32000]}),
    ],
    ids=repr,
)
def test_requests_that_kill_the_busy_loop_kill_it_for_everybody(start: Start, prompt: Any, sampling: Any) -> None:
    front = start("--max-model-len", "100", pairs=2)
    front.add("innocent", [5], {"max_tokens": 90})
    front.add("bad", prompt, sampling, client=1)
    assert front.dies() == 0, "vLLM's launcher exits 0 too"
    assert "Traceback" not in front.engine.output()


def test_a_live_id_again_kills(start: Start) -> None:
    front = start()
    front.add("a", [5], {"max_tokens": 50})
    front.add("a", [6], {"max_tokens": 50})
    assert front.dies() == 0


@pytest.mark.parametrize("payload", [[1, msgpack.packb(5)], [4, b"\xc0"]], ids=repr)
def test_an_abort_without_ids_and_a_forged_failure_kill(start: Start, payload: list[Any]) -> None:
    front = start()
    front.send(*payload)
    assert front.dies() == 0


def test_a_pooling_request_kills_a_generation_engine(start: Start) -> None:
    front = start()
    front.send(0, msgpack.packb(add_request("a", [5], pooling_params=[None, None, None, None, "embed"])))
    assert front.dies() == 0


def test_a_dying_engine_may_linger(start: Start) -> None:
    front = start("--exit-delay-s", "0.5")
    front.add("a", [], {})
    assert front.outputs[0].recv_multipart() == [DEAD]
    front.engine.must_run("lingering")
    assert front.engine.process.wait(5) == 0


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [([5], {"max_tokens": None}), ([5], {"structured_outputs": {"regex": "a"}}), (None, {})],
    ids=repr,
)
def test_what_preparation_refuses_is_one_failed_request(start: Start, prompt: Any, sampling: Any) -> None:
    front = start()
    front.add("bad", prompt, sampling)
    assert front.collect("bad")["bad"].finish == ERROR
    assert front.messages[0][FINISHED] == ["bad"]
    assert front.generate([5], {"max_tokens": 3}, "good").tokens == expected_tokens([5], 3)


def test_no_parameters_at_all_is_one_failed_request(start: Start) -> None:
    front = start()
    request = add_request("bad", [5])
    request[3] = None
    front.send(0, msgpack.packb(request))
    assert front.collect("bad")["bad"].finish == ERROR


def test_what_vllm_ignores_is_ignored(start: Start) -> None:
    front = start()
    request = add_request("a", [5], {"max_tokens": 3, "no_such_key": [1], "n": 2, "stop": ["x"], "seed": None})
    request[8] = 7
    front.send(0, msgpack.packb([*request, "an element of a later release"]))
    assert front.collect("a")["a"].tokens == expected_tokens([5], 3)


@pytest.mark.parametrize("length", [9, 14])
def test_a_short_request_takes_defaults(start: Start, length: int) -> None:
    front = start()
    front.send(0, msgpack.packb(add_request("a", [5], {"max_tokens": 3})[:length]))
    assert front.collect("a")["a"].tokens == expected_tokens([5], 3)


def test_wave_and_wakeup_messages_change_nothing(start: Start) -> None:
    front = start()
    front.send(2, msgpack.packb([0, None]))
    front.send(5, b"\xc0")
    assert front.generate([5], {"max_tokens": 2}).tokens == expected_tokens([5], 2)
    assert len(front.messages[0][OUTPUTS]) == 1
