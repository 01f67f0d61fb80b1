"""Utility calls: the busy loop's answers between two steps."""

from __future__ import annotations

import time
from typing import Any

import pytest

from bridge.plugins.sim.tokens import expected_tokens
from tests.sim.conftest import Start
from tests.sim.front_end import ABORT, FINISHED, OUTPUTS, PREFILL, REQUEST_ID, STATS, UTILITY


@pytest.mark.parametrize(
    ("method", "args", "value"),
    [
        ("get_supported_tasks", (), ["generate"]),
        ("is_sleeping", (), False),
        ("is_scheduler_paused", (), False),
        ("reset_prefix_cache", (), True),
        ("reset_prefix_cache", (False, False), True),
        ("reset_mm_cache", (), None),
        ("reset_encoder_cache", (), None),
        ("execute_dummy_batch", (), None),
        ("wake_up", (), True),
        ("get_weight_version", (), "default"),
        (
            "get_kv_cache_group_metadata",
            (),
            [{"group_idx": 0, "kind": "full_attention", "block_size": 16, "sliding_window": None}],
        ),
    ],
    ids=repr,
)
def test_a_call_is_answered_as_a_default_engine_would(
    start: Start, method: str, args: tuple[Any, ...], value: Any
) -> None:
    front = start()
    assert front.value(method, *args) == value
    assert front.messages[-1][OUTPUTS] == [] and front.messages[-1][STATS] is None


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("list_loras", ()),
        ("add_lora", (["name", 1, "path", None, False, False],)),
        ("profile", ()),
        ("profile", (True, None)),
        ("no_such_method", (1, 2)),
        ("is_sleeping", ("too", "many")),
        ("pause_scheduler", ("sideways",)),
        ("_sleep", ()),
        ("sim_fault", ("explode",)),
        (5, ()),
    ],
    ids=repr,
)
def test_a_call_that_cannot_be_is_a_failure_text_and_harms_nothing(
    start: Start, method: Any, args: tuple[Any, ...]
) -> None:
    front = start()
    _, failure, result = front.call(method, *args)
    assert failure.startswith(f"Call to {method} method failed: ") and result is None
    assert front.generate([5], {"max_tokens": 2}).tokens == expected_tokens([5], 2)


def test_profile_works_when_configured_and_takes_one_more_argument_from_033_on(start: Start) -> None:
    old = start("--profiler")
    assert old.value("profile", True, "prefix", None, None) is None
    assert old.call("profile", True, None, None, None, {})[1] is not None
    assert start("--profiler", "--wire-version", "0.33.0").value("profile", False, None, None, None, {}) is None


def test_a_call_waits_for_the_step_in_progress(start: Start) -> None:
    front = start("--step-ms", "200")
    front.add("a", [5], {"max_tokens": 50})
    front.receive()
    time.sleep(0.05)
    front.call("is_sleeping")
    kinds = ["call" if message[UTILITY] else "step" for message in front.messages]
    assert kinds == ["step", "step", "call"]


def test_the_prefix_cache_is_not_reset_under_a_running_request_unless_forced(start: Start) -> None:
    front = start("--step-ms", "10")
    prompt = list(range(100, 164))
    front.add("a", prompt, {"max_tokens": 60})
    front.receive()
    assert front.value("reset_prefix_cache") is False
    assert front.value("reset_prefix_cache", True) is True
    front.until(lambda message: any(output[5] is not None for output in message[OUTPUTS]))
    tokens = [token for message in front.messages for output in message[OUTPUTS] for token in output[1]]
    assert tokens == expected_tokens(prompt, 60), "preempted, computed again, nothing lost"


def test_a_reset_forgets_prompts(start: Start) -> None:
    front = start()
    prompt = list(range(100, 164))
    front.generate(prompt, {"max_tokens": 1}, "a")
    assert front.value("reset_prefix_cache") is True
    answer = front.generate(prompt, {"max_tokens": 1}, "b")
    assert answer.outputs[0][PREFILL]["num_cached_tokens"] == 0
    assert any(message[STATS]["prefix_cache_stats"]["reset"] for message in front.messages if message[STATS])


def test_pause_abort_ends_everything_aloud_and_queues_what_comes(start: Start) -> None:
    front = start("--step-ms", "10", pairs=2)
    front.add("a", [5], {"max_tokens": 1000})
    front.add("b", [6], {"max_tokens": 1000}, client=1)
    front.receive()
    assert front.value("pause_scheduler", "abort", True) is None
    ended = [message for message in front.messages if message[FINISHED]]
    assert [(message[FINISHED], message[OUTPUTS][0][5]) for message in ended] == [(["a"], ABORT)]
    assert front.collect("b", client=1)["b"].finish == ABORT
    assert front.value("is_scheduler_paused") is True
    front.add("c", [7], {"max_tokens": 2})
    assert front.arrivals() == []
    assert front.value("resume_scheduler") is None
    assert front.collect("c")["c"].tokens == expected_tokens([7], 2)


def test_pause_wait_lets_running_requests_end_and_answers_then(start: Start) -> None:
    front = start("--step-ms", "5", "--max-num-seqs", "1")
    front.add("runs", [5], {"max_tokens": 20})
    front.add("waits", [6], {"max_tokens": 2})
    front.receive()
    assert front.value("pause_scheduler", "wait", False) is None
    seen = [output[REQUEST_ID] for message in front.messages for output in message[OUTPUTS]]
    assert seen == ["runs"] * 20
    front.value("resume_scheduler")
    assert front.collect("waits")["waits"].tokens == expected_tokens([6], 2)


def test_pause_keep_freezes_and_resume_goes_on(start: Start) -> None:
    front = start("--step-ms", "5")
    front.add("a", [5], {"max_tokens": 40})
    front.receive()
    front.value("pause_scheduler", "keep", False)
    assert front.arrivals() == []
    front.value("resume_scheduler")
    front.until(lambda message: any(output[5] is not None for output in message[OUTPUTS]))
    tokens = [token for message in front.messages for output in message[OUTPUTS] for token in output[1]]
    assert tokens == expected_tokens([5], 40)


def test_sleep_and_wake_up(start: Start) -> None:
    front = start()
    front.value("sleep", 1)
    assert front.value("is_sleeping") is True
    assert front.value("wake_up", ["scheduling"]) is False, "memory is still asleep"
    assert front.value("wake_up") is True
    assert front.value("is_sleeping") is False
    assert front.generate([5], {"max_tokens": 2}).tokens == expected_tokens([5], 2)


def test_the_state_tells_counts_and_ids(start: Start) -> None:
    front = start("--step-ms", "10", "--max-num-seqs", "2")
    front.generate([5], {"max_tokens": 1}, "done")
    for request_id in ("x", "y", "z"):
        front.add(request_id, [5], {"max_tokens": 1000})
    front.until(lambda message: message[STATS]["num_waiting_reqs"] == 1)
    state = front.value("sim_state")
    assert (state["running"], state["waiting"], state["phase"]) == (2, 1, "ready")
    assert (state["running_ids"], state["waiting_ids"], state["finished_ids"]) == (["x", "y"], ["z"], ["done"])
    front.abort("x", "z")
    state = front.value("sim_state")
    assert (state["running_ids"], state["waiting_ids"], state["aborted"]) == (["y"], [], 2)
    assert state["kv_blocks_used"] >= 1
